"""How does an incident begin? With a verdict; and unless it is only watched, with the end of the attempt."""

from __future__ import annotations

from evertrain.decide.blame import Blame
from evertrain.decide.state import Attempt, JobState
from evertrain.model import records as r
from evertrain.model.records import AnyRecord


def act(state: JobState, attempt: Attempt, verdict: Blame, step: int | None, now: float) -> list[AnyRecord]:
    """Open an incident and end the attempt: what follows is decided when nothing of it is left."""
    ending = r.AttemptEnding(time=now, attempt=attempt.number, signal=9, because=verdict.cause)
    known = state.incident
    if known is not None and known.opened.attempt == attempt.number and known.decided is None:
        return [ending]  # a node of it is known to be broken, and a replacement waited for
    return [*over(state, now), opened(state, attempt.number, verdict, step, now), ending]


def watch(state: JobState, attempt: Attempt, verdict: Blame, step: int | None, now: float) -> list[AnyRecord]:
    """Open an incident that names somebody, and leave everybody alone."""
    return [*over(state, now), opened(state, attempt.number, verdict, step, now, tolerated=True)]


def over(state: JobState, now: float) -> list[AnyRecord]:
    """Training had not come back to where it was: what is open ends where the next one begins. A wait goes on."""
    known = (state.incident, state.tolerated)
    return [
        r.IncidentClosed(time=now, incident=one.number, first_new_step=None, passed_time=None)
        for one in known
        if one is not None and one.wait is None
    ]


def opened(
    state: JobState, attempt: int, verdict: Blame, step: int | None, now: float, *, tolerated: bool = False
) -> r.IncidentOpened:
    """The incident under its number."""
    number = max(state.incidents, default=0) + 1
    shown = (f"`evertrain stacks --incident {number}` shows the stacks",) if verdict.captures else ()
    return r.IncidentOpened(
        time=now,
        incident=number,
        attempt=attempt,
        fault_time=min(verdict.fault_time, now),
        cause=verdict.cause,
        category=verdict.category,
        ranks=verdict.ranks,
        nodes=verdict.nodes,
        confidence=verdict.confidence,
        evidence=(*verdict.evidence, *shown),
        step=step,
        source=verdict.source,
        tolerated=tolerated,
        located=verdict.located,
        group=verdict.group,
        group_nodes=verdict.group_nodes,
        captures=verdict.captures,
        component=verdict.component,
        links=verdict.links,
        path=verdict.path,
    )
