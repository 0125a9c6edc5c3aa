"""Is it the link or the node? Nodes of a ring exchange data with each neighbour in turn.

In each pairing all pairs run at the same time. A bad link shows in one pair, a bad node in all of its pairs; where the
two neighbours of a bad pair cannot be told apart yet, each is tried again with somebody who is known to be well.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from statistics import median

from msgspec import Struct

from evertrain.model.words import counted

Pair = tuple[str, str]

SLOW = 0.8
"""Of the fleet's median rate; below it a pair is bad."""
BROKEN = 0.25
"""The same where not speed is in question, but whether the network works: no machine that is only busy falls so far."""
LOSSY = 0.005
"""Of the TCP segments of an exchange; a pair of which more had to be sent again is bad,"""
MUCH_LOSSIER = 4.0
"""... if it is so many times as much as is usual here: where buffers are small some are lost everywhere."""
MEASURED = 2
"""So often a pair is measured that is slow, loses packets or fails, before that speaks against a node; the best counts:
a machine that is busy may be late once."""
FEWEST_RATES = 3
"""Nodes; with fewer of them there is no fleet to compare with."""


class Seat(Struct, frozen=True):
    """Where a node stands."""

    node: str
    address: str = ""
    rack: str = ""


class PairResult(Struct, frozen=True, kw_only=True):
    """What one exchange of two nodes gave."""

    pair: Pair
    bytes_s: float | None = None
    mismatches: tuple[str, ...] = ()
    """Nodes whose data came to the other one with other content."""
    failure: str = ""
    """Why there was no exchange at all."""
    resent: float | None = None
    """The part of TCP's segments that had to be sent again, of the sender that had to more often; None: no TCP."""


class PairVerdict(Struct, frozen=True, kw_only=True):
    nodes: tuple[str, ...] = ()
    """Bad towards everybody they were tried with."""
    links: tuple[Pair, ...] = ()
    """Bad between two nodes each of which is well towards somebody else."""
    undecided: tuple[str, ...] = ()
    """In a bad pair, and it cannot be said whether they or the others are the reason."""
    median_bytes_s: float | None = None
    """What rates were compared with."""
    evidence: tuple[str, ...] = ()


def ring(seats: Iterable[Seat]) -> tuple[str, ...]:
    """Neighbours stand in the same rack, or have neighbouring addresses."""
    return tuple(seat.node for seat in sorted(seats, key=_order))


def _order(seat: Seat) -> tuple[object, ...]:
    try:
        address = ipaddress.ip_address(seat.address)
        where: tuple[int, int] = (address.version, int(address))
    except ValueError:
        where = (9, 0)
    return _natural(seat.rack), where, _natural(seat.node)


def _natural(text: str) -> tuple[tuple[str, int], ...]:
    """`node-10` after `node-9`."""
    return tuple((word, int(number or 0)) for word, number in re.findall(r"(\D*)(\d*)", text))


def pairings(nodes: Sequence[str]) -> tuple[tuple[Pair, ...], ...]:
    """Each node with both of its neighbours in the ring. Two pairings; a third of one pair where the number is odd."""
    count = len(nodes)
    if count < 2:
        return ()
    if count == 2:
        return (((nodes[0], nodes[1]),),)
    edges = [(nodes[at], nodes[(at + 1) % count]) for at in range(count)]
    if count % 2 == 0:
        return tuple(edges[0::2]), tuple(edges[1::2])
    return tuple(edges[0:-1:2]), tuple(edges[1::2]), (edges[-1],)


def again(nodes: Sequence[str], results: Sequence[PairResult], slow: float = SLOW) -> tuple[Pair, ...]:
    """Pairs to run next, at the same time, to tell links from nodes and slow from busy; empty: all is said."""
    seen = _Seen(nodes, results, slow)
    busy: set[str] = set()
    chosen: list[Pair] = []

    def choose(pair: Pair) -> None:
        if not busy & set(pair):
            busy.update(pair)
            chosen.append(pair)

    for pair in seen.in_doubt:
        choose(pair)
    well = [node for node in nodes if node in seen.well]
    for node in seen.undecided:
        if node not in busy:
            met = seen.partners(node)
            other = next((one for one in well if one not in busy and one not in met), None)
            if other is not None:
                choose((node, other))
    return tuple(chosen)


