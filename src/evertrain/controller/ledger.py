"""Where did the time go? A job's seconds, productive or lost, from the event log alone.

Lost is: from the start of the run until every rank was in its loop for the first time, and for each incident from the
last progress before the fault until the slowest rank had done a step that none had done before. All else is productive.
ETTR is the productive share of wall time (Kokolis et al.; ByteRobust section 8.1).
"""

from __future__ import annotations

from typing import Any

import msgspec

from evertrain.decide.state import Attempt, Incident, JobState

Interval = tuple[float, float]


class Seconds(msgspec.Struct, frozen=True):
    """The phases of one incident; None: not over yet, or never reached."""

    detect: float | None
    locate: float | None
    failover: float | None
    recompute: float | None


def seconds(incident: Incident) -> Seconds:
    """Fault to news of it, to the verdict, to all ranks back in their loop, to the first new step."""
    seen, located, resumed = incident.opened.time, incident.located_time, incident.resumed_time
    passed = incident.closed.passed_time if incident.closed is not None else None
    return Seconds(
        detect=_length(incident.opened.fault_time, seen),
        locate=_length(seen, located),
        failover=_length(located, resumed),
        recompute=_length(resumed, passed),
    )


def _length(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 4)


def lost(state: JobState, now: float) -> list[Interval]:
    """The lost stretches of this run, in order and without overlap."""
    if state.run is None:
        return []
    end = state.ended.time if state.ended is not None else now
    intervals: list[Interval] = []
    first = state.attempts[0] if state.attempts else None
    intervals.append((state.run.time, _back(first, end)))
    for incident in state.incidents.values():
        attempt = next((seen for seen in state.attempts if seen.number == incident.opened.attempt), None)
        if attempt is None:
            continue  # of an earlier run
        mark = attempt.progress.progress_time if attempt.progress is not None else attempt.started.time
        start = min(mark, incident.opened.fault_time)
        passed = incident.closed.passed_time if incident.closed is not None else None
        over = incident.closed.time if incident.closed is not None else end
        intervals.append((start, passed if passed is not None else over))
    return _merge([(max(start, state.run.time), min(stop, end)) for start, stop in intervals])


def _back(attempt: Attempt | None, end: float) -> float:
    if attempt is None:
        return end
    if attempt.resumed is not None:
        return attempt.resumed.resumed_time
    # a program whose steps nobody can see, and that has done its work
    completed = attempt.ended is not None and attempt.ended.outcome == "completed"
    return attempt.started.time if completed else end


def _merge(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def ettr(state: JobState, now: float, window_s: float | None = None) -> float | None:
    """The productive share of this run's wall time so far, or of its last `window_s`; None before it has begun."""
    if state.run is None:
        return None
    end = state.ended.time if state.ended is not None else now
    start = state.run.time if window_s is None else max(state.run.time, end - window_s)
    if end <= start:
        return None
    gone = sum(max(0.0, min(stop, end) - max(begin, start)) for begin, stop in lost(state, now))
    return round(1.0 - gone / (end - start), 4)


def attempts(state: JobState) -> list[dict[str, Any]]:
    """Each attempt of this run in one flat dict, for tables and reports."""
    return [
        {
            "attempt": attempt.number,
            "started": attempt.started.time,
            "resume": attempt.started.resume,
            "step": attempt.ended.step if attempt.ended else None,
            "relative_step": attempt.ended.relative_step if attempt.ended else None,
            "outcome": attempt.ended.outcome if attempt.ended else "running",
            "seconds": round(attempt.ended.time - attempt.started.time, 3) if attempt.ended else None,
        }
        for attempt in state.attempts
    ]
