"""Who holds the others up, and do transfers take longer? By durations alone, each of one rank's own clock.

    own time    blocked in nothing. A rank that is late because it has waited for another has no more of it than before
    transfer    the shortest own duration of an operation among its members: that of the member who came last
    held up by  the member who came last, in most operations of a communicator

All is counted by operation, so that steps of both periods can be compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import msgspec

from evertrain.model.collectives import Ended, Kind, RankTrace

_Key = tuple[str, str, int, int]
"""Communicator, operation or `transfer`, and of a transfer its source and target."""

LONGER = 1.3
"""A transfer takes longer than before."""
_FEWEST = 2


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's time for an operation, on average: how much longer, and how much of that is its own."""

    rank: int
    longer_s: float
    own_s: float
    between_s: float
    """Of its own time, around the ends of steps."""
    elsewhere: float
    """Part of its own time that it usually has elsewhere."""

    @property
    def share(self) -> float:
        """Of what has become longer, that which is its own."""
        return self.own_s / self.longer_s if self.longer_s > 0 else 0.0


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of one kind, on average."""

    key: _Key
    members: frozenset[int]
    """That were seen."""
    took_s: float
    before_s: float | None
    last: int | None
    """The member who comes last most often,"""
    last_share: float
    """... in this part of the operations."""
    operations: int

    @property
    def excess_s(self) -> float:
        """Of all of them together."""
        return (self.took_s - (self.before_s or 0.0)) * self.operations if self.before_s is not None else 0.0

    @property
    def is_longer(self) -> bool:
        return self.before_s is not None and self.took_s >= LONGER * self.before_s


def own_times(ranks: Mapping[int, RankTrace]) -> list[Own]:
    """Of ranks that were seen in both periods, whoever has become slowest by itself first."""
    found = []
    for rank, trace in ranks.items():
        now, before = trace.now, trace.before
        if now.ended < _FEWEST or before.ended < _FEWEST:
            continue
        between = now.between_s / now.ended - before.between_s / before.ended
        found.append(
            Own(
                rank=rank,
                longer_s=now.seconds / now.ended - before.seconds / before.ended,
                own_s=now.own_s / now.ended - before.own_s / before.ended,
                between_s=between,
                elsewhere=1 - before.between_s / before.own_s if before.own_s > 0 else 0.0,
            )
        )
    return sorted(found, key=lambda one: -one.own_s)


def slowdown(ranks: Mapping[int, RankTrace]) -> float | None:
    """How many times longer than before operations take to follow each other; None: it cannot be said."""
    ratios = [
        (one.now.seconds / one.now.ended) / (one.before.seconds / one.before.ended)
        for one in ranks.values()
        if one.now.ended >= _FEWEST and one.before.ended >= _FEWEST and one.before.seconds > 0
    ]
    return median(ratios) if ratios else None


def transfers(ranks: Mapping[int, RankTrace]) -> list[Transfer]:
    """Those that cost most more than before first."""
    now = _matched((rank, trace.kinds, trace.now.operations) for rank, trace in ranks.items())
    before = _matched((rank, trace.kinds, trace.before.operations) for rank, trace in ranks.items())
    found = []
    for key, kind in now.items():
        shortest = kind.shortest()
        if not shortest:
            continue
        old = [one[0] for one in before[key].shortest()] if key in before else []
        (last, times), *_ = Counter(one[1] for one in shortest).most_common(1)
        found.append(
            Transfer(
                key=key[0],
                members=frozenset(kind.members),
                took_s=sum(one[0] for one in shortest) / len(shortest),
                before_s=sum(old) / len(old) if old else None,
                last=last,
                last_share=times / len(shortest),
                operations=len(shortest),
            )
        )
    return sorted(found, key=lambda one: -one.excess_s)


def began(trace: RankTrace, *, by_own: bool) -> float | None:
    """How long ago the first operation ended that was odd: by the rank's own time before it, or by how long it took.
    Operations of one kind are compared with what they were in the time before."""
    usual: dict[int, list[float]] = {}
    past, recent = trace.before.operations, trace.now.operations
    for kind, value in zip(past.kind, past.own_s if by_own else past.took_s, strict=True):
        usual.setdefault(kind, []).append(value)
    middle = {kind: median(values) for kind, values in usual.items()}
    most = {kind: max(values) for kind, values in usual.items()}
    values = recent.own_s if by_own else recent.took_s
    for kind, value, ago_s, own_s, took_s in zip(
        recent.kind, values, recent.ago_s, recent.own_s, recent.took_s, strict=True
    ):
        if kind in middle and value > max(1.5 * middle[kind], 1.2 * most[kind], 0.005):
            return ago_s + took_s + (own_s if by_own else 0.0)
    return None


_Meeting = tuple[float, int, int]
"""The shortest own duration, whose it is, and of how many members."""


class _Kind:
    """Operations of one kind and size."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        self.meetings: dict[int, _Meeting] = {}
        """By number."""

    def joined(self, rank: int) -> dict[int, _Meeting]:
        self.members.add(rank)
        return self.meetings

    def shortest(self) -> list[_Meeting]:
        """Of operations that more than one member has told of."""
        return [one for one in self.meetings.values() if one[2] >= _FEWEST]


def _matched(rows: Iterable[tuple[int, Sequence[Kind], Ended]]) -> dict[tuple[_Key, int], _Kind]:
    found: dict[tuple[_Key, int], _Kind] = defaultdict(_Kind)
    for rank, kinds, ended in rows:
        tables = [found[_key(rank, one), one.bucket].joined(rank) for one in kinds]
        for kind, seq, took_s in zip(ended.kind, ended.seq, ended.took_s, strict=True):
            table = tables[kind]
            one = table.get(seq)
            if one is None:
                table[seq] = (took_s, rank, 1)
            elif took_s < one[0]:
                table[seq] = (took_s, rank, one[2] + 1)
            else:
                table[seq] = (one[0], one[1], one[2] + 1)
    return found


def _key(rank: int, kind: Kind) -> _Key:
    if kind.op.startswith("send"):
        return (kind.comm, "transfer", rank, kind.peer)
    if kind.op.startswith("recv"):
        return (kind.comm, "transfer", kind.peer, rank)
    return (kind.comm, kind.op, -1, -1)
