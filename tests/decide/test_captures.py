"""When processes are looked at: never while all is well, from suspicion on, and nobody waits long for an answer."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from evertrain.controller import views
from evertrain.decide import captures
from evertrain.decide.applying import apply
from evertrain.model.capture_records import CaptureAsked, HangLocated
from evertrain.model.config import Config, HangConfig
from evertrain.model.records import AttemptEnding, HangCleared, HangSuspected, IncidentOpened
from evertrain.model.stacks import Located, LocatedKind
from support.world import World, training


def asked(world: World) -> list[CaptureAsked]:
    return [record for record in world.log if isinstance(record, CaptureAsked)]


def times(world: World, since: float) -> list[float]:
    """When they were asked for, in seconds since then."""
    return [round(one.time - since, 1) for one in asked(world)]


def hung(world: World, for_s: float, *, rank: int = 2, **activity: object) -> float:
    """A hang that has lasted for so long, looked at twice a second; when it began."""
    began = world.now
    world.hang(rank, **activity)
    while world.now < began + for_s - 0.25:
        world.turn(0.5)
    return began


def test_while_all_is_well_nobody_looks() -> None:
    world = training()
    for _ in range(100):
        world.train()
        world.turn(1.0)
    assert not world.state.captures
    assert all(node.order is not None and node.order.capture is None for node in world.nodes.values())


def test_the_first_at_suspicion_and_the_second_just_before_the_limit() -> None:
    world = training()
    began = hung(world, 9.5)
    assert times(world, began) == [5.0, 8.5]
    assert [(one.capture, one.reason, one.looks) for one in asked(world)] == [(1, "hang", 1), (2, "hang", 1)]
    suspected = next(record for record in world.log if isinstance(record, HangSuspected))
    assert suspected.time == asked(world)[0].time, "at once"
    assert not world.state.incidents
    world.turn(1.0)
    assert world.state.incidents[1].opened.captures == (2,)
    assert world.state.incidents[1].opened.time - began < 11.0


def test_agents_get_an_order_once_and_only_those_with_ranks() -> None:
    world = training(nodes=3, standby=1)
    world.hang(2)
    world.located = None
    world.turn(6.0)
    (first,) = world.state.captures
    orders = {name: node.order.capture for name, node in world.nodes.items() if node.order is not None}
    assert orders["node-2"] is None
    assert orders["node-0"] is not None and orders["node-0"] == orders["node-1"]
    assert (orders["node-0"].number, orders["node-0"].attempt) == (first.asked.capture, 1)
    assert captures.order(world.state, world.now + 31.0) is None, "who comes so late need not look any more"


def test_observe_only_looks_as_well() -> None:
    world = training(observe_only=True)
    began = hung(world, 30.0)
    assert times(world, began) == [5.0, 8.5]
    assert world.running() == dict.fromkeys(range(4), 1)


def test_whoever_works_is_looked_at_again_before_it_is_ended() -> None:
    world = training(config=Config(hang=HangConfig(busy_limit_s=60.0)))
    began = hung(world, 62.0, cpu_fraction=0.97)
    assert times(world, began) == [5.0, 8.5, 58.5]
    named, ended = world.state.incidents.values()
    assert (named.opened.tolerated, named.opened.captures) == (True, (2,))
    assert (ended.opened.tolerated, ended.opened.captures) == (False, (3,))


def test_only_who_stands_or_is_blamed_is_looked_at_closely() -> None:
    stopped, blamed, works = training(), training(), training()
    hung(stopped, 9.5, stopped=True)
    assert [one.deep for one in asked(stopped)] == [(2,), (2,)]
    blamed.located = Located(kind="loader", ranks=(2,), nodes=("node-1",), confidence=0.9)
    hung(blamed, 9.5)
    assert [one.deep for one in asked(blamed)] == [(), (2,)]
    works.located = blamed.located
    hung(works, 20.0, cpu_fraction=1.0)
    assert [one.deep for one in asked(works)] == [(), ()]


def test_what_moves_again_is_left_alone() -> None:
    world = training()
    hung(world, 6.0)
    world.wake()
    world.turns(20, seconds=1.0)
    assert len(asked(world)) == 1 and any(isinstance(record, HangCleared) for record in world.log)
    began = hung(world, 9.5)
    assert times(world, began)[1:] == [5.0, 8.5], "another suspicion begins anew"


def test_without_an_answer_it_goes_on_two_seconds_after_the_limit() -> None:
    world = training()
    world.located = None
    began = hung(world, 14.0)
    (incident,) = world.state.incidents.values()
    assert 12.0 <= incident.opened.time - began <= 12.6
    assert (incident.opened.cause, incident.opened.ranks, incident.opened.captures) == ("hang (still)", (2,), ())


def test_an_answer_that_comes_late_is_not_waited_for_but_used_where_it_is_there() -> None:
    world = training()
    hung(world, 9.0)
    world.located = Located(kind="loader", ranks=(2,), nodes=("node-1",), confidence=0.85, category="hang_dataloader")
    first = world.state.captures[0].asked.capture
    world.state = apply(
        replace(world.state, captures=world.state.captures[:1]),
        HangLocated(time=world.now, attempt=1, capture=first, located=world.located),
    )
    world.located = None
    for _ in range(8):
        world.turn(0.5)
    assert world.state.incidents[1].opened.cause == "hang (loader)"


def test_a_capture_that_was_lost_is_asked_for_again_a_few_times() -> None:
    world = training(observe_only=True)
    world.located = None
    began = hung(world, 60.0)
    assert times(world, began)[0] == 5.0
    assert len(asked(world)) == captures.MOST_LOST


def test_a_controller_that_takes_over_asks_again() -> None:
    world = training()
    world.located = None
    began = hung(world, 6.0)
    world.take_over()
    assert captures.order(world.state, world.now) is None, "agents have sent what they had to another one"
    world.located = Located(kind="unknown")
    while not world.state.incidents:
        world.turn(0.5)
        assert world.now < began + 30.0
    assert world.state.incidents[1].opened.captures


def test_a_look_of_the_user_is_not_replaced_while_agents_are_at_it() -> None:
    world = training()
    world.hang(2)
    world.turn(4.0)
    for node in world.nodes.values():
        node.captured = 0
    attempt = world.state.active
    assert attempt is not None
    world.located = None
    world.write(captures.ask(world.state, attempt, "user", world.now))
    assert captures.in_flight(world.state, world.picture(), world.now) is not None
    world.turn(1.5)
    assert [one.reason for one in asked(world)] == ["user"]
    world.located = Located(kind="unknown")
    world.turns(2)
    assert [one.reason for one in asked(world)] == ["user", "hang"]


def test_the_same_number_twice_is_one_capture() -> None:
    world = training()
    attempt = world.state.active
    assert attempt is not None
    first = captures.ask(world.state, attempt, "user", world.now)
    world.write(first)
    world.write(replace(first, reason="hang"))
    assert [one.asked for one in world.state.captures] == [first]
    assert captures.ask(world.state, attempt, "user", world.now).capture == 2


def test_numbers_go_on_over_runs_and_little_is_remembered() -> None:
    world = training()
    attempt = world.state.active
    assert attempt is not None
    for _ in range(100):
        world.write(captures.ask(world.state, attempt, "user", world.now))
    assert len(world.state.captures) == 32
    again = apply(world.state, replace(world.run, run_id="again"))
    assert (again.captures, again.next_capture) == ((), 101)


def test_an_attempt_that_ends_is_not_looked_at() -> None:
    world = training()
    attempt = world.state.active
    assert attempt is not None
    world.write(captures.ask(world.state, attempt, "user", world.now))
    assert captures.order(world.state, world.now) is not None
    world.write(AttemptEnding(time=world.now, attempt=1, signal=9, because="a test"))
    assert captures.order(world.state, world.now) is None


# -- what the verdict makes of it --------------------------------------------------------------------------------------


def incident(world: World) -> dict[str, object]:
    found: dict[str, object] = views.incidents(world.state)[-1]
    return found


def test_stacks_name_rank_class_and_group() -> None:
    world = training()
    world.located = Located(
        kind="loader", ranks=(2,), nodes=("node-1",), group=(2, 3), group_name="tp", category="hang_dataloader",
        confidence=0.85, evidence=("rank 2 on node-1: its data loader delivers nothing",), captures=(1,),
    )  # fmt: skip
    hung(world, 11.0)
    world.turns()
    found = incident(world)
    assert (found["cause"], found["class"], found["category"]) == ("hang (loader)", "loader", "hang_dataloader")
    assert (found["ranks"], found["nodes"], found["group"]) == ([2], ["node-1"], [2, 3])
    assert found["captures"] == [1, 2] and found["confidence"] == 0.85
    evidence = found["evidence"]
    assert isinstance(evidence, list)
    assert evidence[0] == "rank 2 on node-1: its data loader delivers nothing"
    assert any("does nothing" in line for line in evidence), "what was seen without stacks backs them"
    assert evidence[-1] == "`evertrain stacks --incident 1` shows the stacks"
    assert found["action"] == "restart"


def test_what_is_not_known_better_keeps_its_words() -> None:
    for kind, cpu, cause in (("unknown", 0.0, "still"), ("outside", 0.0, "still"), ("loop", 0.97, "busy")):
        world = training()
        world.located = Located(kind=kind, ranks=(2,), nodes=("node-1",), confidence=0.8)  # type: ignore[arg-type]
        hung(world, 13.0, cpu_fraction=cpu)
        assert (incident(world)["cause"], incident(world)["ranks"]) == (f"hang ({cause})", [2])


def test_a_doubtful_verdict_is_none_and_a_fact_is_not_contradicted() -> None:
    for kind, confidence, activity in (("network", 0.3, {}), ("loader", 0.9, {"stopped": True})):
        world = training()
        world.located = Located(kind=kind, ranks=(0,), nodes=("node-0",), confidence=confidence)  # type: ignore[arg-type]
        hung(world, 11.0, **activity)
        assert incident(world)["ranks"] == [2] and incident(world)["class"] == ""
        assert incident(world)["captures"] == [1, 2][-1:], "what was looked at can be seen all the same"


@pytest.mark.parametrize(
    "kind", ["loader", "checkpoint", "storage", "skipped", "order", "mismatch", "deadlock", "loop"]
)
def test_what_is_no_machines_fault_never_costs_a_node_its_place(kind: LocatedKind) -> None:
    world = training(nodes=3, standby=1)
    world.turns()
    world.located = Located(
        kind=kind, ranks=(2,), nodes=("node-1",), eviction=("node-1",), confidence=0.8, category="host_os"
    )
    # of any other hang it would be evidence enough
    world.sense("node-1", "hardware_reading", "odd")
    hung(world, 11.0)
    world.turns()
    assert incident(world)["action"] == "restart"
    assert incident(world)["category"] in ("hang_dataloader", "storage", "user_code")
    assert world.state.nodes["node-1"].state == "active"


def test_a_group_is_taken_out_where_nobody_in_it_can_be_named_and_standbys_suffice() -> None:
    for standby, action in ((2, "evict"), (1, "restart")):
        world = training(nodes=4 + standby, nproc=1, standby=standby)
        world.turns()
        world.located = Located(
            kind="network", group=(1, 2), group_name="tp", eviction=("node-1", "node-2"), confidence=0.6
        )
        hung(world, 11.0, rank=-1)
        world.turns(12)
        found = incident(world)
        assert (found["cause"], found["ranks"], found["action"]) == ("hang (network)", [], action)
    assert not [one for one in world.state.memory.past if one.nodes], "nobody of it was named"


def test_by_the_papers_rule_the_group_of_the_named_goes_at_once() -> None:
    for policy, gone in (("paper", {"node-1", "node-2"}), ("careful", set())):
        config = Config(hang=HangConfig(policy=policy))  # type: ignore[arg-type]
        world = training(nodes=6, nproc=1, standby=2, config=config)
        world.turns()
        world.located = Located(
            kind="device", ranks=(2,), nodes=("node-2",), group=(1, 2), group_name="tp", eviction=("node-1", "node-2"),
            confidence=0.7,
        )  # fmt: skip
        hung(world, 11.0)
        world.turns(12)
        assert {node for node, seen in world.state.nodes.items() if seen.state == "evicted"} == gone


def test_who_only_spins_counts_as_still() -> None:
    world = training()
    world.standing = (2,)
    hung(world, 11.0, cpu_fraction=1.0)
    world.turns()
    assert incident(world)["action"] == "restart"
    works = training()
    works.standing = (1,)
    hung(works, 11.0, cpu_fraction=1.0)
    works.turns()
    assert incident(works)["action"] == "tolerate", "another rank does"


def test_a_named_rank_is_named_anew_only_when_it_is_another_one() -> None:
    world = training(observe_only=True)
    world.located = Located(kind="loader", ranks=(3,), nodes=("node-1",), confidence=0.85)
    hung(world, 60.0)
    opened = [record for record in world.log if isinstance(record, IncidentOpened)]
    assert [one.ranks for one in opened] == [(3,)]
