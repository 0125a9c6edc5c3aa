"""Is the job hanging, on whom, and may anything be done about it?

A job hangs when for longer than its limit no rank has finished a step, a collective, or anything else that shows on its
page. Who is to blame follows from two questions: which rank is *not* inside the operation that the others wait in, and
does its process tree do anything?

    stopped    a rank is stopped (SIGSTOP, a debugger)             act at the still limit
    still      a rank outside a collective does nothing             act at the still limit
    mismatch   ranks wait in operations that can never meet         act at the still limit
    stuck      all wait in one operation, and nothing moves         act at the still limit
    busy       a rank outside a collective computes or does I/O     name it; act at the busy limit

The victims, who wait inside a collective, are never blamed. A rank that cannot be seen neither accuses nor acquits.
Pure: durations come in, findings go out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import msgspec

from evertrain.model.activity import Operation, RankActivity
from evertrain.model.config import HangConfig

Kind = Literal["stopped", "still", "mismatch", "stuck", "busy"]


class Hang(msgspec.Struct, frozen=True, kw_only=True):
    """What is the matter with a job that finishes no step."""

    kind: Kind
    ranks: tuple[int, ...]
    """Who is to blame; empty when nobody can be named."""
    nodes: tuple[str, ...]
    for_s: float
    limit_s: float
    """At this age something is done."""
    still_limit_s: float
    """At this age somebody is named; the same, unless they work."""
    evidence: tuple[str, ...]

    @property
    def is_due(self) -> bool:
        return self.for_s >= self.limit_s


def find_hang(
    ranks: Iterable[RankActivity], world_size: int, config: HangConfig, *, stretch: float = 1.0
) -> Hang | None:
    """The hang of a job of `world_size` ranks, from suspicion on; None while all is well or nothing can be said yet.

    Only ranks whose pages stand still are given; the verdicts that need all ranks wait until all are there. `stretch`
    multiplies the limits: a hang that came back at the same step after a restart may be none.
    """
    seen = sorted(ranks, key=lambda one: one.rank)
    if not seen:
        return None
    for_s = min(one.still_s for one in seen)
    # no start-up and no declared phase explains a stopped process
    stop_limit_s = moving_limit_s(seen, config) * stretch
    stopped = [one for one in seen if one.stopped]
    if stopped and for_s >= suspicion_s(stop_limit_s, config):
        return _hang("stopped", stopped, for_s, stop_limit_s, [f"{_who(one)} is stopped (state T)" for one in stopped])
    limit_s = still_limit_s(seen, config) * stretch
    if for_s < suspicion_s(limit_s, config):
        return None
    hang = _outside(seen, for_s, limit_s, config, stretch)
    return hang or (_all_inside(seen, for_s, limit_s) if len(seen) == world_size else None)


def still_limit_s(ranks: list[RankActivity], config: HangConfig) -> float:
    """How long the job may go without a step while something stands still."""
    if any(one.phase for one in ranks):
        return config.phase_limit_s
    if not all(one.started for one in ranks):
        return config.start_limit_s
    return moving_limit_s(ranks, config)


def moving_limit_s(ranks: list[RankActivity], config: HangConfig) -> float:
    """The limit of a job that has been making steps."""
    slowest_s = max((one.step_s or 0.0 for one in ranks), default=0.0)
    return max(config.still_limit_s, config.steps * slowest_s)


def suspicion_s(limit_s: float, config: HangConfig) -> float:
    """From when on processes are looked at, so that the verdict is ready when the limit is reached."""
    return max(limit_s / 2, min(config.suspect_s, limit_s))


def is_idle(one: RankActivity, config: HangConfig) -> bool | None:
    """Whether the rank's process tree does nothing; None when nobody has looked."""
    if one.reads_stdin:
        return False  # somebody at a debugger's prompt is at work
    if one.cpu_fraction is None or one.io_bytes_per_s is None or one.faults_per_s is None:
        return None
    return (
        one.cpu_fraction < config.idle_cpu_fraction
        and one.io_bytes_per_s < config.idle_io_bytes_per_s
        and one.faults_per_s < config.idle_faults_per_s
    )


