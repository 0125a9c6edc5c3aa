"""By which clock does the controller count, and how far are its agents' clocks from it?

A run has one clock: the controller that takes over on the same boot of the same machine counts on where its predecessor
did, whatever has become of the wall clock. Elsewhere it begins anew, and never before the log's last record.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from evertrain.model.clocks import Clock, shifted
from evertrain.model.report import Report

TIE_S = 0.05
"""Clocks that differ by less are the same: what happened within it on two nodes has no order."""
_REPORTS = 60
"""The difference is that of the fastest of so many: about a minute of heartbeats."""


def clock_of_term(
    predecessor: Clock | None, last_record_time: float, *, wall: float, monotonic: float, boot_id: str
) -> Clock:
    """The clock of a controller that begins now; `predecessor` is that of the same run's last one."""
    if predecessor is not None and predecessor.boot_id == boot_id and predecessor.at(monotonic) >= last_record_time:
        return predecessor
    return Clock(boot_id, max(wall, last_record_time) - monotonic)


class AgentClock:
    """One connection of one agent. An agent that is started again counts by another clock, and has another connection.

    A report is always late by the time that it took, so the smallest difference of the last ones is the closest.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_REPORTS)
        self._difference_s = 0.0

    @property
    def difference_s(self) -> float:
        """What is added to the agent's times."""
        return self._difference_s

    def corrected(self, report: Report, now: float) -> Report:
        """`report`, heard `now`, with all its times by the controller's clock."""
        self._seen.append(now - report.time)
        least = min(self._seen)
        # up only for what is no tie: a few slow reports must not move the ends of ranks to and fro
        if least < self._difference_s or least > self._difference_s + TIE_S:
            self._difference_s = 0.0 if abs(least) <= TIE_S else least
        by_s = self._difference_s
        return replace(report, time=report.time + by_s, report=shifted(report.report, by_s))
