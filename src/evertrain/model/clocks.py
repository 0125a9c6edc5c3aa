"""Whose clock does a time come from, and how does it become another one's?

On a node every time is read from its monotonic clock, which all its processes share and nobody can set. An agent adds
what its wall clock was ahead by when it began, the controller adds what that differs from its own clock: what leaves
the controller is its own time. So a wall clock that is set changes nothing while the job runs.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from evertrain.model.report import AttemptReport, Exit, NodeReport, PageReport, RankReport
from evertrain.model.sensing import SensorState, Sign


class Clock(msgspec.Struct, frozen=True):
    """A wall clock that cannot be set: `zero` is what it adds to the monotonic clock of one boot of one machine."""

    boot_id: str
    zero: float

    def at(self, monotonic: float) -> float:
        return self.zero + monotonic


def shifted(report: NodeReport, by_s: float) -> NodeReport:
    """The same report with every time in it later by `by_s`; durations stay, and 0.0 still means unknown."""
    if by_s == 0.0:
        return report
    return replace(
        report,
        attempts=tuple(_attempt(attempt, by_s) for attempt in report.attempts),
        pages=tuple(_page(page, by_s) for page in report.pages),
        sensors=tuple(_sensor(sensor, by_s) for sensor in report.sensors),
        signs=tuple(_sign(sign, by_s) for sign in report.signs),
    )


def _attempt(attempt: AttemptReport, by_s: float) -> AttemptReport:
    return replace(attempt, ranks=tuple(_rank(rank, by_s) for rank in attempt.ranks))


def _rank(rank: RankReport, by_s: float) -> RankReport:
    return rank if rank.exit is None else replace(rank, exit=_exit(rank.exit, by_s))


def _exit(exit: Exit, by_s: float) -> Exit:
    error = exit.error
    if error is not None and error.time is not None:
        error = replace(error, time=error.time + by_s)
    return replace(exit, time=exit.time + by_s, error=error)


def _page(page: PageReport, by_s: float) -> PageReport:
    def later(time: float) -> float:
        return time + by_s if time > 0 else time

    return replace(
        page,
        progress_time=later(page.progress_time),
        resumed_time=later(page.resumed_time),
        passed_time=later(page.passed_time),
    )


def _sensor(sensor: SensorState, by_s: float) -> SensorState:
    return replace(sensor, since=sensor.since + by_s) if sensor.since > 0 else sensor


def _sign(sign: Sign, by_s: float) -> Sign:
    return replace(sign, time=sign.time + by_s)
