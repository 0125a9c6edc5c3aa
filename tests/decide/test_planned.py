"""A restart that the user asked for: no fault, no attempt used up, and at the step that was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from evertrain.controller import views
from evertrain.decide import changes, planned
from evertrain.decide.changes import Refusal
from evertrain.decide.progress import steps
from evertrain.model import records as r
from evertrain.model.config import Config, RestartConfig
from evertrain.model.report import Comparison, Difference, Exit
from support.world import World

ALL = range(4)


def training(count: int = 6, **options: object) -> World:
    world = World(**options)  # type: ignore[arg-type]
    world.turns()
    world.train(count)
    world.turn()
    return world


def wish(world: World, name: str = "one", **more: Any) -> r.RestartRequested:
    number = world.state.active.number if world.state.active is not None else 0
    return r.RestartRequested(time=world.now, restart=name, attempt=number, **more)


def refused(world: World, **more: Any) -> Refusal | None:
    step = steps(world.state.active, world.picture())[0] if world.state.active is not None else None
    return planned.refusal(world.state, world.picture(), wish(world, "other", **more), step)


def ask(world: World, name: str = "one", **more: Any) -> None:
    world.write(wish(world, name, **more))
    world.turns()


def seen(world: World, name: str = "one") -> dict[str, Any]:
    found = views.restart(world.state, name)
    assert found is not None
    return found


def go_of(world: World) -> Any:
    order = world.nodes["node-0"].order
    assert order is not None
    (go,) = [attempt.go for attempt in order.attempts if attempt.go is not None]
    return go


# -- a plain one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_restarts": 0}, {"observe_only": True}])
def test_the_next_attempt_goes_on_at_the_newest_step_and_nothing_has_failed(options: dict[str, Any]) -> None:
    world = training(**options)
    assert refused(world) is None
    ask(world)
    assert world.running() == dict.fromkeys(ALL, 2)
    first, second = world.state.attempts
    assert first.ended is not None and first.ended.outcome == "restarted"
    assert (second.started.resume, second.started.restart) == (5, "one")
    assert world.state.incidents == {} and world.state.restarts_used == 0
    assert (seen(world)["back"], seen(world)["attempt"], seen(world)["resume"]) == (True, 2, 5)
    assert 0 <= seen(world)["seconds"] < 1


def test_it_uses_up_no_restart() -> None:
    world = training(max_restarts=1)
    for name in "abc":
        ask(world, name)
        world.train(2)
        world.turn()
    world.fail(0)
    world.turns()
    assert world.running() == dict.fromkeys(ALL, 5)
    world.train(2)
    world.turn()
    world.fail(0)
    world.turns()
    assert world.state.ended is not None and "1 of 1 restarts are used" in world.state.ended.message


def test_it_is_no_attempt_without_progress() -> None:
    world = training(config=Config(restart=RestartConfig(no_progress_attempts=2)))
    for name in "abcd":
        ask(world, name)
    world.fail(1)
    world.turns()
    assert world.state.ended is None, "four attempts that were not given the time, and one that failed"
    world.fail(2)
    world.turns()
    assert world.state.ended is not None and "2 attempts in a row made no progress" in world.state.ended.message


def test_it_survives_the_controller_at_any_point() -> None:
    world = training()
    world.write(wish(world))
    for _ in range(8):
        world.take_over()
        world.turn()
    assert world.running() == dict.fromkeys(ALL, 2)
    assert len(world.state.attempts) == 2 and seen(world)["back"]


def test_asked_twice_is_asked_once() -> None:
    world = training()
    again = wish(world)
    ask(world)
    world.write(again)
    world.turns()
    assert len(world.state.restarts) == 1 and len(world.state.attempts) == 2


def test_a_stop_goes_before_a_restart() -> None:
    world = training()
    world.write(wish(world))
    world.stop()
    world.turns()
    assert world.state.ended is not None and world.state.ended.state == "stopped"
    assert not seen(world)["back"] and seen(world)["ended"]


def test_ranks_that_were_done_just_before_are_done() -> None:
    world = training()
    world.write(wish(world))
    world.turn()
    for rank in ALL:
        node = world.nodes[f"node-{rank // 2}"]
        process = node.attempts[1].processes[rank]
        process.exit = replace(process.exit, status=0)  # type: ignore[type-var]
    world.turns()
    assert world.state.ended is not None and world.state.ended.state == "done"


def test_a_fault_between_wish_and_end_is_still_an_incident() -> None:
    world = training()
    world.write(wish(world, from_step=3))
    world.fail(2)
    world.turns()
    assert world.state.incident is not None
    assert world.state.attempts[-1].started.resume == 3, "and the attempt that follows is the one that was asked for"


# -- when not --------------------------------------------------------------------------------------------------------


def test_refused_while_something_else_goes_on() -> None:
    world = training()
    world.write(wish(world))
    assert refused(world) == Refusal("it is being restarted already")
    world.turns()
    assert refused(world) is None
    world.train()
    world.fail(1)
    world.turns()
    assert refused(world) == Refusal("it is recovering; ask again when training is back")
    world.train(2)
    world.turns()
    assert refused(world) is None
    world.stop()
    assert refused(world) == Refusal("it is ending")


def test_refused_before_there_are_ranks() -> None:
    assert refused(World()) == Refusal("its ranks have not been started yet")


def test_a_step_that_not_all_hold_is_refused_with_the_list() -> None:
    world = training()
    held = "the steps that all ranks hold are 3, 4, 5"
    assert refused(world, from_step=5) is None
    assert refused(world, from_step=7) == Refusal(f"step 7 cannot be resumed; {held}", True)
    assert refused(world, verify=2) is None
    assert refused(world, verify=3) == Refusal(f"the last 3 steps before step 5 cannot be repeated; {held}", True)
    assert refused(world, verify=0) == Refusal("1 to 128 steps can be verified, not 0", True)
    world.nodes["node-1"].memory = [one for one in world.nodes["node-1"].memory if (one.rank, one.step) != (3, 4)]
    assert refused(world, from_step=4) is not None


def test_steps_of_a_script_that_names_none() -> None:
    world = training(0)
    for wanted in ({"from_step": 1}, {"verify": 1}):
        refusal = refused(world, **wanted)
        assert refusal is not None and refusal.wrong_usage
        assert refusal.line == "there is no step that all ranks hold: its script saves none (Checkpointer.save)"
    assert refused(world) is None
    ask(world)
    assert world.running() == dict.fromkeys(ALL, 2) and world.state.attempts[-1].started.resume is None


def test_before_all_nodes_have_spoken_nothing_is_said_of_steps() -> None:
    world = training()
    asked = wish(world, from_step=5)
    picture = world.picture()
    del picture.nodes["node-1"]
    refusal = planned.refusal(world.state, picture, asked, 5)
    assert refusal is not None and refusal.soon


# -- from a step -----------------------------------------------------------------------------------------------------


def test_from_a_step_all_later_copies_are_void() -> None:
    world = training()
    ask(world, from_step=3)
    assert world.state.attempts[-1].started.resume == 3
    assert planned.available(world.state, world.picture()) == [3]
    world.train()
    world.turn()
    world.fail(0)
    world.turns()
    assert world.state.attempts[-1].started.resume == 4
    assert world.state.attempts[-1].started.reached == 4, "what was given up does not count"


def test_a_step_that_was_overwritten_meanwhile_gives_way_to_the_one_below_it() -> None:
    world = training()
    disk = [replace(one, tier="disk", step=1) for node in world.nodes.values() for one in node.memory if one.step == 5]
    for node in world.nodes.values():
        node.disk = [one for one in disk if one.rank // 2 == int(node.name[-1])]
    world.write(wish(world, from_step=3))
    for node in world.nodes.values():
        node.memory = [one for one in node.memory if one.step != 3]
    world.turns()
    assert world.state.attempts[-1].started.resume == 1


def test_never_from_nothing_because_a_step_was_overwritten() -> None:
    world = training()
    world.write(wish(world, from_step=3))
    for node in world.nodes.values():
        node.memory = [one for one in node.memory if one.step != 3]
    world.turns()
    assert world.state.attempts[-1].started.resume == 5


def test_a_list_that_was_read_while_ranks_ran_resumes_nothing() -> None:
    world = training()
    world.turn()
    node = world.nodes["node-1"]
    frozen = world.report(node)
    assert frozen.copies and frozen.copies_after_attempt == -1
    node.connected = False
    world.lose_keeper("node-1")
    original = world.report
    world.report = lambda one: replace(original(one), copies=frozen.copies, copies_after_attempt=-1)  # type: ignore[method-assign]
    world.fail(0)
    world.bring_back("node-1")
    node.connected = True
    world.turns(20)
    assert world.running() == {}, "the next attempt waits for lists that are final"


# -- arguments and environment -----------------------------------------------------------------------------------------


def changed(world: World, name: str = "one", **more: Any) -> None:
    """`evertrain restart` with other arguments or environment."""
    world.change(None, name, act="restart", **more)
    world.write(wish(world, name))
    world.turns()


def test_arguments_and_environment_stay_for_later_attempts_and_go_with_the_run() -> None:
    world = training()
    world.capture()
    changed(world, "one", args=("--lr", "3"), env={"A": "1", "B": "2"})
    changed(world, "two", env={"B": "3"})
    world.train()
    world.fail(2)
    world.turns()
    assert world.running() == dict.fromkeys(ALL, 4)
    assert go_of(world).args == ("--lr", "3")
    assert all(node.env == {"A": "1", "B": "3"} for node in world.nodes.values())
    assert all(node.code == "" for node in world.nodes.values()), "the code is the same: it runs in place"
    world.write(r.RunStarted(time=world.now, run_id="job-2", nodes=tuple(world.nodes), standby=0, nproc_per_node=2,
                             fresh=False, start="zygote", command="t.py"))  # fmt: skip
    assert changes.prepared(world.state, world.picture()) == changes.Prepared(None, "", {})
    assert changes.args(world.state, None) is None


def test_ranks_train_on_until_the_new_environment_is_there() -> None:
    world = training()
    world.capture()
    original = world._perform

    def deaf(node: Any, order: Any) -> None:
        original(node, replace(order, env=node.env) if node.name == "node-1" else order)

    world._perform = deaf  # type: ignore[method-assign]
    changed(world, env={"A": "1"})
    assert world.running() == dict.fromkeys(ALL, 1)
    world._perform = original  # type: ignore[method-assign]
    world.turns()
    assert world.running() == dict.fromkeys(ALL, 2)


def test_no_attempt_starts_with_the_old_environment() -> None:
    world = training()
    world.capture()
    world.change(None, "one", act="restart", env={"A": "1"})
    world.fail(1)  # so nobody waits for anything
    original = world._perform
    world._perform = lambda node, order: original(node, replace(order, env=node.env))  # type: ignore[method-assign]
    world.turns(20)
    assert world.running() == {}
    world._perform = original  # type: ignore[method-assign]
    world.turns()
    assert world.running() == dict.fromkeys(ALL, 2)


def test_steps_of_two_versions_are_not_compared() -> None:
    world = training()
    world.capture()
    world.change("new", within_s=3600)
    refusal = refused(world, verify=2)
    assert refusal is not None and "one version only" in refusal.line


# -- verification ------------------------------------------------------------------------------------------------------


def compared(world: World, *, differing: dict[int, int] | None = None, later: int = 2, losses: bool = True) -> None:
    """The agents say how the losses of steps 4 and 5 came out; `differing`: first other step, by rank."""
    for node in world.nodes.values():
        node.compared = tuple(
            Comparison(
                rank=rank,
                later=later,
                first_step=4 if losses else None,
                last_step=5 if losses else None,
                difference=Difference(step=differing[rank], rank=rank, node=node.name, before="0.1", again="0.2")
                if differing and rank in differing
                else None,
            )
            for rank in ALL
            if rank // 2 == int(node.name[-1])
        )
    world.turn()


def test_the_last_steps_are_repeated_and_compared() -> None:
    world = training()
    ask(world, verify=2)
    assert world.state.attempts[-1].started.resume == 3
    order = world.nodes["node-1"].order
    assert order is not None and order.compare is not None and order.eager
    assert (order.compare.earlier, order.compare.later, order.compare.after, order.compare.last) == (1, 2, 3, 5)
    assert refused(world) == Refusal("it still repeats the steps that another restart is to verify")
    world.train(2)
    world.turn()
    assert seen(world)["verified"] is None
    compared(world)
    verified = seen(world)["verified"]
    assert (verified["first_step"], verified["last_step"], verified["ranks"]) == (4, 5, 4)
    assert verified["difference"] is None and world.state.incidents == {}
    world.turn()
    assert world.nodes["node-1"].order is not None and world.nodes["node-1"].order.compare is None
    assert world.running() == dict.fromkeys(ALL, 2) and refused(world) is None


def test_what_does_not_come_out_the_same_is_told_and_training_goes_on() -> None:
    world = training()
    ask(world, verify=2)
    world.train(2)
    compared(world, differing={0: 5, 3: 4, 2: 5})
    assert seen(world)["verified"]["difference"] == {
        "step": 4, "rank": 3, "node": "node-1", "before": "0.1", "again": "0.2",
    }  # fmt: skip
    (incident,) = views.incidents(world.state)
    assert (incident["cause"], incident["ranks"], incident["nodes"]) == ("not reproducible", [3], ["node-1"])
    assert (incident["action"], incident["step"], incident["open"]) == ("tolerate", 4, False)
    assert (
        len(incident["evidence"]) == 3 and "rank 3 on node-1, step 4: loss 0.1 in attempt 1" in incident["evidence"][0]
    )
    world.train(3)
    world.turns()
    assert world.running() == dict.fromkeys(ALL, 2)


def test_nothing_to_compare() -> None:
    world = training()
    ask(world, verify=1)
    world.train(2)
    compared(world, losses=False)
    assert seen(world)["verified"]["problem"] == planned.NO_LOSSES
    assert world.state.incidents == {}


def test_an_attempt_that_dies_on_the_way_verifies_nothing() -> None:
    world = training()
    ask(world, verify=2)
    world.train(1)
    world.turn()
    world.fail(1)
    world.turns()
    assert seen(world)["verified"]["problem"] == "attempt 2 ended before step 5 was reached again"
    assert world.running() == dict.fromkeys(ALL, 3), "and the fault is dealt with as ever"


def test_a_script_that_ends_with_the_last_step_is_compared_too() -> None:
    world = training()
    ask(world, verify=2)
    world.train(2)
    for node in world.nodes.values():
        node.compared = tuple(
            Comparison(rank=rank, later=2, first_step=4, last_step=5) for rank in ALL if rank // 2 == int(node.name[-1])
        )
    for rank in ALL:
        world.end(rank, Exit(status=0, time=world.now))
    world.turns()
    assert world.state.ended is not None and world.state.ended.state == "done"
    assert seen(world)["verified"]["ranks"] == 4


def test_copies_that_are_gone_leave_nothing_to_repeat() -> None:
    world = training()
    world.write(wish(world, verify=1))
    for node in world.nodes.values():
        node.memory = [one for one in node.memory if one.step == 5]
    world.turns()
    assert seen(world)["verified"]["problem"] == "there was no step to repeat: the copies before it are gone"


def test_progress_before_a_restart_that_was_asked_for_is_progress() -> None:
    world = training()
    for number in range(3):
        ask(world, f"r{number}")
        world.fail(2)  # before it has done a step
        world.turns()
        world.train(3)
        world.turns()
    assert world.state.ended is None and not world.state.closing


def test_steps_that_another_attempt_did_cannot_be_verified_yet() -> None:
    world = training()
    ask(world)
    world.turns()
    found = refused(world, verify=1)
    assert found is not None and "has done 0 new steps yet" in found.line and not found.wrong_usage
    world.train(2)
    world.turn()
    assert refused(world, verify=1) is None


def test_a_restart_waits_until_every_node_is_heard() -> None:
    world = training()
    world.nodes["node-1"].connected = False
    assert refused(world) == Refusal("nothing is heard from node-1", soon=True)
