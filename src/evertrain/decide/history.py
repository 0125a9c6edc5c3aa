"""What have nodes gone through? Days of run time and failures, from event logs.

A failure is a node that is evicted, lost or unusable while it was part of a run; one that the user took out is none.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from evertrain.decide.applying import apply
from evertrain.decide.state import JobState
from evertrain.model import records as r
from evertrain.model.decisions import Evict
from evertrain.model.records import AnyRecord

_DAY_S = 86400.0
_OUT = ("evicted", "lost", "unusable")


class History(msgspec.Struct, frozen=True):
    """Of any number of nodes, in any number of jobs."""

    node_days: float = 0.0
    failures: int = 0

    def __add__(self, other: History) -> History:
        return History(self.node_days + other.node_days, self.failures + other.failures)


def of_log(log: Iterable[AnyRecord]) -> History:
    """Of one job, in all its runs; the time between runs counts for nobody."""
    state, node_s, failures = JobState(), 0.0, 0
    before: float | None = None
    for record in log:
        if isinstance(record, r.RunStarted):
            before = None
        if before is not None and state.ended is None:
            node_s += len(state.roster) * max(0.0, record.time - before)
        before = record.time
        after = apply(state, record)
        if not isinstance(record, r.RunStarted):
            failures += len(_fallen(state, after) - _drained(record))
        state = after
    return History(node_s / _DAY_S, failures)


def _fallen(before: JobState, after: JobState) -> set[str]:
    """Nodes that were well, and are not any more; one that is lost and then evicted has failed once."""
    if before.nodes is after.nodes:
        return set()
    well = {node for node in after.nodes if node not in before.nodes or before.nodes[node].state not in _OUT}
    return {node for node in well if after.nodes[node].state in _OUT}


def _drained(record: AnyRecord) -> set[str]:
    actions = record.actions if isinstance(record, r.Decided) else ()
    return {node for action in actions if isinstance(action, Evict) and action.planned for node in action.nodes}
