"""Does a rank's process get to run?"""

from __future__ import annotations

from collections.abc import Sequence

from evertrain.locate.processors import starved
from evertrain.model.collectives import Host, Period, RankTrace


def ranks(before: Sequence[float], now: Sequence[float]) -> dict[int, RankTrace]:
    """That wait so long for a processor, in each second."""

    def period(delay_s: float) -> Period:
        return Period(host=Host(seconds=4.0, samples=40, delay_s=4 * delay_s))

    return {
        rank: RankTrace(rank=rank, node="node-0", before=period(old), now=period(new))
        for rank, (old, new) in enumerate(zip(before, now, strict=True))
    }


def test_one_that_waits_for_a_processor_more_than_others_and_more_than_before() -> None:
    found = starved(ranks([0.1] * 4, [0.2, 1.9, 0.3, 0.1]))
    assert found is not None and found.ranks == (1,)
    assert "did not run for 1.90 s a second (before: 0.10)" in found.evidence[0]


def test_two_on_one_node_of_three() -> None:
    found = starved(ranks([0.1] * 6, [0.2, 0.1, 2.2, 1.9, 0.3, 0.1]))
    assert found is not None and found.ranks == (2, 3)


def test_all_that_compute_more_on_the_processors_they_share_are_nobodys_fault() -> None:
    """As it was seen with eight ranks on two cores, when all of them had twice as much to do."""
    before = [0.95, 1.08, 0.98, 1.04, 1.0, 1.02, 1.05, 0.99]
    assert starved(ranks(before, [1.74, 1.72, 1.37, 1.79, 1.35, 1.38, 1.74, 1.33])) is None


def test_one_that_has_always_waited_is_not_accused_of_a_little_more() -> None:
    assert starved(ranks([2.0, 0.1, 0.1], [2.9, 0.1, 0.1])) is None
