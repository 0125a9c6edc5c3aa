"""What the ladder remembers follows the log, is bounded, and is clean for a node that was out."""

from __future__ import annotations

from typing import Any

from evertrain.decide import eviction
from evertrain.decide.memory import MOST_CHAIN, MOST_EVICTIONS, MOST_NODES, MOST_PAST, MOST_SIGNS, Memory, evolve
from evertrain.model import decisions as d
from evertrain.model.config import LadderConfig


def alert(node: str = "node-1", at: float = 0.0) -> d.NetworkAlert:
    return d.NetworkAlert(time=at, node=node, signal="link_down", evidence=f"link down at {at:.0f} s")


def reading(node: str = "node-1", at: float = 0.0) -> d.HardwareReading:
    return d.HardwareReading(time=at, node=node, signal="xid", evidence="Xid 63")


def fault(node: str = "node-1", at: float = 0.0) -> d.NodeFault:
    return d.NodeFault(time=at, node=node, signal="gpu_lost", evidence="GPU 3 is gone")


def failed(incident: int = 1, at: float = 0.0, **more: Any) -> d.AttemptFailed:
    return d.AttemptFailed(
        time=at, incident=incident, **{"source": "exit", "cause": "killed", "category": "unknown", **more}
    )


def evict(*nodes: str, **more: Any) -> d.Evict:
    return d.Evict(nodes=nodes, because="it was seen to fail", evidence=("seen",), **more)


def tolerate(event: Any) -> tuple[d.AnyAction, ...]:
    return (d.Tolerate(node=event.node, because="once"),)


RESTART = d.Restart(because="again")
NOTHING = Memory()


def remember(*decisions: tuple[d.AnyEvent, tuple[d.AnyAction, ...]], memory: Memory = NOTHING) -> Memory:
    for event, actions in decisions:
        memory = evolve(memory, event, actions, getattr(event, "incident", None))
    return memory


def test_alerts_and_readings_are_kept_by_node_oldest_first() -> None:
    events = [alert(at=1), alert("node-2", at=2), reading(at=3), alert(at=4)]
    memory = remember(*((event, tolerate(event)) for event in events))
    assert [seen.time for seen in memory.alerts["node-1"]] == [1, 4]
    assert set(memory.alerts) == {"node-1", "node-2"} and set(memory.readings) == {"node-1"}


def test_a_blind_sensor_leaves_no_trace() -> None:
    blind = d.SensorBlind(time=0, node="node-1", sensor="nvml", evidence="no answer")
    memory = remember((alert(), tolerate(alert())))
    assert evolve(memory, blind, tolerate(blind)) is memory


def test_an_evicted_node_is_blocked_with_the_reason_and_its_slate_is_clean() -> None:
    memory = remember(
        (alert(), ()), (reading(), ()), (failed(nodes=("node-1", "node-2")), (RESTART,)),
        (alert(at=9), (evict("node-1"),)),
    )  # fmt: skip
    assert not memory.alerts and not memory.readings
    assert memory.past[0].nodes == ("node-2",)
    out = memory.blocked["node-1"]
    assert (out.since, out.because, out.is_certain) == (9, "it was seen to fail", False)
    assert memory.evictions[0].counted


def test_a_certain_fault_blocks_for_good_whenever_the_node_goes() -> None:
    waits = d.WaitForNodes(nodes=1, until=300, because="none is left")
    memory = remember((fault(), (waits,)))
    assert memory.faults["node-1"] == fault()
    memory = remember((d.NodeReady(time=60, node="node-9"), (evict("node-1"),)), memory=memory)
    assert memory.blocked["node-1"].is_certain and not memory.faults
    later = remember((alert("node-2"), (evict("node-2"),)), (fault("node-2", at=5), ()))
    assert later.blocked["node-2"].is_certain, "seen when it was out already"


def test_neither_lost_nor_spare_nor_drained_nodes_count() -> None:
    lost, spare, drained = evict("a", lost=True), evict("b", spare=True), evict("c", planned=True)
    memory = remember((failed(), (lost,)), (fault("b"), (spare,)))
    memory = remember((d.DrainRequested(time=3, node="c", because="service"), (drained,)), memory=memory)
    assert [one.counted for one in memory.evictions] == [False, False]
    assert memory.blocked["c"].is_drained and memory.chain.evictions == 1


def test_evicted_again_it_says_how_often() -> None:
    enlist = (d.Enlist(node="node-1", because="passed"),)
    tested = d.NodeTested(time=5, node="node-1", passed=True)
    memory = remember((alert(), (evict("node-1"),)), (tested, enlist))
    assert not memory.blocked
    again = remember((alert(at=9), (evict("node-1"),)), memory=memory)
    assert eviction.too_often(again, "node-1", 9, LadderConfig()) == "evicted 2 times within 7 days"
    assert eviction.too_often(again, "node-1", 9 + 604_801, LadderConfig()) == ""


def test_a_chain_grows_until_training_has_proven_itself() -> None:
    checks = d.Inspect(nodes=("node-1",), because="again")
    memory = remember((failed(1), (RESTART,)), (failed(2), (checks,)))
    assert (memory.chain.incidents, memory.chain.asked, memory.chain.reattempts) == ((1, 2), ("inspect",), 0)
    clean = d.Answered(time=4, incident=2, rung="inspect", outcome="clean")
    memory = remember((clean, (RESTART,)), memory=memory)
    assert memory.chain.reattempts == 1
    old, newest = d.Proven(time=5, incident=1), d.Proven(time=6, incident=2)
    assert evolve(memory, old, ()).chain == memory.chain, "the newest failure is not behind us"
    assert evolve(memory, newest, ()).chain.incidents == ()


def test_a_hold_holds_and_is_counted() -> None:
    memory = remember((failed(category="storage"), (d.Hold(until=30, because="no storage"),)))
    assert (memory.hold_until, memory.chain.holds) == (30, 1)


def test_it_does_not_grow_with_the_age_of_a_job() -> None:
    memory = Memory()
    for turn in range(2 * MOST_SIGNS):
        memory = remember((alert(at=turn), ()), (reading(at=turn), ()), memory=memory)
    for turn in range(MOST_NODES + 5):
        memory = evolve(memory, alert(f"n{turn}", at=1000 + turn), ())
    for turn in range(MOST_EVICTIONS + 5):
        memory = remember((failed(turn, at=turn, nodes=("x",)), (evict("x"),)), memory=memory)
    assert "node-1" not in memory.alerts and f"n{MOST_NODES + 4}" in memory.alerts
    assert len(memory.readings["node-1"]) == MOST_SIGNS and memory.readings["node-1"][-1].time == 2 * MOST_SIGNS - 1
    assert len(memory.alerts) == MOST_NODES
    assert (len(memory.evictions), len(memory.past), len(memory.chain.incidents)) == (
        MOST_EVICTIONS, MOST_PAST, MOST_CHAIN
    )  # fmt: skip
