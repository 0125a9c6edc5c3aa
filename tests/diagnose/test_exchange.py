"""Data between ranks and between nodes: the content, the rate, and what is said of a pair that does not work."""

from __future__ import annotations

from typing import Any

from evertrain.locate import pairs
from evertrain.locate.pairs import Pair, PairResult
from support.fleet import Done, Fleet, Node

SMALL = {"size_bytes": 64 << 10, "rounds": 2}


def test_all_to_all_within_a_node(fleet: Fleet) -> None:
    done = fleet.node("a", ranks=3).test("exchange", **SMALL)
    readings = done.named("all-to-all")
    assert done.outcome == "passed" and [one["rank"] for one in readings] == [0, 1, 2]
    assert all(one["value"] > 0 and one["detail"]["mismatches"] == [] for one in readings)
    assert fleet.node("b").test("exchange").outcome == "absent"


def exchange(nodes: dict[str, Node], chosen: tuple[Pair, ...], store: dict[str, Any], key: str) -> list[PairResult]:
    for pair in chosen:
        for name in pair:
            nodes[name].ask("exchange", nodes=pair, store=store, key=f"{key}/{'-'.join(pair)}", **SMALL)
    return [result_of(pair, [nodes[name].hear_done() for name in pair]) for pair in chosen]


def result_of(pair: Pair, both: list[Done]) -> PairResult:
    readings = [one for done in both for one in done.readings]
    failed = [f"{done.outcome}: {done.because}" for done in both if done.outcome in ("late", "crashed")]
    return PairResult(
        pair=pair,
        bytes_s=min((one["value"] for one in readings), default=None),
        mismatches=tuple({name for one in readings for name in one["detail"]["mismatches"]}),
        failure="; ".join(failed),
    )


def test_both_pairings_of_four_nodes(fleet: Fleet) -> None:
    store = fleet.store()
    names = [f"n{at}" for at in range(4)]
    nodes = {name: fleet.node(name) for name in names}
    results = [
        one
        for number, pairing in enumerate(pairs.pairings(names))
        for one in exchange(nodes, pairing, store, str(number))
    ]
    assert len(results) == 4 and not any(one.failure or one.mismatches for one in results), results
    assert all(one.bytes_s and one.bytes_s > 0 for one in results)
    assert pairs.judge(names, results).median_bytes_s


def test_two_ranks_a_node(fleet: Fleet) -> None:
    nodes = {name: fleet.node(name, ranks=2) for name in ("a", "b")}
    (result,) = exchange(nodes, (("a", "b"),), fleet.store(), "k")
    assert result.bytes_s and not result.failure


def test_what_tcp_has_sent_is_counted(fleet: Fleet) -> None:
    nodes = {name: fleet.node(name) for name in ("a", "b")}
    store = fleet.store()
    for name in nodes:
        nodes[name].ask("exchange", nodes=["a", "b"], store=store, key="tcp", size_bytes=4 << 20, rounds=3)
    for done in [nodes[name].hear_done() for name in nodes]:
        (reading,) = done.readings
        # over loopback a segment holds up to 64 KiB, and none is lost
        assert reading["detail"]["segments"] >= 3 * (2 << 20) / (64 << 10)
        assert reading["detail"]["resent"] <= reading["detail"]["segments"] / 100


def test_a_partner_that_does_not_come(fleet: Fleet) -> None:
    done = fleet.node("a").test("exchange", budget_s=2, nodes=["a", "b"], store=fleet.store(), key="k", **SMALL)
    assert done.outcome in ("late", "crashed") and done.seconds < 20
    done = fleet.node("a").test("exchange", nodes=["b", "c"], store=fleet.store(), key="k", **SMALL)
    assert done.outcome == "crashed" and "one of b, c" in done.because
