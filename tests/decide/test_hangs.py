"""Hangs: suspected, named, acted upon at their limit, and never taken for the fault of a node."""

from __future__ import annotations

from typing import Any

from evertrain.controller import views
from evertrain.model.records import HangCleared, HangSuspected, IncidentOpened
from evertrain.model.report import Exit
from support.world import World, training


def kinds(world: World) -> list[type]:
    return [type(record) for record in world.log if isinstance(record, HangSuspected | HangCleared | IncidentOpened)]


def test_a_still_rank_is_suspected_then_named_and_training_restarts() -> None:
    world = training()
    world.hang(2)
    world.turn(6.0)
    assert kinds(world) == [HangSuspected]
    assert "rank 2" in views.status(world.state, world.picture(), job="job", now=world.now)["message"]
    world.turn(5.0)
    world.turns()
    (incident,) = views.incidents(world.state)
    assert (incident["cause"], incident["ranks"], incident["nodes"]) == ("hang (still)", [2], ["node-1"])
    assert incident["seconds"]["detect"] >= 10.0
    assert world.running() == dict.fromkeys(range(4), 2)
    assert world.state.active is not None and world.state.active.started.resume == 4


def test_what_moves_again_by_itself_was_a_suspicion_only() -> None:
    world = training()
    world.hang(2)
    world.turn(6.0)
    world.wake()
    world.turns()
    assert kinds(world) == [HangSuspected, HangCleared]
    assert world.running() == dict.fromkeys(range(4), 1)


def test_a_busy_rank_is_named_and_left_alone_until_its_own_limit() -> None:
    world = training()
    world.hang(0, cpu_fraction=0.97)
    world.turns(10, seconds=4.0)
    (incident,) = views.incidents(world.state)
    assert (incident["cause"], incident["ranks"], incident["action"]) == ("hang (busy)", [0], "tolerate")
    assert world.running() == dict.fromkeys(range(4), 1)
    world.wake()
    world.train()
    world.turns()
    assert not views.incidents(world.state)[0]["open"]
    assert len(world.state.attempts) == 1


def test_an_endless_loop_is_ended_at_the_busy_limit() -> None:
    world = training()
    world.hang(0, cpu_fraction=0.97)
    world.turns(64, seconds=10.0)
    world.turns()
    first, second = views.incidents(world.state)
    assert (first["action"], second["action"], second["ranks"]) == ("tolerate", "restart", [0])


def test_the_killed_ranks_do_not_change_the_verdict() -> None:
    world = training()
    world.hang(3, stopped=True)
    world.turn(11.0)
    for rank in (0, 1):
        world.end(rank, Exit(status=-6, time=world.now + 1))
    world.turns()
    assert views.incidents(world.state)[0]["cause"] == "hang (stopped)"


def test_a_hang_that_comes_back_at_the_same_step_gets_twice_the_time() -> None:
    world = training()
    for limit_s in (10.0, 20.0, 40.0, 80.0):
        before = len(world.state.attempts)
        world.hang(2)
        world.turn(limit_s - 0.5)
        assert len(world.state.attempts) == before and world.running()
        world.turn(1.0)
        world.turns()
        assert len(world.state.attempts) == before + 1 or world.state.ended
    assert world.state.ended is not None and "no progress" in world.state.ended.message
    assert "evertrain.phase" in views.incidents(world.state)[0]["because"]


def test_a_rank_that_stands_still_again_at_another_step_gets_twice_the_time() -> None:
    world = training()
    world.hang(2)
    world.turn(10.5)
    world.turns()
    assert len(world.state.attempts) == 2
    world.wake()
    world.train(8)
    world.turns()
    for _ in range(3):  # a habit of its own, never declared
        world.hang(2)
        world.turn(19.0)
        world.wake()
        world.train(8)
        world.turns()
    assert len(world.state.attempts) == 2
    world.hang(1)
    world.turn(10.5)
    world.turns()
    assert len(world.state.attempts) == 3, "another one has had no second chance yet"


def test_who_is_stopped_is_not_told_to_declare_a_phase() -> None:
    world = training()
    world.hang(3, stopped=True)
    world.turn(11.0)
    world.turns()
    (incident,) = views.incidents(world.state)
    assert (incident["cause"], incident["action"]) == ("hang (stopped)", "restart")
    assert "evertrain.phase" not in incident["because"]


def test_observe_only_names_and_touches_nothing() -> None:
    world = training(observe_only=True)
    world.hang(2)
    world.turns(10, seconds=4.0)
    (incident,) = views.incidents(world.state)
    assert (incident["ranks"], incident["action"]) == ([2], "tolerate")
    assert world.running() == dict.fromkeys(range(4), 1)


def test_waiting_for_a_rank_that_has_left_is_its_fault() -> None:
    world = training()
    world.end(2, Exit(status=0, time=world.now))
    world.turn()
    for rank in (0, 1, 3):
        process = world.process(rank)
        assert process is not None
    world.hang(-1)
    world.turn(11.0)
    world.turns()
    assert views.incidents(world.state)[0]["cause"] == "exited early with 0"
    assert views.incidents(world.state)[0]["ranks"] == [2]


def test_the_last_rank_may_clean_up_in_silence() -> None:
    world = training()
    for rank in (1, 2, 3):
        world.end(rank, Exit(status=0, time=world.now))
    world.hang(0)
    world.turns(10, seconds=4.0)
    assert not world.state.incidents
    assert world.running() == {0: 1}


def test_a_node_that_cannot_be_heard_is_no_hang() -> None:
    world = training()
    world.hang(2)
    for node in world.nodes.values():
        node.connected = False
    world.turns(10, seconds=30.0)
    assert not world.state.incidents


def unkillable() -> World:
    """Rank 2 sleeps in the kernel, and has been told to end."""
    world = training()
    world.unkillable.add(2)
    world.hang(2, uninterruptible=True)
    world.turn(12.0)
    world.turns()
    return world


def node_state(world: World, node: str) -> str:
    return next(seen["state"] for seen in view(world)["nodes"] if seen["id"] == node)


def view(world: World) -> dict[str, Any]:
    return views.status(world.state, world.picture(), job="job", now=world.now)


def test_who_sleeps_in_the_kernel_makes_its_node_unusable_until_it_is_gone() -> None:
    world = unkillable()
    assert node_state(world, "node-1") == "unusable"
    assert "node-1 is unusable: rank 2 (pid" in view(world)["message"]
    world.turns(20, seconds=10.0)
    assert world.running() == {}, "nothing is started beside it"
    world.unkillable.clear()
    world.turns()
    assert node_state(world, "node-1") == "active"
    assert world.running() == dict.fromkeys(range(4), 2)


def test_who_never_leaves_the_kernel_ends_the_job_in_time_with_the_newest_step_on_disk() -> None:
    world = unkillable()
    world.turns(40, seconds=10.0)
    status = view(world)
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "node-1: rank 2 (pid" in status["message"] and "step 4 is on disk" in status["message"]
    assert world.state.incidents[1].closed is not None


def test_a_stop_does_not_wait_for_who_sleeps_in_the_kernel() -> None:
    world = unkillable()
    world.stop()
    world.turns(10, seconds=0.5)
    status = view(world)
    assert status["state"] == "stopped"
    assert "step 4 is on disk" in status["message"] and "still there after SIGKILL" in status["message"]
