"""Collectives are stuck or slow: what follows, and what does it say about a hang?

    odd ──▶ looks at all ranks ──▶ a cause is named ──▶ an incident that is watched ──▶ well again: closed
                                        └── a later look says it better: the incident is corrected

One episode is one incident. Nothing healthy is ended because of it: what is done about a job that hangs is for
`decide.hangs` to say, which takes the cause from here where stacks name nobody; a rank that is slow by itself is the
ladder's, as any slow rank. Connections accuse no node: where only a pair is known, none is named.
"""

from __future__ import annotations

import msgspec

from evertrain.decide import answering, incidents
from evertrain.decide.blame import Blame
from evertrain.decide.episode import Communication
from evertrain.decide.state import Attempt, Incident, JobState
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.collectives import Component, RootCause
from evertrain.model.findings import Category
from evertrain.model.records import AnyRecord

SOURCE: r.Source = "communication"
_DOUBTFUL = 0.5
"""What is said less certainly is no verdict."""
_SURE = 0.8
_LASTS_S = 10.0
"""A slow rank is told to the ladder when it is slow for so long, and no later look has said otherwise."""
_OWN = ("compute", "host")
"""Components that are a matter of the rank and its machine."""
_CATEGORY: dict[Component, Category] = {
    "compute": "straggler", "host": "host_os", "sender": "network_ib", "receiver": "straggler",
    "network": "network_ib", "outside": "unknown", "storage": "storage", "none": "unknown",
}  # fmt: skip
_LOOKS_S = (0.0, 2.5, 6.0, 12.0)
"""So long after the begin of an episode all ranks are looked at, as long as it lasts;"""
_LOOKS_IN_VAIN_S = (0.0, 1.0, 2.5, 4.0, 6.0, 9.0, 12.0)
"""... and while nobody could be named."""


def next_look(state: JobState) -> float | None:
    """When all ranks are to be looked at next; None: not again."""
    seen = state.communication
    if seen is None:
        return None
    is_named = seen.found is not None and seen.found.cause.is_named
    looks_s = _LOOKS_S if is_named else _LOOKS_IN_VAIN_S
    return seen.since + looks_s[seen.looks] if seen.looks < len(looks_s) else None


def cause_of(state: JobState, attempt: Attempt) -> RootCause | None:
    """What the records of collectives say about this attempt now, if they name somebody."""
    seen = state.communication
    if seen is None or seen.odd.attempt != attempt.number or seen.found is None:
        return None
    cause = seen.found.cause
    return cause if cause.is_named and cause.confidence >= _DOUBTFUL else None


def look(state: JobState, attempt: Attempt, step: int | None, now: float) -> list[AnyRecord]:
    """The records that follow from an episode, or from its end."""
    open_one = state.tolerated
    mine = open_one if open_one is not None and open_one.opened.source == SOURCE else None
    if state.communication is None:
        return [] if mine is None else [_closed(mine, step, now)]
    cause = cause_of(state, attempt)
    if cause is None:
        return []
    verdict = verdict_of(state.communication, cause)
    if mine is not None:
        if verdict.differs(mine.opened) and state.communication.incident == mine.number:
            return [verdict.correction(mine.number, now)]
        return _slow_rank(state, attempt, mine, verdict, cause, now)
    if state.incident is not None or open_one is not None or state.communication.incident is not None:
        return []
    return incidents.watch(state, attempt, verdict, step, now)


def verdict_of(seen: Communication, cause: RootCause) -> Blame:
    began = cause.time if cause.time is not None else seen.since - seen.odd.for_s
    return Blame(
        source=SOURCE,
        fault_time=min(began, seen.since),
        cause=f"communication {cause.symptom} ({cause.component})",
        category=_CATEGORY[cause.component],
        ranks=cause.ranks,
        nodes=() if cause.is_pair else cause.nodes,
        confidence=cause.confidence,
        evidence=(*cause.evidence, *_between(cause)),
        component=cause.component,
        links=(cause.link,) if cause.link is not None else (),
        path=cause.path,
    )


def of_hang(seen: Blame, cause: RootCause) -> Blame:
    """The verdict on a hang whose ranks nothing else names."""
    return msgspec.structs.replace(
        seen,
        cause=f"hang ({cause.component})",
        category=_CATEGORY[cause.component],
        ranks=cause.ranks,
        nodes=() if cause.is_pair else cause.nodes,
        confidence=cause.confidence,
        evidence=tuple(dict.fromkeys((*cause.evidence, *_between(cause), *seen.evidence))),
        component=cause.component,
        links=(cause.link,) if cause.link is not None else (),
        path=cause.path,
    )


def _between(cause: RootCause) -> tuple[str, ...]:
    if cause.link is None or not cause.is_pair:
        return ()
    return (f"it lies between rank {cause.link[0]} and rank {cause.link[1]}: which of them it is cannot be seen",)


def _slow_rank(
    state: JobState, attempt: Attempt, mine: Incident, verdict: Blame, cause: RootCause, now: float
) -> list[AnyRecord]:
    """A rank that is slow by itself, when that is sure: the ladder says what is done."""
    if cause.symptom != "slow" or cause.component not in _OWN or cause.confidence < _SURE or not verdict.nodes:
        return []
    if mine.decisions or not state.policy or now - mine.opened.time < _LASTS_S:
        return []
    event = d.SlowRank(
        time=now, incident=mine.number, ranks=verdict.ranks, nodes=verdict.nodes, confidence=verdict.confidence,
        evidence=verdict.evidence,
    )  # fmt: skip
    decided = answering.decision(state, event, mine.number)
    if not answering.evicted_ranks_of(state, decided):
        return [decided]
    acted = incidents.opened(state, attempt.number, verdict, mine.opened.step, now)
    event = msgspec.structs.replace(event, incident=acted.incident)
    decided = answering.decision(state, event, acted.incident)
    return [*incidents.over(state, now), acted, decided, *answering.consequences(state, decided)]


def _closed(mine: Incident, step: int | None, now: float) -> AnyRecord:
    return r.IncidentClosed(time=now, incident=mine.number, first_new_step=step, passed_time=now)
