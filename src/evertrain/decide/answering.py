"""What is written down when an event calls for a decision? The ladder's answer, and what follows from it at once."""

from __future__ import annotations

from evertrain.decide import ladder
from evertrain.decide.state import JobState
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.records import AnyRecord


def decision(state: JobState, event: d.AnyEvent, incident: int | None = None) -> r.Decided:
    """The ladder's answer by the policy that holds now."""
    return ladder.decision(state, event, state.policies[state.policy], state.policy, incident)


def answer(state: JobState, event: d.AnyEvent, incident: int | None = None) -> list[AnyRecord]:
    """The decision about an event, and what it means for the attempt that runs."""
    decided = decision(state, event, incident)
    return [decided, *consequences(state, decided)]


def consequences(state: JobState, decided: r.Decided) -> list[AnyRecord]:
    """Nobody trains on when one of them is taken out."""
    attempt = state.active
    evicted = evicted_ranks_of(state, decided)
    if attempt is None or attempt.ending is not None or not evicted:
        return []
    planned = [action for action in decided.actions if isinstance(action, d.Evict) and action.planned]
    name = None
    records: list[AnyRecord] = []
    if planned:
        name = f"drain-{'-'.join(planned[0].nodes)}-{attempt.number}"
        records.append(r.RestartRequested(time=decided.time, restart=name, attempt=attempt.number))
    ending = r.AttemptEnding(
        time=decided.time, attempt=attempt.number, signal=9, because=decided.because, restart=name
    )  # fmt: skip
    return [*records, ending]


def evicted_ranks_of(state: JobState, decided: r.Decided) -> tuple[str, ...]:
    """The nodes with ranks that a decision takes out."""
    evicted = (node for action in decided.actions if isinstance(action, d.Evict) for node in action.nodes)
    active = frozenset(state.active_nodes())
    return tuple(node for node in evicted if node in active)
