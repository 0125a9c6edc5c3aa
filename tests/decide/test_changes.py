"""Which version runs next, and when: whole jobs in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from evertrain.controller import code_views, views
from evertrain.decide import changes, rollback
from evertrain.decide.changes import Refusal, Wish
from evertrain.model import records as r
from evertrain.model.change_records import ChangeAsked, VersionProven
from evertrain.model.code import Code
from evertrain.model.config import CodeConfig, Config, RestartConfig
from evertrain.model.report import Exit, RankError
from support.world import World

ALL = range(4)
CONFIG = Config(code=CodeConfig(proven_steps=20))


def training(count: int = 6, **options: object) -> World:
    world = World(**{"config": CONFIG, **options})  # type: ignore[arg-type]
    world.turns()
    world.capture()
    world.train(count)
    world.turn()
    return world


def runs(world: World) -> int | None:
    """The version of the attempt whose ranks run."""
    active = world.state.active
    assert active is not None and world.running() == dict.fromkeys(ALL, active.number)
    return world.state.ran[active.number]


def code(world: World) -> set[str]:
    return {node.code for node in world.nodes.values()}


def seen(world: World, name: str) -> dict[str, Any]:
    found = code_views.change(world.state, name)
    assert found is not None
    return found


def kinds(world: World, kind: type[r.Record]) -> list[Any]:
    return [record for record in world.log if isinstance(record, kind)]


# -- urgent ----------------------------------------------------------------------------------------------------------


def test_an_urgent_change_ends_the_ranks_with_sigterm_and_goes_on_at_the_newest_step() -> None:
    world = training()
    assert runs(world) == 1 and code(world) == {""}, "the first attempt runs in place"
    name = world.change("new", author="ann", reason="a better loss")
    world.turns()
    assert runs(world) == 2 and code(world) == {"new"}
    attempt = world.state.active
    assert attempt is not None and (attempt.started.resume, attempt.started.change) == (5, name)
    assert [one.signal for one in kinds(world, r.AttemptEnding)] == [15]
    assert world.state.incidents == {} and world.state.restarts_used == 0
    assert world.state.attempts[0].ended is not None and world.state.attempts[0].ended.outcome == "restarted"
    change = seen(world, name)
    assert change["outcome"] == "applied" and not change["back"], "its first step may fail yet"
    world.train()
    world.turns()
    change = seen(world, name)
    assert change["back"] and change["author"] == "ann"
    assert (change["resume"], change["attempt"], change["parent"]) == (5, 2, 1)


def test_ranks_that_leave_in_an_orderly_way_have_not_come_to_their_end() -> None:
    world = training()
    original = world._perform

    def orderly(node: Any, order: Any) -> None:
        original(node, order)
        for held in node.attempts.values():
            for process in held.processes.values():
                if process.killed and process.exit is not None:
                    process.exit = Exit(status=0, time=process.exit.time)

    world._perform = orderly  # type: ignore[method-assign]
    world.change("new")
    world.turns()
    assert world.state.ended is None and runs(world) == 2


def test_ranks_that_do_not_heed_sigterm_are_killed_after_the_grace() -> None:
    world = training()
    original = world._perform

    def stubborn(node: Any, order: Any) -> None:
        gentle = [one for one in order.attempts if one.phase == "end" and one.signal == 15]
        if not gentle:
            original(node, order)

    world._perform = stubborn  # type: ignore[method-assign]
    world.change("new")
    world.turns(20, seconds=1.0)
    assert runs(world) == 1
    world.turns(10, seconds=1.0)
    assert [one.signal for one in kinds(world, r.AttemptEnding)] == [15, 9]
    assert runs(world) == 2


def test_ranks_train_on_until_every_node_has_the_code() -> None:
    world = training()
    world.nodes["node-1"].code_is_late = True
    world.change("new")
    world.turns(20, seconds=1.0)
    assert runs(world) == 1
    world.nodes["node-1"].code_is_late = False
    world.turns()
    assert runs(world) == 2


def test_a_node_that_cannot_have_the_code_ends_the_change_and_nothing_else() -> None:
    world = training()
    world.nodes["node-1"].code_trouble = "no room on /var"
    name = world.change("new")
    world.turns()
    assert runs(world) == 1 and world.state.attempt is world.state.attempts[0]
    change = seen(world, name)
    assert (change["outcome"], change["because"]) == ("dropped", "node-1: no room on /var")
    world.nodes["node-1"].code_trouble = ""
    world.change("other")
    world.turns()
    assert runs(world) == 3, "the next one is not held back by it"


def test_code_that_does_not_arrive_is_given_up() -> None:
    world = training()
    world.nodes["node-1"].code_is_late = True
    name = world.change("new")
    world.turns(40, seconds=10.0)
    assert runs(world) == 1
    assert "node-1 had not got it after" in seen(world, name)["because"]


# -- lazy ------------------------------------------------------------------------------------------------------------


def test_a_change_that_is_not_urgent_comes_with_the_next_failure() -> None:
    world = training()
    name = world.change("new", within_s=3600)
    world.turns()
    assert runs(world) == 1 and code(world) == {"new"}, "the next ranks are prepared with it"
    assert seen(world, name)["outcome"] == "pending"
    assert views.status(world.state, world.picture(), job="job", now=world.now)["change"]["version"] == 2
    world.fail(2)
    world.turns()
    assert runs(world) == 2
    incident = views.incidents(world.state)[0]
    assert (incident["action"], incident["from_version"], incident["to_version"]) == ("hot_update", 1, 2)


def test_it_comes_at_the_latest_when_its_time_is_over() -> None:
    world = training()
    world.change("new", within_s=600)
    world.turns(10, seconds=50.0)
    assert runs(world) == 1
    world.turns(6, seconds=50.0)
    assert runs(world) == 2 and world.state.incidents == {}


def test_a_restart_of_the_user_takes_it_along() -> None:
    world = training()
    world.change("new", within_s=600)
    world.write(r.RestartRequested(time=world.now, restart="again", attempt=1))
    world.turns()
    assert runs(world) == 2


def test_a_recovery_does_not_wait_for_code_that_a_node_cannot_have() -> None:
    world = training()
    world.nodes["node-0"].code_is_late = True
    name = world.change("new", within_s=3600)
    world.fail(1)
    world.turns(5)
    assert world.running() == {}
    world.nodes["node-0"].code_trouble = "the archive is damaged"
    world.turns()
    assert runs(world) == 1 and seen(world, name)["outcome"] == "dropped"


# -- several ---------------------------------------------------------------------------------------------------------


def test_the_newest_of_two_changes_counts() -> None:
    world = training()
    first = world.change("new", within_s=3600)
    second = world.change("newer", within_s=3600)
    world.fail(0)
    world.turns()
    assert runs(world) == 3
    assert [seen(world, name)["outcome"] for name in (first, second)] == ["superseded", "applied"]


def test_one_that_was_superseded_does_not_come_back_when_the_newer_one_is_dropped() -> None:
    world = training()
    first = world.change("new", within_s=3600)
    world.turns()
    for node in world.nodes.values():
        node.code_trouble = "no room"
    second = world.change("newer", within_s=3600)
    world.turns()
    assert [seen(world, name)["outcome"] for name in (first, second)] == ["superseded", "dropped"]
    assert changes.pending(world.state) is None and code(world) == {""}
    world.fail(0)
    world.turns()
    assert runs(world) == 1, "in place, as before: nothing has to come that no node has room for"


def test_a_restart_goes_with_the_change_that_has_taken_the_place_of_its_own() -> None:
    world = training()
    world.nodes["node-1"].code_is_late = True
    world.change("new", "again", act="restart")
    world.write(r.RestartRequested(time=world.now, restart="again", attempt=1))
    world.turn()
    world.change("newer", within_s=3600)
    world.turn()
    world.nodes["node-1"].code_trouble = "no room"
    world.turns()
    assert runs(world) == 1 and len(world.state.attempts) == 1


def test_a_restart_with_other_code_waits_for_the_code_and_not_only_for_imports() -> None:
    config = Config(code=CodeConfig(fetch_s=600.0), restart=RestartConfig(node_return_s=20.0))
    world = training(config=config)
    world.nodes["node-1"].code_is_late = True
    world.change("new", "again", act="restart")
    world.write(r.RestartRequested(time=world.now, restart="again", attempt=1))
    world.turns(20, seconds=5.0)
    assert runs(world) == 1
    world.nodes["node-1"].code_is_late = False
    world.turns()
    assert runs(world) == 2


def test_what_waits_may_be_asked_for_sooner() -> None:
    world = training()
    first = world.change("new", within_s=3600)
    later = changes.ask(world.state, Wish(change="x", act="update", code=_code("new"), within_s=3600), world.now + 1)
    assert isinstance(later, Refusal) and later.is_same
    second = world.change("new")
    world.turns()
    assert runs(world) == 2 and set(world.state.versions) == {1, 2}
    assert [seen(world, name)["outcome"] for name in (first, second)] == ["superseded", "applied"]


def test_two_updates_in_a_row() -> None:
    world = training()
    world.change("new")
    world.turns()
    world.train(3)
    world.change("newer")
    world.turns()
    assert runs(world) == 3
    attempt = world.state.active
    assert attempt is not None and attempt.started.resume == 8


def test_an_update_during_a_recovery_comes_with_it() -> None:
    world = training()
    world.fail(2)
    world.change("new")
    world.turns()
    assert runs(world) == 2 and len(world.state.attempts) == 2


def test_an_update_just_after_a_start_waits_until_every_node_has_let_it_go() -> None:
    world = training(nodes=3, standby=1)
    world.spec = replace(world.spec, standby_barrier="init")
    original, late = world._perform, ["node-1"]

    def perform(node: Any, order: Any) -> None:
        if node.name not in late or all(one.phase != "go" for one in order.attempts):
            original(node, order)

    world.fail(2)
    world._perform = perform  # type: ignore[method-assign]
    world.turns()
    active = world.state.active
    assert active is not None and active.number == 2 and set(world.running()) == {0, 1}
    world.change("new", args=("--x",))
    world.turns()
    assert code(world) == {""}, "what was prepared for it must not be replaced now"
    standby = world.nodes["node-2"].order
    assert standby is not None and standby.early is not None and standby.early.args is None, (
        "nor run with parts of both"
    )
    late.clear()
    world.turns()
    assert runs(world) == 2


def test_ranks_of_a_program_go_on_until_every_node_has_the_code() -> None:
    world = World(config=CONFIG)
    world.turn()
    for _ in range(8):
        world.turn()
        for rank in ALL:
            if (process := world.process(rank)) is not None:
                process.resumed = 0.0  # nobody sees a loop of theirs
    world.capture()
    assert world.state.active is not None and world.state.active.resumed is None
    world.nodes["node-1"].code_trouble = "no room"
    name = world.change("new")
    world.turns()
    assert runs(world) == 1 and seen(world, name)["outcome"] == "dropped"
    world.nodes["node-1"].code_trouble = ""
    world.change("newer")
    world.turns()
    assert runs(world) == 3


def test_the_same_code_is_no_change() -> None:
    world = training()
    refusal = changes.ask(world.state, Wish(change="x", act="update", code=_code("own")), world.now)
    assert refusal == Refusal("version 1 runs already: there is nothing to change", wrong_usage=True, is_same=True)
    world.change("new")
    world.turns()
    world.change("own")
    world.turns()
    assert runs(world) == 1 and code(world) == {"own"}, (
        "a version that is known has its number, and never in place again"
    )


def test_asking_twice_is_asking_once() -> None:
    world = training()
    name = world.change("new")
    assert changes.ask(world.state, Wish(change=name, act="update", code=_code("new")), world.now) == []


def test_before_the_capture_nobody_knows_what_would_change() -> None:
    world = World(config=CONFIG)
    world.turns()
    refusal = changes.ask(world.state, Wish(change="x", act="update", code=_code("new")), world.now)
    assert isinstance(refusal, Refusal) and refusal.soon


def test_a_controller_that_takes_over_knows_all_of_it() -> None:
    world = training()
    world.change("new", within_s=3600)
    world.take_over()
    world.turns()
    world.fail(1)
    world.turns()
    assert runs(world) == 2


def test_a_new_run_begins_with_the_files_of_the_user() -> None:
    world = training()
    world.change("new")
    world.turns()
    world.change("newer", within_s=3600)
    world.stop()
    world.turns(20, seconds=1.0)
    world.run_again()
    world.turns()
    assert world.state.own is None and code(world) == {""}
    world.capture()
    assert runs(world) == 1, "what was captured before is known by its number"
    assert changes.pending(world.state) is None


# -- rolled back -----------------------------------------------------------------------------------------------------


def fails(world: World, step: int | None = None) -> None:
    world.fail(1, 1, error=RankError(type="TypeError", message="no", file="train.py", line=3, step=step))
    world.turns(16)


def test_an_error_right_after_an_update_is_rolled_back_to_the_steps_before_it() -> None:
    world = training()
    name = world.change("new")
    world.turns()
    fails(world)
    assert runs(world) == 1 and code(world) == {"own"}, "the captured files, not those that lie there by now"
    attempt = world.state.active
    assert attempt is not None and attempt.started.resume == 5
    (incident,) = views.incidents(world.state)
    assert (incident["action"], incident["from_version"], incident["to_version"]) == ("roll_back", 2, 1)
    assert "roll back from version 2 of the code to version 1" in world.state.incidents[1].decisions[0].because
    change = seen(world, name)
    assert change["outcome"] == "rolled_back" and change["because"].startswith("incident 1: exception TypeError")
    world.train(3)
    world.turns()
    assert world.state.incidents[1].closed is not None


def test_what_a_version_has_saved_is_left_behind_with_it() -> None:
    world = training()
    world.change("new")
    world.turns()
    world.train(8)
    world.turn()
    fails(world, 14)
    assert runs(world) == 2, "it made progress, so it is given another try"
    fails(world, 14)
    assert runs(world) == 1
    attempt = world.state.active
    assert attempt is not None and attempt.started.resume == 5, "the pinned save, not one of version 2"
    world.train(2)
    world.turn()
    world.fail(0)
    world.turns()
    attempt = world.state.active
    assert attempt is not None and attempt.started.resume == 7, "what version 2 had saved stays void"


def test_without_an_update_nothing_is_rolled_back() -> None:
    world = training()
    fails(world, 6)
    fails(world, 6)
    assert world.state.ended is not None and world.state.ended.exit_code == 1
    assert kinds(world, ChangeAsked) == []


def test_after_a_roll_back_the_same_error_ends_the_job() -> None:
    world = training()
    world.change("new")
    world.turns()
    fails(world, 6)
    assert runs(world) == 1
    fails(world, 6)
    assert world.state.ended is not None, "it was not the change"


def test_the_next_change_after_a_roll_back_is_rolled_back_as_well() -> None:
    world = training()
    for number, name in enumerate(("new", "also wrong", "still wrong"), start=2):
        world.change(name)
        world.turns()
        assert runs(world) == number
        fails(world)
        assert runs(world) == 1, "training has not proven itself since the last one, but this is another change"
    fails(world, 6)
    fails(world, 6)
    assert world.state.ended is not None


def test_what_was_gone_back_from_is_not_gone_back_to_unless_it_is_named() -> None:
    world = training()
    world.change("new")
    world.turns()
    fails(world)
    assert runs(world) == 1 and rollback.target(world.state) is None
    world.change(None, act="rollback", version=2)
    world.turns()
    assert runs(world) == 2 and rollback.target(world.state) is None, "version 1 was left for it"
    world.change("newest")
    world.turns()
    assert runs(world) == 3 and rollback.target(world.state) == 2


def test_a_job_that_makes_progress_is_not_rolled_back() -> None:
    world = training()
    world.change("new")
    world.turns()
    for number in range(4):
        world.train(3)
        world.turn()
        fails(world, 9 + 3 * number)
        assert runs(world) == 2


def test_crashes_after_an_update_lead_there_as_well() -> None:
    world = training()
    world.change("new")
    world.turns()
    for _ in range(2):
        world.fail(3, -11)
        world.turns()
        assert runs(world) == 2
    world.fail(3, -11)
    world.turns()
    assert runs(world) == 1
    attempt = world.state.active
    assert attempt is not None and attempt.started.resume == 5, "that version 2 fails says nothing about what 1 saved"


def test_a_change_that_waits_is_tried_before_anything_is_rolled_back() -> None:
    world = training()
    world.change("new")
    world.turns()
    world.change("mended", within_s=3600)
    world.turn()
    fails(world)
    assert runs(world) == 3


def test_the_newest_proven_version_is_gone_back_to() -> None:
    world = training()
    world.change("second")
    world.turns()
    world.train(21)
    world.turn()
    assert [one.version for one in kinds(world, VersionProven)] == [2]
    assert rollback.pinned(world.state) is None
    world.change("third")
    world.turns()
    world.change("fourth")
    world.turns()
    fails(world)
    assert runs(world) == 2


def test_a_version_is_proven_by_steps_from_its_first_start_on() -> None:
    world = training(12)
    assert kinds(world, VersionProven) == []
    world.fail(0)
    world.turns()
    world.train(9)
    world.turn()
    assert [one.version for one in kinds(world, VersionProven)] == [1]


def test_a_roll_back_of_the_user_goes_to_the_newest_step_of_that_version_or_of_all() -> None:
    for keep, resumed in ((False, 5), (True, 8)):
        world = training()
        world.change("new")
        world.turns()
        world.train(3)
        world.turn()
        world.change(None, act="rollback", version=1, goes_back=not keep, author="ann")
        world.turns()
        assert runs(world) == 1
        attempt = world.state.active
        assert attempt is not None and attempt.started.resume == resumed
        assert seen(world, "change-1")["because"] == "ann has asked for it"


def test_where_nothing_of_that_version_is_left_the_newest_step_is_taken() -> None:
    world = training()
    world.change("new")
    world.turns()
    world.train(30)
    world.turn()  # proven: nothing is pinned any more
    world.train(5)
    world.change(None, act="rollback", version=1, goes_back=True)
    world.turns()
    attempt = world.state.active
    assert runs(world) == 1 and attempt is not None and attempt.started.resume == 40
    assert any("no checkpoint of the version" in line for line in attempt.started.passed_over)


def test_a_version_that_had_saved_nothing_begins_anew() -> None:
    world = World(config=CONFIG)
    world.turns()
    world.capture()
    world.change("new")
    world.turns()
    world.train(5)
    world.turn()
    fails(world, 5)
    fails(world, 5)
    attempt = world.state.active
    assert runs(world) == 1 and attempt is not None and attempt.started.resume is None


def test_the_last_save_before_a_switch_stays_until_the_version_has_proven_itself() -> None:
    world = training()
    world.change("new")
    world.turns()
    assert rollback.pinned(world.state) == (1, 5)
    world.train(19)
    world.turn()
    assert rollback.pinned(world.state) == (1, 5)
    world.train(3)
    world.turn()
    assert rollback.pinned(world.state) is None


def test_another_update_after_a_roll_back_is_rolled_back_as_well() -> None:
    world = training()
    world.change("bad")
    world.turns()
    fails(world)
    world.train(3)
    world.change("bad, too")
    world.turns()
    assert runs(world) == 3
    fails(world)
    assert runs(world) == 1


def test_what_is_pinned_is_what_a_roll_back_goes_on_from_also_after_another_update() -> None:
    world = training()
    world.change("second")
    world.turns()
    world.train(5)
    world.turn()
    world.change("third")
    world.turns()
    world.train(5)
    world.turn()
    fails(world, 15)
    fails(world, 15)
    attempt = world.state.active
    assert runs(world) == 1 and attempt is not None
    assert (attempt.started.resume, attempt.started.passed_over) == (5, ())


def test_a_mended_version_is_tried_before_the_job_ends_for_want_of_progress() -> None:
    world = training()
    for _ in range(3):
        world.fail(3, -11)
        world.turns()
    world.change("mended", within_s=3600)
    world.turn()
    world.fail(3, -11)
    world.turns()
    assert world.state.ended is None and runs(world) == 2


def test_what_a_proven_version_has_done_is_not_given_up() -> None:
    world = training()
    world.store(5)
    world.change("new")
    world.turns()
    world.train(40)
    world.turn()
    for _ in range(2):
        fails(world, 46)
    attempt = world.state.active
    assert runs(world) == 1 and attempt is not None
    assert (attempt.started.resume, attempt.started.passed_over) == (45, ())


def test_what_only_the_shared_store_has_of_a_version_is_gone_back_to() -> None:
    world = training()
    world.store(4)
    world.change("new")
    world.turns()
    world.train(30)  # proven: nothing is pinned any more
    world.turn()
    world.train(5)
    world.change(None, act="rollback", version=1, goes_back=True)
    world.turns()
    attempt = world.state.active
    assert runs(world) == 1 and attempt is not None
    assert (attempt.started.resume, attempt.started.folder) == (4, "step-4")


def test_a_standby_that_cannot_have_the_version_does_not_take_over() -> None:
    world = training(nodes=4, standby=2)
    world.nodes["node-2"].code_trouble = "no room"
    world.change("new")
    world.turns()
    assert world.state.usable_standbys() == ("node-3",), "and nobody else waits for it"
    assert world.state.nodes["node-2"].because == "node-2: no room"
    world.nodes["node-2"].code_trouble = ""
    world.turns()
    assert set(world.state.usable_standbys()) == {"node-2", "node-3"}


def test_what_was_never_captured_is_not_the_version_of_a_later_run() -> None:
    world = World(config=CONFIG)
    world.turns()
    world.train(3)
    world.stop()
    world.turns(20, seconds=1.0)
    world.run_again()
    world.turns()
    world.capture("edited meanwhile")
    assert world.state.ran == {1: None, 2: 1}


@pytest.mark.parametrize("attempts", [1, 2])
def test_a_hang_that_an_update_has_brought(attempts: int) -> None:
    world = training()
    world.change("new")
    world.turns()
    for number in range(attempts):
        world.hang(1)
        world.turns(40, seconds=1.0)
        assert runs(world) == (2 if number == 0 else 1)


def _code(content: str) -> Code:
    return Code(digest=content, files=1, bytes=1)
