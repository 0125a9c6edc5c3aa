"""Which ranks of this node stand still, and for how long? The agent's memory of what their pages said before.

Time counts only while the agent looks: one that was paused for a minute has not seen anybody stand still for a minute.
A page that changes is progress; from a second without any on, the rank's process tree is measured as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from copy import copy

from msgspec.structs import replace

from evertrain.model.activity import Operation, RankActivity
from evertrain.observe import activity
from evertrain.observe.pages import PageView

# longer than this between two looks, and the agent was away
_LONGEST_LOOK_S = 1.0
_QUIET_S = 1.0
"""Pages that changed within it are nobody's business."""
_MEASURE_EVERY_S = 0.5
_SHORTEST_WINDOW_S, _WINDOW_S = 1.0, 5.0
"""Rates are taken over so long: CPU time is counted in ticks of 10 ms, and two of them are not work."""

_START_COLLECTIVES = 10
"""A script that shows no steps has left its start-up behind after so many collectives."""

BASE_PHASES = frozenset({"", "start", "init", "train", "failed"})
"""Phases in which steps are to be expected soon. All others are declared, or the script is over and cleans up."""


Sample = tuple[float, activity.Usage]
"""What a rank's processes have used, until when."""


class _Rank:
    """One running rank as it was seen before."""

    def __init__(self, view: PageView) -> None:
        self.mark = _mark(view)
        self.still_s = 0.0
        self.samples: list[Sample] = []

    def look(self, view: PageView, passed_s: float) -> None:
        mark = _mark(view)
        if mark != self.mark:
            self.mark, self.still_s = mark, 0.0
            self.samples.clear()
        else:
            self.still_s += passed_s

    def measure(self, pid: int, now: float) -> None:
        if self.samples and now - self.samples[-1][0] < _MEASURE_EVERY_S:
            return
        usage = activity.usage(pid)
        if usage is not None:
            self.samples.append((now, usage))
            while len(self.samples) > 2 and now - self.samples[1][0] >= _WINDOW_S:
                del self.samples[0]

    def leave_out(self, begin: Sample, end: Sample) -> None:
        """What it did between these two moments is no work of its own."""
        (began, first), (ended, last) = begin, end
        self.samples = [
            (when, _plus(usage, first, last)) if when <= began else (when, last) if when < ended else (when, usage)
            for when, usage in self.samples
        ]


def _plus(usage: activity.Usage, first: activity.Usage, last: activity.Usage) -> activity.Usage:
    return replace(
        usage,
        cpu_s=usage.cpu_s + last.cpu_s - first.cpu_s,
        io_bytes=usage.io_bytes + last.io_bytes - first.io_bytes,
        faults=usage.faults + last.faults - first.faults,
    )


class Watch:
    """Looks at all pages of a node, again and again."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self._looked_time: float | None = None

    def look(self, running: Iterable[PageView]) -> tuple[RankActivity, ...]:
        """Take the newest pages of the ranks that run; those that stand still are described."""
        now = time.monotonic()
        passed_s = 0.0 if self._looked_time is None else min(now - self._looked_time, _LONGEST_LOOK_S)
        self._looked_time = now
        known, self._ranks = self._ranks, {}
        found = []
        for view in running:
            key = (view.attempt, view.rank)
            rank = self._ranks[key] = known.get(key) or _Rank(view)
            rank.look(view, passed_s)
            if rank.still_s >= _QUIET_S:
                rank.measure(view.pid, now)
                if rank.samples:
                    found.append(self._describe(view, rank))
        return tuple(found)

    def leave_out(self, attempt: int, begun: Mapping[int, Sample], ended: Mapping[int, Sample]) -> None:
        """Between these moments, by rank, we had them answer us: who is asked why it stands is not at work."""
        for number in begun.keys() & ended.keys():
            if (rank := self._ranks.get((attempt, number))) is not None:
                rank.leave_out(begun[number], ended[number])

    def everyone(self, running: Iterable[PageView], measured: Mapping[int, Sample]) -> tuple[RankActivity, ...]:
        """All ranks, also those that move. `measured`, by rank: who moves is not measured by ourselves."""
        found = []
        for view in running:
            rank = copy(self._ranks.get((view.attempt, view.rank)) or _Rank(view))
            if not rank.samples and view.rank in measured:
                rank.samples = [measured[view.rank]]
            if rank.samples:
                found.append(self._describe(view, rank))
        return tuple(found)

    def _describe(self, view: PageView, rank: _Rank) -> RankActivity:
        collective = view.collective
        last = Operation(collective.group, collective.op, collective.seq) if collective.state != "none" else None
        (first_time, first), (last_time, newest) = rank.samples[0], rank.samples[-1]
        span_s = last_time - first_time
        measured = span_s >= _SHORTEST_WINDOW_S
        return RankActivity(
            rank=view.rank,
            node=self._node,
            still_s=round(rank.still_s, 2),
            inside=last if collective.state == "entered" else None,
            last=last,
            started=view.rel_step > 0 or view.abs_step > view.resumed_step or collective.seq >= _START_COLLECTIVES,
            phase="" if view.phase in BASE_PHASES else view.phase,
            step=view.rel_step,
            step_s=view.step_s or None,
            stopped=newest.stopped,
            uninterruptible=newest.uninterruptible,
            reads_stdin=newest.reads_stdin,
            cpu_fraction=round((newest.cpu_s - first.cpu_s) / span_s, 4) if measured else None,
            io_bytes_per_s=round((newest.io_bytes - first.io_bytes) / span_s, 1) if measured else None,
            faults_per_s=round((newest.faults - first.faults) / span_s, 1) if measured else None,
        )


def _mark(view: PageView) -> tuple[object, ...]:
    """What changes when there is progress; a write without any news is none."""
    collective = view.collective
    return (
        view.abs_step, view.rel_step, view.progress_time, view.phase, view.resumed_time,
        collective.group, collective.op, collective.seq, collective.state,
    )  # fmt: skip
