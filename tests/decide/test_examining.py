"""Nodes are tested though nobody is suspected: when the user asks, when a standby has come, before one returns."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from evertrain.controller import check_views
from evertrain.decide import examining, inspected
from evertrain.model import records as r
from evertrain.model.config import Config, DiagnoseConfig, LadderConfig
from evertrain.model.diagnosis import Inspected, InspectOrder, Reading, StageAsked
from evertrain.model.exam_records import ExamAsked, ExamOver
from support.world import World

SHORT = ["vendor diagnostics", "compute", "memory", "bit-wise alignment"]


class Fleet:
    """What test programs come to: `odd` by node and program, everything else passes."""

    def __init__(self, **odd: str) -> None:
        self.odd = {tuple(name.split("__")): outcome for name, outcome in odd.items()}
        self.asked: list[tuple[str, str]] = []

    def __call__(self, node: str, order: InspectOrder) -> Inspected | None:
        self.asked.append((node, order.program))
        outcome: Any = self.odd.get((node.replace("-", "_"), order.program), "passed")
        if outcome == "no end":
            return None
        reading = Reading(rank=0, name="matmul", value=1.0, unit="GFLOP/s", ok=outcome != "failed")
        because = "" if outcome == "passed" else f"3 elements are {outcome}"
        readings = (reading,) if order.program == "compute" else ()
        return Inspected(number=order.number, outcome=outcome, because=because, readings=readings)

    def tested(self, node: str) -> list[str]:
        return [program for one, program in self.asked if one == node]


def machines(fleet: Fleet, *, nodes: int = 3, standby: int = 1, **diagnose: Any) -> World:
    """Every node is a machine of its own."""
    config = Config(diagnose=DiagnoseConfig(**diagnose), ladder=LadderConfig(test_every_s=10.0, quiet_s=30.0))
    world = World(nodes + standby, 2, standby=standby, config=config, inspect=fleet)
    for number, node in enumerate(world.nodes.values()):
        node.address = f"10.0.0.{number}"
    return world


def trains(world: World) -> World:
    world.turns()
    world.train(5)
    world.turns(4)
    return world


def ask(world: World, *nodes: str, suite: Any = "crash", budget_s: float = 600.0) -> str:
    """As `evertrain diagnose` does; why it is refused."""
    records = examining.ask(world.state, world.picture(), nodes, suite, budget_s, world.now)
    if isinstance(records, str):
        return records
    for record in records:
        world.write(record)
    return ""


def over(world: World) -> ExamOver:
    for _ in range(400):
        if world.state.exam is None:
            break
        world.turn(0.5)
    found = world.state.exams[-1].over
    assert found is not None, "it never ends"
    return found


def stages(world: World) -> list[str]:
    return [one.asked.name for one in world.state.exams[-1].stages]


# -- asked for by hand -------------------------------------------------------------------------------------------------


def test_all_nodes_of_a_job_that_waits_are_tested_and_its_start_waits_for_that() -> None:
    fleet = Fleet()
    world = machines(fleet)
    assert not ask(world)
    assert over(world).outcome == "passed"
    assert {node for node, _ in fleet.asked} == set(world.nodes), "standbys, too"
    assert stages(world)[:3] == ["vendor diagnostics", "compute", "memory"]
    assert stages(world).count("exchange between nodes") == 2, "with both neighbours"
    assert not any(one.time < world.state.exams[-1].over.time for one in world.log if isinstance(one, r.AttemptStarted))  # type: ignore[union-attr]
    world.turns()
    assert world.state.active is not None, "and then it starts"
    world.take_over()


def test_a_node_that_fails_goes_and_a_standby_takes_over_before_the_start() -> None:
    world = machines(Fleet(node_1__compute="failed"))
    assert not ask(world)
    assert over(world).because == "node-1: compute: 3 elements are failed"
    assert stages(world) == ["vendor diagnostics", "compute"], "no test more than it took"
    world.turns(20)
    assert world.state.active_nodes() == ("node-0", "node-3", "node-2")
    (incident,) = world.state.incidents.values()
    assert (incident.opened.cause, incident.opened.nodes) == ("failed tests", ("node-1",))
    assert "compute: 3 elements are failed" in incident.opened.evidence[0]
    assert world.state.memory.blocked["node-1"].is_certain, "no later test clears it"


def test_nodes_that_train_are_not_tested_and_the_line_says_what_to_do() -> None:
    world = trains(machines(Fleet(), returning=False))
    said = ask(world)
    assert "it trains on node-0, node-1, node-2" in said and "--nodes node-3" in said and "evertrain stop" in said
    assert "trains on node-2, and" in ask(world, "node-3", "node-2")
    assert "no node node-9" in ask(world, "node-9")
    world.nodes["node-3"].connected = False
    assert "no word from node-3" in ask(world, "node-3")
    world.stop()
    assert "is ending" in ask(world, "node-3")
    assert world.state.exam is None


def test_a_standby_is_tested_while_the_job_trains_also_on_the_same_machine() -> None:
    fleet = Fleet(node_3__memory="failed")
    world = machines(fleet)
    for node in world.nodes.values():
        node.address = "127.0.0.1"
    trains(world)
    assert world.state.exam is None and not fleet.asked, "by itself nothing is tested beside ranks"
    assert not ask(world, "node-3")
    assert over(world).outcome == "failed"
    world.turns()
    assert world.state.nodes["node-3"].state == "evicted"
    assert world.state.active is not None and len(world.state.attempts) == 1, "training has gone on"


def test_who_asks_again_gets_the_same_and_who_asks_for_others_waits() -> None:
    world = trains(machines(Fleet(node_3__compute="no end"), standby=2, returning=False))
    assert not ask(world, "node-3") and not ask(world, "node-3")
    assert len(world.state.exams) == 1
    assert "under way" in ask(world, "node-4")


def test_a_standby_that_is_needed_is_tested_no_longer() -> None:
    fleet = Fleet(node_3__compute="no end")
    world = trains(machines(fleet))
    assert not ask(world, "node-3")
    world.turns(6, 0.5)
    assert fleet.tested("node-3")[-1] == "compute"
    world.signal("gpu_lost", "node-1")
    world.turns(30)
    assert world.state.active_nodes() == ("node-0", "node-3", "node-2")
    (asked,) = [one for one in world.log if isinstance(one, ExamAsked) and one.reason == "user"]
    ended = next(one.over for one in world.state.exams if one.asked.exam == asked.exam)
    assert ended is not None and ended.outcome == "given_up" and "ranks are started there" in ended.because
    assert len(world.running()) == 6


def test_no_start_waits_longer_than_the_budget() -> None:
    world = machines(Fleet(node_1__vendor="no end"))
    assert not ask(world, budget_s=20.0)
    began = world.now
    assert over(world).outcome == "unknown"
    assert world.now - began < 22
    world.turns()
    assert world.state.active is not None


def test_a_job_that_ends_gives_up_the_tests() -> None:
    world = machines(Fleet(node_1__vendor="no end"))
    assert not ask(world)
    world.turns(4, 0.5)
    world.stop()
    world.turns(20, 0.5)
    assert world.state.exams[-1].over is not None and world.state.exams[-1].over.because == "the job is ending"
    assert world.state.ended is not None


def test_what_is_shown_has_every_number() -> None:
    world = machines(Fleet())
    assert not ask(world, "node-0", "node-1", suite="nan")
    assert check_views.under_way(world.state).startswith("the start waits for tests of 2 nodes")
    over(world)
    shown = check_views.exam(world.state, 1)
    assert shown is not None and shown["over"] and shown["outcome"] == "passed"
    compute = next(one for one in shown["checks"] if one["name"] == "compute")
    assert compute["results"]["node-1"]["readings"][0]["value"] == 1.0
    assert check_views.exam(world.state, 2) is None


# -- what nobody asks for ----------------------------------------------------------------------------------------------


def test_a_standby_is_tested_once_when_it_has_come_and_training_goes_its_way() -> None:
    fleet = Fleet()
    world = trains(machines(fleet, standby=2))
    assert over(world).passed == ("node-3", "node-4")
    assert stages(world) == SHORT
    resumed = world.state.attempts[0].resumed
    assert resumed is not None and world.state.exams[0].asked.time >= resumed.time, "the first start is not held up"
    world.turns(20, 5.0)
    assert len(world.state.exams) == 1
    world.take_over()


def test_a_standby_that_fails_is_no_standby_any_more() -> None:
    world = trains(machines(Fleet(node_3__compute="failed")))
    over(world)
    world.turns()
    assert world.state.nodes["node-3"].state == "evicted"
    (incident,) = world.state.incidents.values()
    assert incident.closed is not None and incident.opened.evidence == ("node-3: compute: 3 elements are failed",)
    assert world.state.standbys() == () and len(world.running()) == 6


def test_an_incident_comes_before_the_tests_of_standbys() -> None:
    world = trains(machines(Fleet(node_3__compute="no end")))
    assert world.state.exam is not None
    world.fail(1)
    world.turn()
    assert world.state.exam is None and world.state.exams[-1].over is not None
    assert world.state.exams[-1].over.outcome == "given_up"
    assert world.nodes["node-3"].order is not None and world.nodes["node-3"].order.inspect is None
    world.turns(20)
    world.train(12)
    world.turns(4)
    assert world.state.exam is not None, "later they are"


@pytest.mark.parametrize("settings", [{"returning": False}, {"enabled": False}])
def test_nothing_is_tested_where_that_is_not_wanted(settings: dict[str, bool]) -> None:
    fleet = Fleet()
    world = trains(machines(fleet, **settings))
    world.turns(20, 5.0)
    assert not fleet.asked


def evicted(fleet: Fleet, *, shared: bool = False, standby: int = 1) -> World:
    """The network of node-1 was odd twice, and it has gone; node-3 is in its place."""
    world = machines(fleet, standby=standby)
    if shared:
        for node in world.nodes.values():
            node.address = "127.0.0.1"
    trains(world)
    for _ in range(2):
        world.signal("network_alert", "node-1")
        world.turns(4)
    assert "node-1" in world.state.memory.blocked
    trains(world)
    world.train(12)
    return world


def test_an_evicted_node_passes_the_tests_before_it_is_a_standby_again() -> None:
    fleet = Fleet()
    world = evicted(fleet)
    before = fleet.tested("node-1")
    for _ in range(100):
        world.turn(1.0)
        if "node-1" in world.state.roster:
            break
    assert world.state.standbys() == ("node-1",)
    assert fleet.tested("node-1")[len(before) :] == ["vendor", "compute", "memory", "alignment"]
    world.turns(30, 5.0)
    assert len(fleet.tested("node-1")) == len(before) + 4, "it is not tested a second time as a standby"


def test_an_evicted_node_that_fails_stays_out_with_the_numbers() -> None:
    world = evicted(Fleet(node_1__memory="failed"))
    world.turns(80, 2.0)
    assert "node-1" not in world.state.roster
    assert "memory: 3 elements are failed" in world.state.memory.blocked["node-1"].because
    asked = [one for one in world.log if isinstance(one, ExamAsked) and one.reason == "returning"]
    assert len(asked) == 1, "nothing more is to be found out"
    world.take_over()


def test_one_that_cannot_be_tested_to_the_end_is_tested_again_later() -> None:
    world = evicted(Fleet(node_1__memory="crashed"))
    world.turns(80, 2.0)
    assert "node-1" not in world.state.roster
    times = [one.time for one in world.log if isinstance(one, ExamAsked) and one.reason == "returning"]
    assert len(times) > 1 and min(b - a for a, b in pairwise(times)) >= 30.0


def test_on_a_machine_on_which_ranks_train_the_self_check_alone_lets_it_back() -> None:
    fleet = Fleet()
    world = evicted(fleet, shared=True)
    world.turns(50, 2.0)
    assert world.state.standbys() == ("node-1",)
    assert not fleet.asked


def test_a_node_that_the_user_lets_back_is_tested_like_any_that_comes() -> None:
    fleet = Fleet()
    world = evicted(fleet)
    before = len(fleet.tested("node-1"))
    world.write(r.AllowAsked(time=world.now, node="node-1", because="new board"))
    world.turns(40, 0.5)
    assert world.state.standbys() == ("node-1",)
    assert len(fleet.tested("node-1")) == before + 4


def test_one_that_would_come_back_is_compared_with_standbys_where_nothing_is_stored() -> None:
    fleet = Fleet()
    world = evicted(fleet, standby=4)
    while not any(one.asked.reason == "returning" for one in world.state.exams):
        world.turn(1.0)
    assert world.state.exams[-1].asked.nodes == ("node-1", "node-4", "node-5")
    over(world)
    world.turns(3)
    assert "node-1" in world.state.standbys()


def test_one_alone_has_to_repeat_its_own_bits() -> None:
    asked = StageAsked(
        time=0.0, stage=1, incident=0, symptom="returning", name="bit-wise alignment", program="alignment",
        parameters={}, budget_s=20.0, nodes=("a",), groups=(("a",),),
    )  # fmt: skip
    setting = {"device": "cpu", "capability": "", "threads": 1, "versions": "", "model": ""}
    records = {name: [[1, "loss", name]] for name in ("x", "y")}
    detail = {"runs": ["x", "x", "y"], "records": records, "setting": setting}
    reading = Reading(rank=2, name="alignment", value=0.1, unit="s/step", detail=detail)
    said = {"a": Inspected(number=1, outcome="passed", readings=(reading,))}
    assert inspected.alone(asked, said, {}, {}).accused == {"a": "a: bit-wise alignment: rank 2: 3 runs gave 2 results"}
    assert inspected.alone(asked, said, {"b": said["a"]}, {}).accused == {}, "there the others say more"
