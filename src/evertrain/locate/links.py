"""What do TCP connections say of the way between two ranks? Each is compared with itself before.

    time-outs in a row        nothing comes through; so it is with every connection of an end that is cut off
    more than the job's own   others fill the network of a node
    not sent, and busy        less goes out than is wanted: bandwidth, of the sender's side where it is the same to all
    sent, and not acked       what was sent is lost
    no room at the receiver   it does not read

A connection has two ends, and one that is cut off often shows nothing itself. So ends are counted: named is the rank
that most of the odd connections have in common, then who is common to those that this leaves, and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from evertrain.model.collectives import Component, Flow, Period, RankTrace

_BACKOFF = 2
_BUSY, _BUSIER = 0.35, 0.15
_NOTSENT, _MORE_NOTSENT = 64 << 10, 3.0
_LOST, _FEWEST_SENT = 0.02, 64 << 10
_NO_ROOM = 0.3
_UNREAD = 64 << 10
_FOREIGN, _FOREIGN_USUALLY, _FOREIGN_RATE = 0.5, 0.3, 1e6
_ALIKE = 0.5
"""Connections that show less than this part of the worst show its consequences."""
_MOST_LINES = 6
_LEAN, _CLEARLY, _TIMEOUT = 0.01, 2.5, 0.02
_LESS_SURE = 0.8
"""Of a pair it is not known which end it is; of several ranks it may be another."""


class Way(NamedTuple):
    """One connection, in one direction."""

    source: int
    target: int
    now: Flow
    before: Flow | None


class Found(msgspec.Struct, frozen=True):
    component: Component
    ranks: tuple[int, ...]
    link: tuple[int, int] | None
    """Where only one pair is odd, and it could be either end."""
    evidence: tuple[str, ...]
    confidence: float


def ways(ranks: Mapping[int, RankTrace], among: Collection[frozenset[int]] | None = None) -> list[Way]:
    """All connections that were seen; `among`: between members of these groups only."""
    found = []
    for rank, trace in ranks.items():
        before = {one.peer: one for one in trace.before.flows}
        for flow in trace.now.flows:
            pair = {rank, flow.peer}
            if flow.peer >= 0 and (among is None or any(pair <= group for group in among)):
                found.append(Way(rank, flow.peer, flow, before.get(flow.peer)))
    return found


def cut(ranks: Mapping[int, RankTrace]) -> Found | None:
    """Ranks, or a pair of them, between which nothing comes through any more."""
    dark = [rank for rank, one in ranks.items() if (host := one.now.host) and 2 * host.carrier_down > host.samples]
    everything = ways(ranks)
    odd = [
        one
        for one in everything
        if one.now.backoff >= _BACKOFF and (one.before is None or one.before.backoff < _BACKOFF)
    ]
    if dark and 2 * len(dark) <= len(ranks):
        lines = [f"the network interface of rank {rank} on {ranks[rank].node} has no carrier" for rank in dark]
        return Found("network", tuple(dark), None, (*lines, *_timeouts(odd)), 0.95)
    if not odd:
        return None
    return _found("network", odd, everything, len(ranks), tuple(_timeouts(odd)), 0.9)


def crowded(ranks: Mapping[int, RankTrace]) -> Found | None:
    """Ranks whose network carries much that is not the job's, and did not before."""
    now = _foreign({rank: one.now for rank, one in ranks.items()}, {rank: one.node for rank, one in ranks.items()})
    before = _foreign(
        {rank: one.before for rank, one in ranks.items()}, {rank: one.node for rank, one in ranks.items()}
    )
    chosen = {
        node: share
        for node, (share, rate) in now.items()
        if share >= _FOREIGN and rate >= _FOREIGN_RATE and before.get(node, (0.0, 0.0))[0] < _FOREIGN_USUALLY
    }
    named = tuple(rank for rank, one in ranks.items() if one.node in chosen)
    if not named or 2 * len(named) > len(ranks):
        return None
    lines = [
        f"{node}: {share:.0%} of what its network carries is not this job's (before: {before.get(node, (0, 0))[0]:.0%})"
        for node, share in list(chosen.items())[:_MOST_LINES]
    ]
    return Found("network", named, None, tuple(lines), 0.85)


