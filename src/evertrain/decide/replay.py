"""Would the ladder decide so again? Every decision of an incident, taken once more from the log.

The state is what the log says up to the decision, and the policy is the one that its record names; so a difference
means that the code decides otherwise today, or that the log does not tell all that a decision depended on.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from evertrain.decide import ladder
from evertrain.decide.applying import apply
from evertrain.decide.state import JobState
from evertrain.model.decisions import AnyAction
from evertrain.model.records import AnyRecord, Decided


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """One decision, as it stands in the log and as it would be taken now."""

    decided: Decided
    now: tuple[AnyAction, ...] = ()
    problem: str = ""
    """Why it cannot be taken again; then nothing is compared."""

    @property
    def agrees(self) -> bool:
        return not self.problem and self.now == self.decided.actions


def replay(log: Iterable[AnyRecord], incident: int) -> list[Again]:
    """All decisions about one incident, oldest first."""
    state = JobState()
    found = []
    for record in log:
        if isinstance(record, Decided) and record.incident == incident:
            found.append(_again(state, record))
        state = apply(state, record)
    return found


def _again(state: JobState, decided: Decided) -> Again:
    if decided.event is None:
        return Again(decided=decided, problem="written by an older version, which did not note what it was about")
    policy = state.policies.get(decided.policy)
    if policy is None:
        named = decided.policy or "none"
        return Again(decided=decided, problem=f"the policy that it names ({named}) does not stand in the log")
    return Again(decided=decided, now=ladder.decide(state, decided.event, policy))
