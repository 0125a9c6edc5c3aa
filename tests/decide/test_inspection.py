"""Stopped nodes are tested, cheap tests first: who is broken goes, nobody healthy does, and no start waits for long."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.controller import check_views
from evertrain.decide import inspected, inspection, lost
from evertrain.decide.state import Incident
from evertrain.model import decisions as d
from evertrain.model.config import Config, DiagnoseConfig
from evertrain.model.diagnosis import Inspected, InspectOrder, Reading, StageAsked
from evertrain.model.records import SignalRaised
from support.world import World

SETTING = {"device": "cpu", "capability": "AVX2", "threads": 1, "versions": "torch 2", "model": "dense"}
ALIGNMENT = "bit-wise alignment"
ALL = ["vendor diagnostics", "compute", ALIGNMENT, "exchange within the node"]
BETWEEN = "exchange between nodes"


class Fleet:
    """What test programs come to on each node; `odd`: by program, a node and what it gives there."""

    def __init__(self, link: tuple[str, ...] = (), sender: str = "", **odd: tuple[str, str]) -> None:
        self.link, self.sender, self.odd = link, sender, odd
        self.orders: list[tuple[str, InspectOrder]] = []

    def __call__(self, node: str, order: InspectOrder) -> Inspected | None:
        self.orders.append((node, order))
        if "nodes" in order.parameters:
            return self._between(node, order)
        bad, given = self.odd.get(order.program, ("", ""))
        outcome: Any = given if bad in (node, "all") else "passed"
        if outcome == "late once":
            outcome = "late" if len(self.asked(node, order.program)) == 1 else "passed"
        if outcome == "no end":
            return None
        readings: tuple[Reading, ...] = ()
        if order.program == "alignment":
            name = f"bits of {node}" if outcome == "other bits" else "usual"
            detail = {"runs": [name], "records": {name: [[1, "forward layer 0", name]]}, "setting": SETTING}
            readings = (Reading(rank=0, name="alignment", value=0.1, unit="s/step", detail=detail),)
            outcome = "passed" if outcome == "other bits" else outcome
        because = "" if outcome == "passed" else f"rank 0 is {outcome}"
        return Inspected(number=order.number, outcome=outcome, because=because, seconds=0.5, readings=readings)

    def asked(self, node: str, program: str) -> list[InspectOrder]:
        return [order for one, order in self.orders if one == node and order.program == program]

    def _between(self, node: str, order: InspectOrder) -> Inspected:
        assert order.parameters["store"] == {"host": "127.0.0.1", "port": 29002}
        pair = order.parameters["nodes"]
        assert node in pair and len(pair) == 2
        wrong = [one for one in pair if one == self.sender]
        wrong = wrong or ([pair[0]] if set(pair) == set(self.link) else [])
        # of the same pair one is much slower: that is no fault of numbers that are wrong
        rate = 1e6 if "node-0" in pair else 1e8
        reading = Reading(
            rank=0, name="all-gather", value=rate, unit="bytes/s", ok=not wrong, detail={"mismatches": wrong}
        )
        return Inspected(number=order.number, outcome="failed" if wrong else "passed", readings=(reading,))


def not_finite(fleet: Fleet, *, nodes: int = 4, standby: int = 0, **config: Any) -> World:
    """A job whose loss is not finite, when its nodes have been stopped."""
    settings = Config(diagnose=DiagnoseConfig(**config))
    world = World(nodes + standby, 2, standby=standby, config=settings, inspect=fleet)
    world.turns()
    world.train(5)
    world.turn()
    what = "loss_not_finite"
    world.write(SignalRaised(time=world.now, node="node-0", signal=what, evidence=what, key="k", attempt=1))
    return world


def through(world: World) -> float:
    """Until training goes on or has ended; in seconds how long that took."""
    began = world.now
    while len(world.state.attempts) == 1 and world.state.ended is None:
        world.turn(0.5)
        assert world.now - began < 1000, "nobody goes on"
    return world.now - began


def incident(world: World) -> Incident:
    return world.state.incidents[1]


def stages(world: World) -> list[str]:
    return [one.asked.name for one in incident(world).stages]


def answer(world: World) -> d.Answered:
    (found,) = (one.event for one in incident(world).decisions if isinstance(one.event, d.Answered))
    return found


def notes(world: World) -> list[str]:
    return [note for one in incident(world).stages if one.done is not None for note in one.done.notes]


def test_a_node_with_other_bits_goes_and_a_standby_takes_over() -> None:
    fleet = Fleet(alignment=("node-2", "other bits"))
    world = not_finite(fleet, standby=1)
    through(world)
    assert stages(world) == ["vendor diagnostics", "compute", ALIGNMENT], "and no test more than it took"
    assert answer(world).nodes == ("node-2",)
    said = "node-2: 1 of 1 run differ from what most nodes give, first in forward layer 0 on local rank 0"
    assert answer(world).evidence == (said,)
    assert world.state.active_nodes() == ("node-0", "node-1", "node-4", "node-3")
    assert world.state.nodes["node-2"].state == "evicted"
    assert not fleet.asked("node-4", "compute"), "there are enough of the others"
    assert all(node.order is not None and node.order.inspect is None for node in world.nodes.values())


def test_where_all_pass_training_goes_on_and_a_second_time_the_ladder_goes_further() -> None:
    world = not_finite(Fleet())
    assert through(world) < 20
    assert stages(world) == [*ALL, BETWEEN, BETWEEN]
    assert (answer(world).outcome, answer(world).nodes) == ("clean", ())
    assert world.state.active_nodes() == ("node-0", "node-1", "node-2", "node-3")
    (setting,) = world.state.golden
    assert setting.device == "cpu", "what enough nodes agree on is kept"
    kept = incident(world).stages[2].done
    assert kept is not None and kept.results["node-1"].readings[0].value == 0.1
    assert "records" not in kept.results["node-1"].readings[0].detail
    world.take_over()


def test_a_test_that_fails_by_itself_needs_no_others() -> None:
    world = not_finite(Fleet(compute=("node-1", "failed")), nodes=2, standby=1)
    through(world)
    assert answer(world).evidence == ("node-1: compute: rank 0 is failed",)
    assert world.state.active_nodes() == ("node-0", "node-2")


def test_two_nodes_are_outvoted_with_the_help_of_a_standby() -> None:
    world = not_finite(Fleet(alignment=("node-1", "other bits")), nodes=2, standby=1)
    through(world)
    assert answer(world).nodes == ("node-1",)


def test_a_standby_that_is_found_broken_takes_nobodys_place() -> None:
    world = not_finite(Fleet(alignment=("node-2", "other bits")), nodes=2, standby=1)
    through(world)
    assert answer(world).nodes == ()
    assert world.state.roster == ("node-0", "node-1")
    assert world.state.nodes["node-2"].state == "evicted"
    assert "node-2" in world.state.memory.blocked


def test_two_nodes_that_differ_accuse_nobody() -> None:
    world = not_finite(Fleet(alignment=("node-1", "other bits")), nodes=2)
    through(world)
    assert answer(world).nodes == ()
    assert "2 nodes with this setting have no majority" in "".join(notes(world))


@pytest.mark.parametrize("outcome", ["late", "crashed"])
def test_who_fails_to_end_a_test_twice_where_others_do_is_accused(outcome: str) -> None:
    fleet = Fleet(compute=("node-3", outcome))
    world = not_finite(fleet, standby=1)
    through(world)
    assert stages(world) == ["vendor diagnostics", "compute", "compute"]
    assert [len(fleet.asked(node, "compute")) for node in ("node-0", "node-3")] == [1, 2]
    assert answer(world).evidence == (f"node-3: compute {outcome} twice, 3 of 4 nodes passed: rank 0 is {outcome}",)


def test_who_is_late_is_not_tested_again_with_less_time_than_it_had() -> None:
    fleet = Fleet(vendor=("node-0", "no end"), compute=("node-3", "late"))
    world = not_finite(fleet, standby=1, budget_s=100.0)
    through(world)
    first = incident(world).stages[1].asked
    assert first.name == "compute" and first.budget_s <= 10.0, "the first test has taken nearly all of the time"
    assert stages(world).count("compute") == 1
    assert answer(world).nodes == ()


def test_who_was_only_held_up_is_not_accused() -> None:
    world = not_finite(Fleet(compute=("node-3", "late once")), standby=1)
    through(world)
    assert (answer(world).outcome, stages(world)[:4]) == ("clean", [ALL[0], "compute", "compute", ALIGNMENT])


@pytest.mark.parametrize("outcome", ["late", "crashed", "absent", "other bits", "failed"])
def test_where_all_are_odd_it_is_the_test(outcome: str) -> None:
    world = not_finite(Fleet(compute=("all", outcome), alignment=("all", outcome)), standby=1)
    through(world)
    assert answer(world).nodes == ()
    assert stages(world).count("compute") == 1


@pytest.mark.parametrize(("symptom", "bad"), [("nccl", True), ("slow", True), ("nan", False)])
def test_what_tcp_sent_again_counts_where_the_network_is_in_question(symptom: Any, bad: bool) -> None:
    pair = ("node-0", "node-1")
    asked = StageAsked(
        time=0.0, stage=1, incident=1, symptom=symptom, name=BETWEEN, program="exchange", parameters={}, budget_s=20.0,
        nodes=pair, groups=(pair,),
    )  # fmt: skip

    def said(segments: int, resent: int) -> Inspected:
        detail = {"mismatches": [], "segments": segments, "resent": resent}
        reading = Reading(rank=0, name="all-gather", value=1e8, unit="bytes/s", ok=True, detail=detail)
        return Inspected(number=1, outcome="passed", readings=(reading,))

    (result,) = inspected.pair_results([(asked, {"node-0": said(2000, 2), "node-1": said(2000, 40)})])
    assert result.resent == 0.02
    judged = inspected.together(asked, [result])
    assert any("TCP had to send 2.0% again" in note for note in judged.notes) is bad and not judged.accused
    (few,) = inspected.pair_results([(asked, {"node-0": said(900, 400), "node-1": said(0, 0)})])
    assert few.resent is None


def test_of_runs_that_are_all_the_same_the_log_keeps_one() -> None:
    def readings(*runs: str) -> tuple[Reading, ...]:
        detail = {"runs": list(runs), "records": {}, "setting": SETTING}
        return (Reading(rank=0, name="alignment", value=0.1, unit="s/step", detail=detail),)

    same = inspection.kept(Inspected(number=1, outcome="passed", readings=readings("a", "a", "a"))).readings[0].detail
    assert same == {"runs": ["a"], "same_runs": 3, "setting": SETTING}
    odd = inspection.kept(Inspected(number=1, outcome="passed", readings=readings("a", "b", "a"))).readings[0].detail
    assert odd["runs"] == ["a", "b", "a"]


def test_a_bad_link_is_named_and_costs_nobody_a_place() -> None:
    world = not_finite(Fleet(link=("node-1", "node-2")), standby=1)
    through(world)
    assert answer(world).outcome == "clean"
    assert f"{BETWEEN}: the link of node-1 and node-2 is bad, each is well towards others" in notes(world)


def test_a_node_that_sends_wrong_data_to_everybody_goes() -> None:
    world = not_finite(Fleet(sender="node-3"), nodes=5, standby=1)
    through(world)
    assert answer(world).nodes == ("node-3",)
    assert "sent came with other content" in answer(world).evidence[0]


@pytest.mark.parametrize("nodes", [2, 3, 4, 5, 8])
def test_each_node_meets_both_of_its_neighbours(nodes: int) -> None:
    fleet = Fleet()
    world = not_finite(fleet, nodes=nodes)
    through(world)
    met = {frozenset(order.parameters["nodes"]) for _, order in fleet.orders if "nodes" in order.parameters}
    assert len(met) == (nodes if nodes > 2 else 1)
    keys = {order.parameters["key"] for _, order in fleet.orders if "nodes" in order.parameters}
    assert len(keys) == len(met), "no key is used twice"


@pytest.mark.parametrize("program", ["vendor", "alignment"])
def test_no_start_waits_longer_than_the_budget(program: str) -> None:
    world = not_finite(Fleet(**{program: ("node-0", "no end")}), budget_s=40.0)
    assert through(world) < 43
    assert answer(world).nodes == ()


def test_who_cannot_be_heard_is_not_waited_for_long() -> None:
    world = not_finite(Fleet(vendor=("node-3", "no end")), nodes=5)
    while not incident(world).stages if world.state.incidents else True:
        world.turn(0.5)
    world.nodes["node-3"].connected = False
    world.turns(3)
    assert len(stages(world)) == 1, "its connection may be back in a moment"
    world.turns(2, lost.GONE_S)
    assert len(stages(world)) > 1
    (first, *_) = incident(world).stages
    assert first.done is not None and first.done.results["node-3"].outcome == "silent"


def test_a_controller_that_takes_over_goes_on_with_the_same_test() -> None:
    fleet = Fleet(alignment=("node-2", "other bits"))
    world = not_finite(fleet, standby=1)
    while ALIGNMENT not in (stages(world) if world.state.incidents else []):
        world.turn(0.5)
    world.take_over()
    through(world)
    assert stages(world) == ["vendor diagnostics", "compute", ALIGNMENT]
    assert answer(world).nodes == ("node-2",)


def test_a_controller_that_has_heard_nobody_yet_takes_nobody_for_silent() -> None:
    world = not_finite(Fleet(alignment=("node-2", "other bits")), standby=1)
    while ALIGNMENT not in (stages(world) if world.state.incidents else []):
        world.turn(0.5)
    for node in world.nodes.values():
        node.connected = False
    world.take_over()
    assert not world.picture().nodes
    world.turns(3, 1.0)
    for node in world.nodes.values():
        node.connected = True
    through(world)
    (tested,) = (one.done for one in incident(world).stages if one.asked.name == ALIGNMENT)
    assert tested is not None and {one.outcome for one in tested.results.values()} == {"passed"}
    assert answer(world).nodes == ("node-2",)


def test_while_a_gpu_is_still_held_nothing_is_tested() -> None:
    world = not_finite(Fleet(), nodes=2)
    world.nodes["node-1"].gpus_held = "pid 7 is still on GPU 0"
    for _ in range(10):
        world.turn(0.5)
    assert not incident(world).stages
    world.nodes["node-1"].gpus_held = ""
    world.turn(0.5)
    assert stages(world)


@pytest.mark.parametrize(("nodes", "config"), [(1, {}), (3, {"enabled": False})])
def test_one_node_alone_is_not_tested_nor_any_where_it_is_switched_off(nodes: int, config: Any) -> None:
    fleet = Fleet()
    world = not_finite(fleet, nodes=nodes, **config)
    assert through(world) < 2
    assert not fleet.orders
    assert "stop-time checks: not available" in incident(world).decisions[0].because


def test_a_stop_ends_the_tests() -> None:
    world = not_finite(Fleet(vendor=("node-0", "no end")))
    world.turns(3, 0.5)
    assert stages(world)
    # the same words each second: the console prints a line for each that differs
    said = check_views.under_way(world.state)
    assert said == "the start waits for tests of 4 nodes, now vendor diagnostics"
    world.turns(3, 0.5)
    assert check_views.under_way(world.state) == said
    world.stop()
    assert not check_views.under_way(world.state)
    world.turns(4, 0.5)
    assert all(node.order is not None and node.order.inspect is None for node in world.nodes.values())
    assert world.state.ended is not None


@pytest.mark.parametrize(
    ("category", "cause", "symptom"),
    [
        ("numerics", "loss is NaN", "nan"),
        ("accelerator", "illegal memory access", "illegal_access"),
        ("network", "link down", "nccl"),
        ("framework_bug", "NCCL internal error", "nccl"),
        ("unknown", "SIGSEGV", "crash"),
        ("slow", "training is slow", "slow"),
    ],
)
def test_the_tests_follow_from_what_was_seen(category: str, cause: str, symptom: Any) -> None:
    assert inspection.symptom_of(category, cause) == symptom
    suite = inspection.SUITES[symptom]
    assert len({test.name for test in suite}) == len(suite)
