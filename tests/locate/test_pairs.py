"""Bad links and bad nodes, by who exchanges data with whom."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.locate import pairs
from evertrain.locate.pairs import Pair, PairResult, PairVerdict, Seat
from support.effort import examples

GOOD = 1e9
Measure = Callable[[Pair], PairResult]


def names(count: int) -> list[str]:
    return [f"n{at}" for at in range(count)]


def play(nodes: Sequence[str], measure: Measure) -> tuple[PairVerdict, list[PairResult]]:
    results = [measure(pair) for pairing in pairs.pairings(nodes) for pair in pairing]
    for _ in range(3 * len(nodes)):
        if not (chosen := pairs.again(nodes, results)):
            return pairs.judge(nodes, results), results
        flat = list(itertools.chain(*chosen))
        assert len(set(flat)) == len(flat)
        results += [measure(pair) for pair in chosen]
    raise AssertionError("it never ends")


def slow(nodes: Collection[str] = (), links: Collection[frozenset[str]] = (), rate: float = GOOD / 10) -> Measure:
    def measure(pair: Pair) -> PairResult:
        is_bad = set(nodes) & set(pair) or frozenset(pair) in links
        return PairResult(pair=pair, bytes_s=rate if is_bad else GOOD)

    return measure


def test_the_ring_goes_by_rack_and_address() -> None:
    seats = [
        Seat("c", "10.0.0.10", "r2"), Seat("a", "10.0.0.9", "r2"), Seat("d", "10.0.1.1", "r1"),
        Seat("e", "fe80::1", "r10"), Seat("n10"), Seat("n9"),
    ]  # fmt: skip
    assert pairs.ring(seats) == ("n9", "n10", "d", "a", "c", "e")


@pytest.mark.parametrize("count", [3, 4, 5, 6, 7, 64, 65])
def test_every_node_meets_both_neighbours(count: int) -> None:
    nodes = names(count)
    rounds = pairs.pairings(nodes)
    assert len(rounds) == 2 + count % 2
    for one in rounds:
        flat = list(itertools.chain(*one))
        assert len(set(flat)) == len(flat)
    met = [frozenset(pair) for one in rounds for pair in one]
    assert len(met) == len(set(met)) == count
    assert all(sum(node in pair for pair in met) == 2 for node in nodes)


def test_few_nodes() -> None:
    assert pairs.pairings(names(0)) == pairs.pairings(names(1)) == ()
    assert pairs.pairings(names(2)) == ((("n0", "n1"),),)


@pytest.mark.parametrize("count", [3, 4, 5, 6, 9])
def test_a_slow_link_is_named_and_a_slow_node_told_from_it(count: int) -> None:
    nodes = names(count)
    link, _ = play(nodes, slow(links=[frozenset(("n1", "n2"))]))
    assert (link.links, link.nodes, link.undecided) == ((("n1", "n2"),), (), ())
    node, _ = play(nodes, slow(nodes=["n1"]))
    assert (node.links, node.nodes, node.undecided) == ((), ("n1",), ())
    assert "10% of the fleet's median" in node.evidence[0] and node.median_bytes_s == GOOD


def test_a_healthy_fleet() -> None:
    verdict, results = play(names(6), slow())
    assert verdict == PairVerdict(median_bytes_s=GOOD) and len(results) == 6


def test_slightly_slow_is_well() -> None:
    assert play(names(6), slow(nodes=["n3"], rate=0.81 * GOOD))[0].nodes == ()
    assert play(names(6), slow(nodes=["n3"], rate=0.79 * GOOD))[0].nodes == ("n3",)


def test_a_pair_that_was_slow_once_was_busy() -> None:
    seen: set[Pair] = set()

    def measure(pair: Pair) -> PairResult:
        first = pair not in seen
        seen.add(pair)
        return PairResult(pair=pair, bytes_s=GOOD / 5 if first and pair == ("n2", "n3") else GOOD)

    verdict, results = play(names(6), measure)
    assert verdict.links == verdict.nodes == () and len(results) == 7


def test_other_content_is_bad_whatever_the_rate_and_however_often() -> None:
    def measure(pair: Pair) -> PairResult:
        return PairResult(pair=pair, bytes_s=GOOD, mismatches=("n4",) if "n4" in pair else ())

    verdict, _ = play(names(6), measure)
    assert verdict.nodes == ("n4",) and "what n4 sent came with other content" in verdict.evidence[0]
    once = [PairResult(pair=p, bytes_s=GOOD) for one in pairs.pairings(names(6)) for p in one]
    once.append(PairResult(pair=("n0", "n1"), bytes_s=GOOD, mismatches=("n0",)))
    assert pairs.judge(names(6), once).links == (("n0", "n1"),)


def test_no_exchange_at_all() -> None:
    def measure(pair: Pair) -> PairResult:
        return PairResult(pair=pair, failure="no connection") if "n0" in pair else PairResult(pair=pair, bytes_s=GOOD)

    assert play(names(4), measure)[0].nodes == ("n0",)


def test_two_nodes_alone_are_not_told_apart() -> None:
    def measure(pair: Pair) -> PairResult:
        return PairResult(pair=pair, bytes_s=GOOD, mismatches=("n1",))

    verdict, _ = play(names(2), measure)
    assert (verdict.nodes, verdict.links, verdict.undecided) == ((), (), ("n0", "n1"))
    assert "only pair" in verdict.evidence[-1]
    # and no rate is slow without a fleet
    assert play(names(2), slow(nodes=["n0"]))[0] == PairVerdict()


def test_all_pairs_bad_is_the_network() -> None:
    verdict, _ = play(names(6), lambda pair: PairResult(pair=pair, failure="refused"))
    assert verdict.nodes == verdict.links == () and len(verdict.undecided) == 6
    assert "all 6 pairs are bad" in verdict.evidence[-1]


def test_two_bad_neighbours_are_each_tried_with_others() -> None:
    verdict, results = play(names(8), slow(nodes=["n2", "n3"]))
    assert verdict.nodes == ("n2", "n3") and verdict.links == () and verdict.undecided == ()
    assert len(results) > 8
    # the same three bad pairs, for another reason
    verdict, _ = play(names(8), slow(nodes=["n2"], links=[frozenset(("n3", "n4"))]))
    assert verdict.nodes == ("n2",) and verdict.links == (("n3", "n4"),)


@settings(deadline=None)
@given(st.integers(4, 24), st.data())
def test_one_or_two_bad_things_are_found(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    bad = data.draw(st.sets(st.sampled_from(nodes), max_size=1 + (count >= 8)))
    edges = [frozenset(pair) for one in pairs.pairings(nodes) for pair in one]
    free = [edge for edge in edges if not edge & bad]
    links = data.draw(st.sets(st.sampled_from(free), max_size=1)) if count >= 8 else set()
    verdict, _ = play(nodes, slow(bad, links))
    assert set(verdict.nodes) == bad and verdict.undecided == ()
    assert {frozenset(pair) for pair in verdict.links} == links


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(2, 9), st.data())
def test_any_results_are_judged(count: int, data: st.DataObject) -> None:
    nodes = names(count)
    rate = st.none() | st.floats(0, 1e10)

    def measure(pair: Pair) -> PairResult:
        wrong = data.draw(st.sets(st.sampled_from(pair), max_size=1))
        return PairResult(
            pair=pair, bytes_s=data.draw(rate), mismatches=tuple(wrong), failure=data.draw(st.sampled_from(["", "no"]))
        )

    verdict, _ = play(nodes, measure)
    assert not set(verdict.nodes) & {node for pair in verdict.links for node in pair}


@pytest.mark.parametrize(("again", "links"), [(0.02, (("n1", "n2"),)), (0.001, ())])
def test_a_link_that_loses_packets_both_times_is_bad(again: float, links: tuple[Pair, ...]) -> None:
    seen: list[Pair] = []

    def measure(pair: Pair) -> PairResult:
        is_lossy = set(pair) == {"n1", "n2"}
        share = (again if pair in seen else 0.02) if is_lossy else 0.0
        seen.append(pair)
        return PairResult(pair=pair, bytes_s=GOOD, resent=share)

    verdict, _ = play(names(4), measure)
    assert (verdict.nodes, verdict.links) == ((), links)
    assert [line for line in verdict.evidence if "TCP had to send 2.0% again" in line] == list(verdict.evidence)
    assert len(verdict.evidence) == len(links)


def test_a_node_that_loses_packets_towards_everybody_is_no_bad_link() -> None:
    def measure(pair: Pair) -> PairResult:
        return PairResult(pair=pair, bytes_s=GOOD, resent=0.03 if "n2" in pair else 0.0)

    verdict, results = play(names(6), measure)
    assert (verdict.nodes, verdict.links) == (("n2",), ())
    assert pairs.judge(names(6), results, 0.0).nodes == (), "where numbers were wrong loss is no evidence"


def test_where_all_lose_packets_nobody_is_named() -> None:
    def measure(pair: Pair) -> PairResult:
        return PairResult(pair=pair, bytes_s=GOOD, resent=0.01 + 0.004 * ("n2" in pair))

    verdict, _ = play(names(6), measure)
    assert (verdict.nodes, verdict.links, verdict.evidence) == ((), (), ())


def test_pairs_that_are_late_once_accuse_nobody() -> None:
    seen: list[Pair] = []

    def measure(pair: Pair) -> PairResult:
        is_first = pair not in seen
        seen.append(pair)
        is_late = is_first and "n2" in pair
        return (
            PairResult(pair=pair, failure="late: not within 20 s") if is_late else PairResult(pair=pair, bytes_s=GOOD)
        )

    verdict, results = play(names(6), measure)
    assert (verdict.nodes, verdict.links) == ((), ())
    first = [one for at, one in enumerate(results) if one.pair not in [other.pair for other in results[:at]]]
    assert pairs.judge(names(6), first).nodes == (), "measured once only"
    assert set(pairs.judge(names(6), first).undecided) == {"n2"}