def _foreign(periods: Mapping[int, Period], nodes: Mapping[int, str]) -> dict[str, tuple[float, float]]:
    """By node, the part of its traffic that is not between ranks, and how much that is in bytes a second."""
    own: Counter[str] = Counter()
    wire: dict[str, tuple[int, float]] = {}
    for rank, period in periods.items():
        node = nodes[rank]
        for flow in period.flows:
            own[node] += flow.sent
            if flow.peer in nodes and nodes[flow.peer] != node:
                own[nodes[flow.peer]] += flow.sent
        if period.host is not None:
            # ranks of one node share its interfaces
            wire[node] = max(wire.get(node, (0, 0.0)), (period.host.wire_bytes, period.host.seconds))
    return {
        node: (1 - min(own[node] / total, 1.0), max(0, total - own[node]) / seconds)
        for node, (total, seconds) in wire.items()
        if total > 0 and seconds > 0
    }


def full(found: Sequence[Way]) -> Found | None:
    """Senders whose data does not get out as fast as before, though it is not lost."""
    odd = [
        one
        for one in found
        if one.now.busy >= max(_BUSY, (one.before.busy if one.before else 0.0) + _BUSIER)
        and one.now.notsent >= _NOTSENT
        and _backlog(one.now) >= _MORE_NOTSENT * _backlog(one.before)
        and one.now.rwnd < _NO_ROOM
        and not _loses(one)
    ]
    odd = _worst(odd, [_backlog(one.now) for one in odd])
    if not odd:
        return None
    lines = [
        f"rank {one.source} to rank {one.target}: {one.now.notsent / 1e6:.2f} MB not sent, busy {one.now.busy:.0%} of "
        f"the time{_usually(one, 'busy')}"
        for one in odd[:_MOST_LINES]
    ]
    senders = sorted({one.source for one in odd})
    targets = {one.target for one in odd}
    if len(senders) > 1 and len(targets) == 1:
        return Found("network", tuple(targets), None, tuple(lines), 0.75)  # what is short lies before the receiver
    link = (odd[0].source, odd[0].target) if len(odd) == 1 else None
    return Found("sender", tuple(senders), link, tuple(lines), 0.85 if len(senders) == 1 else 0.7)


def lossy(found: Sequence[Way], world_size: int) -> Found | None:
    """Ranks to or from which data is lost."""
    odd = [one for one in found if _loses(one)]
    odd = _worst(odd, [_lost(one.now) for one in odd])
    if not odd:
        return None
    lines = [
        f"rank {one.source} to rank {one.target}: {_lost(one.now):.1%} of what was sent was not acknowledged (before: "
        f"{_lost(one.before):.1%})"
        for one in odd[:_MOST_LINES]
    ]
    return _found("network", odd, found, world_size, tuple(lines), 0.85)


def unread(ranks: Mapping[int, RankTrace], found: Sequence[Way]) -> Found | None:
    """Ranks that do not take what has come to them. A little may lie there because they have not come to it yet."""
    slow = [one for one in found if one.now.rwnd >= _NO_ROOM + (one.before.rwnd if one.before else 0.0)]
    piles = Counter(dict.fromkeys(ranks, 0))
    before = piles.copy()
    for one in found:
        piles[one.source] += one.now.rqueue
        before[one.source] += one.before.rqueue if one.before else 0
    full_ones = {rank for rank, pile in piles.items() if pile >= max(_UNREAD, 4 * before[rank])}
    targets = {one.target for one in slow} | (full_ones if 4 * len(full_ones) <= len(ranks) else set())
    if not targets or 2 * len(targets) > len(ranks):
        return None
    lines = [
        f"rank {rank} on {ranks[rank].node} has {piles[rank]} bytes unread" for rank in sorted(full_ones & targets)
    ]
    lines += [f"rank {one.source} may not send to rank {one.target}: no room there" for one in slow[:_MOST_LINES]]
    return Found("receiver", tuple(sorted(targets)), None, tuple(lines), 0.75)


