"""How does an incident begin? With a verdict; and unless it is only watched, with the end of the attempt."""

from __future__ import annotations

from evertrain.decide.blame import Blame
from evertrain.decide.state import Attempt, JobState
from evertrain.model import records as r
from evertrain.model.records import AnyRecord


def act(state: JobState, attempt: Attempt, verdict: Blame, step: int | None, now: float) -> list[AnyRecord]:
    """Open an incident and end the attempt: what follows is decided when nothing of it is left."""
    ending = r.AttemptEnding(time=now, attempt=attempt.number, signal=9, because=verdict.cause)
    return [*_opened(state, attempt, verdict, step, now, tolerated=False), ending]


def watch(state: JobState, attempt: Attempt, verdict: Blame, step: int | None, now: float) -> list[AnyRecord]:
    """Open an incident that names somebody, and leave everybody alone."""
    return _opened(state, attempt, verdict, step, now, tolerated=True)


def _opened(
    state: JobState, attempt: Attempt, verdict: Blame, step: int | None, now: float, *, tolerated: bool
) -> list[AnyRecord]:
    records: list[AnyRecord] = []
    if (before := state.incident or state.tolerated) is not None:
        # training had not come back to where it was: that incident ends where this one begins
        records.append(r.IncidentClosed(time=now, incident=before.number, first_new_step=None, passed_time=None))
    opened = r.IncidentOpened(
        time=now,
        incident=max(state.incidents, default=0) + 1,
        attempt=attempt.number,
        fault_time=min(verdict.fault_time, now),
        cause=verdict.cause,
        category=verdict.category,
        ranks=verdict.ranks,
        nodes=verdict.nodes,
        confidence=verdict.confidence,
        evidence=verdict.evidence,
        step=step,
        source=verdict.source,
        tolerated=tolerated,
    )
    return [*records, opened]
