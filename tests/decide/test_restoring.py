"""What a node has lost comes from others; what cannot be got, or was tried in vain, is passed over and told."""

from __future__ import annotations

from math import nan

import pytest
from msgspec.structs import replace

from evertrain.controller import views
from evertrain.model.records import StoreCommitted
from evertrain.model.report import Exit, RankError
from support.world import World

DAMAGED = RankError(type="evertrain.worker.checkpointer.CheckpointDamaged", message="rank 2: no whole copy of step 4")


@pytest.fixture
def world() -> World:
    """Two nodes of two ranks, five steps in; step 2 is backed up."""
    made = World(nodes=2)
    made.turns()
    made.train(3)
    made.turns()
    made.back_up(2)
    made.train(2)
    made.turns()
    return made


def resumed(world: World) -> int | None:
    assert world.state.active is not None
    return world.state.active.started.resume


def status(world: World) -> dict[str, object]:
    return views.status(world.state, world.picture(), job="job", now=world.now)


def test_a_wiped_node_gets_its_ranks_state_from_the_others(world: World) -> None:
    world.wipe("node-1")
    world.turns()
    assert world.running() == dict.fromkeys(range(4), 2)
    assert resumed(world) == 2
    assert {copy.step for copy in world.nodes["node-1"].memory} == {2}


def test_what_cannot_be_fetched_is_said_and_not_waited_for(world: World) -> None:
    world.fetches_fail = True
    world.wipe("node-1")
    world.turns()
    assert resumed(world) is None and world.running() == dict.fromkeys(range(4), 2)
    assert "started again from nothing after step 4" in str(status(world)["message"])
    (incident,) = views.incidents(world.state)
    assert any("step 2 of rank 2 could not be fetched" in line for line in incident["evidence"])


def test_a_job_that_ends_meanwhile_keeps_the_step_too(world: World) -> None:
    world.wipe("node-1")
    world.stop()
    world.turns(20)
    assert world.state.flushed is not None and world.state.flushed.step == 2
    assert world.state.ended is not None and "step 2 is on disk" in world.state.ended.message


def test_only_what_lies_on_other_nodes_is_no_risk(world: World) -> None:
    assert status(world)["steps_at_risk"] == 2
    world.nodes["node-1"].backups = ()
    assert status(world)["steps_at_risk"] == 4


def test_what_lies_in_the_shared_store_is_no_risk(world: World) -> None:
    world.nodes["node-1"].backups = ()
    world.write(
        StoreCommitted(
            time=world.now, url="s3://b", folder="s3://b/job", attempt=1, step=3, world_size=4, bytes=1, seconds=1.0
        )
    )
    assert status(world)["steps_at_risk"] == 1


def test_of_a_job_that_does_not_run_no_risk_is_told(world: World) -> None:
    seen = views.status(world.state, world.picture(), job="job", now=world.now, live=False)
    assert seen["steps_at_risk"] is None


def damaged(world: World) -> None:
    """Rank 2 finds no whole copy of the step that it should go on from; the copies are marked."""
    world.nodes["node-1"].memory = [
        copy for copy in world.nodes["node-1"].memory if (copy.rank, copy.step) != (2, resumed(world))
    ]
    world.fail(2, 1, error=DAMAGED)
    world.turns()


def test_a_damaged_copy_is_no_fault_of_the_script(world: World) -> None:
    world.fail(3)
    world.turns()
    assert resumed(world) == 4
    for step in (3, 2):
        damaged(world)
        assert resumed(world) == step
    assert world.state.ended is None
    assert [incident["category"] for incident in views.incidents(world.state)] == ["unknown", "storage", "storage"]


def crash(world: World) -> None:
    world.fail(1, -11)
    world.turns()


def test_copies_that_two_attempts_failed_with_are_not_tried_a_third_time(world: World) -> None:
    crash(world)
    assert resumed(world) == 4
    crash(world)
    assert resumed(world) == 4
    crash(world)
    assert resumed(world) == 3


def test_a_loss_that_is_not_finite_counts_as_well(world: World) -> None:
    crash(world)
    for _ in range(2):
        world.losses[0] = nan
        world.now += 400.0  # it trains on and saves nothing, until somebody ends it
        crash(world)
    assert resumed(world) == 3


def test_rather_a_third_time_than_from_nothing(world: World) -> None:
    for node in world.nodes.values():
        node.memory = [copy for copy in node.memory if copy.step == 4]
        node.backups = ()
    for _ in range(2):
        crash(world)
        assert resumed(world) == 4
    crash(world)
    assert resumed(world) == 4 or world.state.ended is not None


def test_nodes_that_go_away_say_nothing_about_a_copy(world: World) -> None:
    for _ in range(3):
        world.lose_keeper("node-1")
        world.turns()
        world.bring_back("node-1")
        world.turns()
        assert resumed(world) == 4


def test_saves_that_fail_again_and_again_are_an_incident_and_training_goes_on(world: World) -> None:
    world.saves_failed[3] = 9
    world.turns()
    assert views.incidents(world.state) == []
    world.saves_failed[3] = 10
    world.turns()
    (incident,) = views.incidents(world.state)
    assert (incident["category"], incident["action"], incident["ranks"]) == ("storage", "tolerate", [3])
    assert "10 saves in a row" in incident["evidence"][0] and incident["open"]
    world.saves_failed[3] = 50
    world.train()
    world.turns()
    assert len(views.incidents(world.state)) == 1 and world.running() == dict.fromkeys(range(4), 1)
    world.saves_failed[3] = 0
    world.turns()
    assert not views.incidents(world.state)[0]["open"]


def test_an_exit_without_a_fault_says_nothing(world: World) -> None:
    world.end(0, Exit(status=0, time=world.now))
    world.turns()
    assert world.state.ended is None


def test_that_other_ranks_saved_what_there_is_is_said(world: World) -> None:
    for node in world.nodes.values():
        node.memory = [replace(copy, world_size=3) for copy in node.memory]
        node.backups = ()
    world.fail(1)
    world.turns()
    assert resumed(world) is None
    message = str(status(world)["message"])
    assert message.startswith("step 4 was saved by 3 ranks and now there are 4"), message
    assert message.endswith("started again from nothing after step 4")


def test_a_run_of_another_number_of_ranks_is_refused_where_only_these_have_steps(world: World) -> None:
    world.stop()
    world.turns(40)
    assert world.state.ended is not None
    for node in world.nodes.values():
        node.disk = [replace(copy, world_size=3) for copy in node.disk]
    world.run_again()
    world.turns()
    ended = world.state.ended
    assert ended is not None and (ended.state, ended.exit_code) == ("failed", 1)
    assert ended.message.startswith("step 4 was saved by 3 ranks and now there are 4")
    assert ended.message.endswith("; --fresh begins anew") and not world.state.attempts