def judge(nodes: Sequence[str], results: Sequence[PairResult], slow: float = SLOW) -> PairVerdict:
    """What all results together say; with `slow` 0 no rate and no loss is bad, only what came wrong
    or not at all."""
    seen = _Seen(nodes, results, slow)
    guilty = seen.guilty
    links = tuple(pair for pair in seen.bad if set(pair) <= seen.well and pair not in seen.in_doubt)
    evidence = [f"{pair[0]} and {pair[1]}: {seen.bad[pair]}" for pair in seen.bad]
    if seen.bad and not seen.well:
        what = "the only pair is bad" if len(seen.pairs) == 1 else f"all {counted(len(seen.pairs), 'pair')} are bad"
        evidence.append(f"{what}: it may be the network, or the test")
    return PairVerdict(
        nodes=tuple(guilty),
        links=links,
        undecided=tuple(seen.undecided),
        median_bytes_s=seen.reference,
        evidence=tuple(evidence),
    )


class _Seen:
    """The results, by pair."""

    def __init__(self, nodes: Sequence[str], results: Sequence[PairResult], slow: float) -> None:
        self._slow = slow
        self.pairs: dict[frozenset[str], list[PairResult]] = {}
        for result in results:
            self.pairs.setdefault(frozenset(result.pair), []).append(result)
        self.reference = _fleet(self.pairs)
        self._lossy = max(LOSSY, MUCH_LOSSIER * _usual_loss(self.pairs))
        self.bad: dict[Pair, str] = {}
        self.in_doubt: list[Pair] = []
        """Bad, and not measured often enough."""
        self.well: set[str] = set()
        for both, known in self.pairs.items():
            pair = known[0].pair
            if why := self._wrong(known):
                self.bad[pair] = why
                if len(known) < MEASURED and not any(one.mismatches for one in known):
                    self.in_doubt.append(pair)
            elif _best(known) is not None:
                self.well |= both
        suspects = {node for pair in self.bad for node in pair} - self.well
        # bad towards two who are well towards others: it is not the link
        self.guilty = [node for node in nodes if node in suspects and len(self._accusers(node)) >= 2]
        self.undecided = [
            node
            for node in nodes
            if node in suspects
            and node not in self.guilty
            and any(node in pair and not set(pair) & set(self.guilty) for pair in self.bad)
        ]

    def partners(self, node: str) -> set[str]:
        return {other for both in self.pairs if node in both for other in both - {node}}

    def _accusers(self, node: str) -> set[str]:
        sure = [pair for pair in self.bad if node in pair and pair not in self.in_doubt]
        return {other for pair in sure for other in pair if other in self.well}

    def _wrong(self, known: Sequence[PairResult]) -> str:
        """Why a pair is bad; empty: it is not."""
        if wrong := sorted({node for one in known for node in one.mismatches}):
            return f"what {' and '.join(wrong)} sent came with other content"
        failures = [one.failure for one in known if one.failure]
        best = _best(known)
        if failures and best is None:
            return failures[0]
        resent = _least_loss(known)
        if self._slow and resent is not None and resent > self._lossy:
            return f"TCP had to send {resent:.1%} again"
        if best is not None and self.reference is not None and best < self._slow * self.reference:
            share = f"{best / self.reference:.0%} of the fleet's median of {self.reference / 1e6:.1f}"
            return f"{best / 1e6:.1f} MB/s, {share}"
        return ""


def _best(known: Iterable[PairResult]) -> float | None:
    return max((one.bytes_s for one in known if one.bytes_s is not None), default=None)


def _least_loss(known: Iterable[PairResult]) -> float | None:
    return min((one.resent for one in known if one.resent is not None), default=None)


def _usual_loss(pairs: dict[frozenset[str], list[PairResult]]) -> float:
    """The median over nodes of what each one loses where it loses least."""
    least: dict[str, float] = {}
    for both, known in pairs.items():
        if (share := _least_loss(known)) is not None:
            for node in both:
                least[node] = min(share, least.get(node, share))
    return median(least.values()) if len(least) >= FEWEST_RATES else 0.0


def _fleet(pairs: dict[frozenset[str], list[PairResult]]) -> float | None:
    """The median over nodes of each one's best rate: of three nodes a bad one spoils two pairs, but only one node."""
    best: dict[str, float] = {}
    for both, known in pairs.items():
        if (rate := _best(known)) is not None:
            for node in both:
                best[node] = max(rate, best.get(node, 0.0))
    return median(best.values()) if len(best) >= FEWEST_RATES else None
