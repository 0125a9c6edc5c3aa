"""Does a rank's process get to run? It may be stopped, for good or again and again, or get no processor.

These come before all else: a stopped rank also leaves unread what its peers have sent, and to one without a processor
everything takes long, so that durations alone would say that it computes more, or that the network is slow.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from evertrain.locate.apart import apart
from evertrain.model.collectives import Host, RankTrace

_PAUSED_SHARE, _PAUSED_SAMPLES = 0.08, 2
_THROTTLED, _DELAYED = 0.2, 0.5
"""Seconds a second, over what is usual for the rank."""
_MORE = 2.0
"""Times what it was before."""
_ALIKE = 0.5


class Trouble(msgspec.Struct, frozen=True):
    """Ranks that have the same."""

    ranks: tuple[int, ...]
    evidence: tuple[str, ...]
    confidence: float


def halted(ranks: Mapping[int, RankTrace]) -> dict[int, str]:
    """Ranks that cannot go on, and why."""
    words = {"stopped": "is stopped (state T)", "frozen": "is frozen by its cgroup", "ended": "has ended"}
    return {rank: words[one.state] for rank, one in ranks.items() if one.state in words}


def paused(ranks: Mapping[int, RankTrace]) -> Trouble | None:
    """Ranks that are stopped and let go again."""
    shares = {rank: _pause(one.now.host) - _pause(one.before.host) for rank, one in ranks.items()}
    worst = max(shares.values(), default=0.0)
    found = [rank for rank, share in shares.items() if share >= max(_PAUSED_SHARE, _ALIKE * worst)]
    found = [rank for rank in found if _samples(ranks[rank].now.host) >= _PAUSED_SAMPLES]
    if not found:
        return None
    lines = [
        f"rank {rank} on {ranks[rank].node} was stopped or frozen in {_samples(host)} of {host.samples} looks"
        for rank in found
        if (host := ranks[rank].now.host) is not None
    ]
    return Trouble(tuple(found), tuple(lines), 0.95)


def starved(ranks: Mapping[int, RankTrace]) -> Trouble | None:
    """Ranks that wait for a processor, or whose quota holds them, much more than before and than the others."""
    seen = {rank: (one.now.host, one.before.host) for rank, one in ranks.items() if one.now.host is not None}
    throttled = {rank: _rate(now, "throttled_s") - _rate(before, "throttled_s") for rank, (now, before) in seen.items()}
    delayed = {rank: _rate(now, "delay_s") - _rate(before, "delay_s") for rank, (now, before) in seen.items()}
    for what, excess, least in (("throttled_s", throttled, _THROTTLED), ("delay_s", delayed, _DELAYED)):
        found = sorted(apart(excess))
        if not found or min(excess[rank] for rank in found) < least or 2 * len(found) > len(seen):
            continue
        if any(_rate(seen[rank][0], what) < _MORE * _rate(seen[rank][1], what) for rank in found):
            continue
        lines = []
        for rank in found:
            now, before = seen[rank]
            assert now is not None
            lines.append(
                f"rank {rank} on {ranks[rank].node}: its threads were ready and did not run for "
                f"{_rate(now, 'delay_s'):.2f} s a second (before: {_rate(before, 'delay_s'):.2f}); its quota held it "
                f"for {_rate(now, 'throttled_s'):.2f} s a second (before: {_rate(before, 'throttled_s'):.2f})"
            )
        return Trouble(tuple(found), tuple(lines), 0.9 if len(found) == 1 else 0.75)
    return None


def _samples(host: Host | None) -> int:
    return host.stopped + host.frozen if host is not None else 0


def _pause(host: Host | None) -> float:
    return _samples(host) / host.samples if host is not None and host.samples else 0.0


def _rate(host: Host | None, what: str) -> float:
    return float(getattr(host, what)) / host.seconds if host is not None and host.seconds > 0 else 0.0