def _outside(seen: list[RankActivity], for_s: float, limit_s: float, config: HangConfig, stretch: float) -> Hang | None:
    """Ranks that are not inside the operation in which others wait, or in none at all."""
    waited_for = laggards(seen)
    outside = [one for one in seen if one.inside is None or one.rank in waited_for]
    idle = [one for one in outside if is_idle(one, config)]
    if idle:
        return _hang("still", idle, for_s, limit_s, [_stands(one, waited_for.get(one.rank)) for one in idle])
    busy = [one for one in outside if is_idle(one, config) is False]
    if busy and len(busy) == len(outside):
        evidence = [_works(one, waited_for.get(one.rank)) for one in busy]
        found = _hang("busy", busy, for_s, limit_s, evidence)
        return msgspec.structs.replace(found, limit_s=max(limit_s, config.busy_limit_s * stretch))
    return None


def laggards(ranks: list[RankActivity]) -> dict[int, Operation]:
    """Ranks that some others wait for: the newest operation of a group that they have not come to yet.

    A rank's `inside` may be stale (C++ waits without telling), so one that counts less than the others wait in is
    behind whatever it says.
    """
    waiting: dict[str, list[RankActivity]] = defaultdict(list)
    for one in ranks:
        if one.inside is not None:
            waiting[one.inside.group].append(one)
    behind: dict[int, Operation] = {}
    for group, inside in waiting.items():
        newest = max((one.inside for one in inside if one.inside is not None), key=lambda operation: operation.seq)
        for one in ranks:
            if one.last is not None and one.last.group == group and one.last.seq < newest.seq:
                behind[one.rank] = newest
    return behind


def _all_inside(seen: list[RankActivity], for_s: float, limit_s: float) -> Hang | None:
    """Everybody waits: for each other, or for a network that moves nothing."""
    if any(one.inside is None for one in seen):
        return None
    by_operation: dict[Operation, list[int]] = defaultdict(list)
    for one in seen:
        assert one.inside is not None
        by_operation[one.inside].append(one.rank)
    lines = [f"{_ranks(ranks)} wait in {operation}" for operation, ranks in sorted(by_operation.items())]
    if len(by_operation) == 1:
        return _hang("stuck", [], for_s, limit_s, [f"{lines[0]}, and nothing moves"])
    fewest = min(map(len, by_operation.values()))
    odd = [rank for ranks in by_operation.values() if len(ranks) == fewest for rank in ranks]
    blamed = [one for one in seen if one.rank in odd] if 2 * len(odd) < len(seen) else []
    return _hang("mismatch", blamed, for_s, limit_s, lines)


def _hang(kind: Kind, blamed: list[RankActivity], for_s: float, limit_s: float, evidence: list[str]) -> Hang:
    return Hang(
        kind=kind,
        ranks=tuple(one.rank for one in blamed),
        nodes=tuple(dict.fromkeys(one.node for one in blamed)),
        for_s=for_s,
        limit_s=limit_s,
        still_limit_s=limit_s,
        evidence=tuple(evidence),
    )


def _who(one: RankActivity) -> str:
    return f"rank {one.rank} on {one.node}"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _stands(one: RankActivity, waited: Operation | None) -> str:
    how = "sleeps in the kernel and heeds no signal (state D)" if one.uninterruptible else "does nothing"
    return f"{_who(one)} {how}, for {one.still_s:.0f} s{_missing(waited)}"


def _works(one: RankActivity, waited: Operation | None) -> str:
    how = "waits for its standard input" if one.reads_stdin else f"{(one.cpu_fraction or 0) * 100:.0f} % of a core"
    return (
        f"{_who(one)} has worked for {one.still_s:.0f} s without a step ({how}){_missing(waited)}; "
        'if it should, declare it: `with evertrain.phase("…"):`'
    )


def _missing(waited: Operation | None) -> str:
    return f"; others wait for it in {waited}" if waited is not None else ""