def _found(
    component: Component,
    odd: Sequence[Way],
    everything: Sequence[Way],
    world_size: int,
    lines: tuple[str, ...],
    sure: float,
) -> Found:
    """What these connections have in common is to blame; of a single one the end whose others lose data as well."""
    links = {frozenset((one.source, one.target)): (one.source, one.target) for one in odd}
    if len(links) == 1:
        (link,) = links.values()
        if (leans := _lean(link, everything)) is not None:
            return Found(component, (leans,), link, lines, sure)
        return Found(component, tuple(sorted(link)), link, lines, sure * _LESS_SURE)
    chosen = _common(links)
    if 2 * len(chosen) > max(world_size, 2):
        return Found(component, (), None, lines, 0.3)
    return Found(component, chosen, None, lines, sure if len(chosen) == 1 else sure * _LESS_SURE)


def _lean(link: tuple[int, int], everything: Sequence[Way]) -> int | None:
    """The end of it whose other connections lose data, or time out, too; None: both or none."""
    signs = {rank: _ill(rank, [one for one in everything if {one.source, one.target} != set(link)]) for rank in link}
    worse, better = sorted(link, key=lambda rank: -signs[rank])
    return worse if signs[worse] >= _LEAN and signs[worse] >= _CLEARLY * signs[better] else None


def _ill(rank: int, others: Sequence[Way]) -> float:
    """Part of what was sent from and to it that was lost, beyond what is usual; a time-out is as bad as much of it."""
    mine = [one for one in others if rank in (one.source, one.target)]
    sent, lost = sum(one.now.sent for one in mine), sum(_lost_bytes(one.now) for one in mine)
    usual_sent = sum(one.before.sent for one in mine if one.before)
    usual = sum(_lost_bytes(one.before) for one in mine)
    timeouts = sum(one.now.backoff > (one.before.backoff if one.before else 0) for one in mine)
    share = lost / sent if sent >= _FEWEST_SENT else 0.0
    return max(0.0, share - (usual / usual_sent if usual_sent else 0.0)) + _TIMEOUT * timeouts


def _common(links: Iterable[frozenset[int]]) -> tuple[int, ...]:
    """The fewest ranks of which each link has one."""
    chosen: list[int] = []
    left = set(links)
    while left:
        if len(left) == 1:
            chosen += next(iter(left))  # no telling which end
            break
        counts = Counter(rank for link in left for rank in link)
        rank = max(counts, key=lambda one: (counts[one], -one))
        chosen.append(rank)
        left = {link for link in left if rank not in link}
    return tuple(sorted(chosen))


def _worst(odd: list[Way], measures: list[float]) -> list[Way]:
    limit = _ALIKE * max(measures, default=0.0)
    ordered = sorted(zip(measures, odd, strict=True), key=lambda pair: -pair[0])
    return [one for measure, one in ordered if measure >= limit]


def _backlog(flow: Flow | None) -> float:
    """Bytes that wait, and for how much of the time: a burst that is soon gone leaves as many of them, not as long."""
    return flow.notsent * flow.busy if flow is not None else 0.0


def _loses(one: Way) -> bool:
    return one.now.sent >= _FEWEST_SENT and _lost(one.now) >= _LOST + _lost(one.before)


def _lost(flow: Flow | None) -> float:
    return _lost_bytes(flow) / flow.sent if flow is not None and flow.sent else 0.0


def _lost_bytes(flow: Flow | None) -> int:
    return max(0, flow.sent - flow.acked) if flow is not None and flow.resent else 0


def _usually(one: Way, what: str) -> str:
    return f" (before: {getattr(one.before, what):.0%})" if one.before is not None else ""


def _timeouts(odd: Sequence[Way]) -> Iterator[str]:
    for one in sorted(odd, key=lambda one: -one.now.backoff)[:_MOST_LINES]:
        yield f"rank {one.source} to rank {one.target}: {one.now.backoff} time-outs in a row, nothing comes through"
