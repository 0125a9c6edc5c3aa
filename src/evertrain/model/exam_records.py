"""What does the log say of examinations: tests of nodes that no incident calls for?

Their stages are those of the stop-time checks (`StageAsked`, `StageDone`) with `incident` 0; one examination is under
way at a time, so they belong to the newest.
"""

from __future__ import annotations

from typing import Literal

from evertrain.model.diagnosis import Symptom
from evertrain.model.record import Record

ExamReason = Literal["user", "joining", "returning"]
"""`evertrain diagnose` asks; a standby has come; an evicted node would come back."""
ExamOutcome = Literal["passed", "failed", "unknown", "given_up"]
"""`unknown`: nothing could be tested, or not to the end; `given_up`: the nodes were needed, or may not be tested."""


class ExamAsked(Record, frozen=True, kw_only=True):
    """Nodes are to be tested, all at the same time."""

    exam: int
    """Its number, over all runs of the job."""
    reason: ExamReason
    symptom: Symptom
    nodes: tuple[str, ...]
    budget_s: float
    holds: bool = False
    """Ranks belong on some of them: the next start waits until the tests are over."""


class ExamOver(Record, frozen=True, kw_only=True):
    exam: int
    outcome: ExamOutcome
    because: str
    passed: tuple[str, ...] = ()
    """Nodes of which this can be said."""
