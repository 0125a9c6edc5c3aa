"""Who makes a job slow? Many looks at all ranks: the slow one computes while the others wait for it.

In each look a rank waits inside an operation, or it does not. A rank that is slower than its peers by some factor is
seen outside of operations more often by the same factor. It is compared with its peers: the ranks of the same pipeline
stage, which have the same to do; other stages may have more or less, and bubbles of another length.

Every round flags whoever is furthest above its peers. Named is who is flagged in most rounds, and so far above that
chance, at the spread that healthy ranks show, would do it once in some thousand votes. Otherwise nobody is named: all
may be equally slow; and if somebody comes near it, more rounds are asked for.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import NormalDist, median

import msgspec

from evertrain.locate import parallel, words
from evertrain.locate.grouping import Merged, wait_class
from evertrain.locate.parallel import coordinates
from evertrain.locate.places import WAITING_FOR_PEERS
from evertrain.locate.standing import TORCH
from evertrain.model.stacks import Located, Position

ROUNDS = 5
_FALSE_ALARMS = 3e-4
"""Of votes on healthy jobs, so many may name somebody."""
_RATIO, _GAP = 1.25, 0.08
"""Smaller differences than these are no reason for a slow job, however sure."""
_AT_WORK = 0.4
"""Whoever the others wait for is at work in so many looks at least, bubbles included."""
_TELLING, _FEWEST_TELLING = 0.15, 4
_MOST = 0.8
_CLEAR = 1.6
"""So many times the limit makes up for a round that tells nothing."""
_FLOOR = 0.6
_NEAR = 2.0
"""Standard deviations from which on more rounds are worth it."""
_FEWEST_PEERS = 2


class _Rank(msgspec.Struct, frozen=True, kw_only=True):
    """What the looks say of one rank."""

    rank: int
    outside: float
    """Share of looks outside of operations,"""
    peers: float
    """... and the median of its peers."""
    deviations: float
    """How far it is above them, in standard deviations."""
    flags: int
    """In so many rounds it was the furthest above its peers,"""
    telling: int
    """... of those in which anybody was: where a step takes longer than a round, all may compute all the time."""


def vote(rounds: Sequence[Merged], *, mesh: Mapping[str, int] | None = None) -> Located:
    """The verdict on a slow job by its rounds of looks; five at least."""
    captures = tuple(one.number for one in rounds)
    if len(rounds) < ROUNDS:
        return _nobody([f"{len(rounds)} rounds of looks are not enough: {ROUNDS} are needed"], captures)
    shares = [_outside(one) for one in rounds]
    ranks = sorted(set(shares[0]).intersection(*shares[1:]))
    peers = _peers(ranks, rounds[-1], mesh)
    if not peers:
        return _nobody(["no rank has peers that have the same to do, and could be compared with it"], captures)
    found = _compare(shares, peers)
    limit = NormalDist().inv_cdf(1 - _FALSE_ALARMS / len(found))
    slow = [one for one in found if _is_slow(one, limit)]
    if slow and len(slow) * 2 <= len(found):
        return _named(slow, rounds, captures)
    best = max(found, key=lambda one: one.deviations)
    near = best.deviations >= _NEAR and best.outside >= best.peers * _RATIO
    seen = f"{words.named([best.rank])} was outside of operations in {_percent(best.outside)} of the looks"
    lines = [f"no rank stands out: {seen}, its peers in {_percent(best.peers)}"]
    if near:
        lines.append(f"not enough to name it: {ROUNDS} more rounds are needed")
    else:
        lines.append("all are equally slow, as far as can be seen")
    return _nobody(lines, captures)


def waits(position: Position) -> bool:
    """Whether a rank that stands there waits for others."""
    if position.place in WAITING_FOR_PEERS:
        return True
    # C++ waits without a frame, below one of torch's
    in_torch = bool(position.frames) and bool(TORCH.search(position.frames[0].file))
    return in_torch and position.is_idle and wait_class(position.waits_in) in ("", "futex", "poll", "network")


def _outside(one: Merged) -> dict[int, tuple[float, int]]:
    """For each rank its share of looks outside of operations, and the number of looks."""
    looks: Counter[int] = Counter()
    outside: Counter[int] = Counter()
    for position in one.positions:
        if position.kind != "trainer" or position.place == "unreadable":
            continue
        is_outside = not waits(position)
        for member in position.members:
            looks[member.rank] += member.looks
            outside[member.rank] += member.looks * is_outside
    return {rank: (outside[rank] / count, count) for rank, count in looks.items()}


_PIPELINE = re.compile(r"(^|_)(pp|pipeline\w*)$", re.IGNORECASE)


def _peers(ranks: Sequence[int], now: Merged, mesh: Mapping[str, int] | None) -> list[list[int]]:
    """Ranks that have the same to do, together."""
    stages: dict[int, list[int]] = defaultdict(list)
    learnt = {
        rank: at
        for group in now.groups.values()
        if _PIPELINE.search(group.description)
        for at, rank in enumerate(group.members)
    }
    for rank in ranks:
        stages[coordinates(mesh, rank).get("pp", 0) if mesh else learnt.get(rank, 0)].append(rank)
    return [one for one in stages.values() if len(one) > _FEWEST_PEERS]


def _compare(shares: Sequence[Mapping[int, tuple[float, int]]], stages: Sequence[Sequence[int]]) -> list[_Rank]:
    above: dict[int, list[float]] = {rank: [] for stage in stages for rank in stage}
    usual: dict[int, list[float]] = {rank: [] for rank in above}
    flags: Counter[int] = Counter()
    telling: Counter[int] = Counter()
    chance: list[float] = []
    for one in shares:
        for stage in stages:
            found = sorted((one[rank][0], rank) for rank in stage)
            values = [share for share, _ in found]
            for at, (share, rank) in enumerate(found):
                others = _median_without(values, at)
                above[rank].append(share - others)
                usual[rank].append(others)
            top = max(above[rank][-1] for rank in stage)
            middle = median(values)
            chance.append(max(middle * (1 - middle), 0.05) / median(one[rank][1] for rank in stage))
            if top >= _TELLING:
                telling.update(stage)
                flags.update(rank for rank in stage if above[rank][-1] >= 0.75 * top)
    # looks in a row depend on each other: chance has less of a share in them than if each were taken for itself
    floor = _FLOOR**2 * sum(chance) / len(chance)
    squares = {rank: sum(away * away for away in aways) for rank, aways in above.items()}
    everybodys, values_each = sum(squares.values()), len(shares) * max(len(above) - 1, 1)

    def deviation(rank: int) -> float:
        """What the others differ by from round to round, whatever the reason."""
        return float(((max((everybodys - squares[rank]) / values_each, floor)) / len(shares)) ** 0.5)

    return [
        _Rank(
            rank=rank,
            outside=sum(one[rank][0] for one in shares) / len(shares),
            peers=sum(usual[rank]) / len(shares),
            deviations=sum(aways) / len(shares) / deviation(rank),
            flags=flags[rank],
            telling=telling[rank],
        )
        for rank, aways in above.items()
    ]


def _median_without(ordered: Sequence[float], left_out: int) -> float:
    """The median of all but one, from what is in order already: a stage may have thousands of ranks."""
    count = len(ordered) - 1
    low, high = (count - 1) // 2, count // 2
    return (ordered[low + (low >= left_out)] + ordered[high + (high >= left_out)]) / 2


def _is_slow(one: _Rank, limit: float) -> bool:
    return (
        one.deviations >= limit
        and one.outside >= max(one.peers * _RATIO, one.peers + _GAP, _AT_WORK)
        and one.telling >= _FEWEST_TELLING - (one.deviations >= _CLEAR * limit)
        and one.flags >= _MOST * one.telling
    )


def _named(slow: Sequence[_Rank], rounds: Sequence[Merged], captures: tuple[int, ...]) -> Located:
    nodes = rounds[-1].nodes
    lines = []
    for one in slow[:8]:
        node = f" on {nodes[one.rank]}" if one.rank in nodes else ""
        lines.append(
            f"rank {one.rank}{node} was outside of operations in {_percent(one.outside)} of the looks, its peers in "
            f"{_percent(one.peers)}, and the furthest above them in {one.flags} of {len(rounds)} rounds"
        )
        if where := _most_often(one.rank, rounds):
            lines.append(f"rank {one.rank} was most often in {where}, while others wait inside operations")
    ranks = tuple(one.rank for one in slow)
    named = tuple(dict.fromkeys(nodes[rank] for rank in ranks if rank in nodes))
    surest = min(one.deviations for one in slow)
    return Located(
        kind="slow",
        ranks=ranks,
        nodes=named,
        eviction=parallel.bounded(named, set(nodes.values())),
        category="straggler",
        confidence=round(min(0.9, 0.5 + 0.05 * surest), 2),
        evidence=tuple(lines),
        captures=captures,
    )


def _most_often(rank: int, rounds: Sequence[Merged]) -> str:
    """The place outside of operations where a rank was seen most."""
    seen: Counter[str] = Counter()
    for one in rounds:
        for position in one.positions:
            if position.kind == "trainer" and position.frames and not waits(position):
                looks = sum(member.looks for member in position.members if member.rank == rank)
                seen[" < ".join(frame.function for frame in position.frames[:2])] += looks
    ((where, looks),) = seen.most_common(1) or [("", 0)]
    return where if looks else ""


def _nobody(lines: list[str], captures: tuple[int, ...]) -> Located:
    return Located(kind="unknown", confidence=0.1, evidence=tuple(lines), captures=captures)


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"
