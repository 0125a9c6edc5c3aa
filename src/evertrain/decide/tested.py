"""What does the log say of tests of nodes? The part of the fold about stages of tests, and about examinations."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from evertrain.decide.state import Exam, Incident, JobState, Stage
from evertrain.model.diagnosis import StageAsked, StageDone, Symptom
from evertrain.model.exam_records import ExamAsked, ExamOver

_MOST_EXAMS = 16
"""With every number of every rank."""
_WHOLE: tuple[Symptom, ...] = ("returning", "crash", "illegal_access")
"""Suites that test processors, memory and bits: who has passed one of them need not be tested again to come back."""


def stage(
    state: JobState, record: StageAsked | StageDone, with_incident: Callable[[JobState, Incident], JobState]
) -> JobState:
    """A test was asked for, or is over: of an incident, or of the examination that is under way."""
    whose: Incident | Exam = state.incidents[record.incident] if record.incident else state.exams[-1]
    if isinstance(record, StageAsked):
        stages = (*whose.stages, Stage(asked=record))
        state = replace(state, next_stage=record.stage + 1)
    else:
        *earlier, newest = whose.stages
        stages = (*earlier, replace(newest, done=record))
        if record.golden:
            state = replace(state, golden={**state.golden, **dict(record.golden)})
    if isinstance(whose, Incident):
        return with_incident(state, replace(whose, stages=stages))
    return replace(state, exams=(*state.exams[:-1], replace(whose, stages=stages)))


def exam(state: JobState, record: ExamAsked | ExamOver) -> JobState:
    """An examination begins, or is over."""
    if isinstance(record, ExamAsked):
        if record.exam < state.next_exam:
            return state  # two have asked at once: it is one examination
        exams = (*state.exams, Exam(asked=record))[-_MOST_EXAMS:]
        return replace(state, exams=exams, next_exam=record.exam + 1)
    exams = tuple(replace(one, over=record) if one.asked.exam == record.exam else one for one in state.exams)
    asked = next((one.asked for one in exams if one.over is record), None)
    counts = asked is not None and record.outcome != "given_up" and asked.symptom in _WHOLE
    told = dict.fromkeys(asked.nodes, record) if asked is not None and counts else {}
    return replace(state, exams=exams, examined={**state.examined, **told})


def forgotten(state: JobState, nodes: Iterable[str]) -> JobState:
    """Whoever has left may not be what it was when it comes back."""
    gone = frozenset(nodes)
    if gone.isdisjoint(state.examined):
        return state
    return replace(state, examined={node: one for node, one in state.examined.items() if node not in gone})
