"""What does `--observe-only` make of a decision? All is judged and written down, and nothing is done."""

from __future__ import annotations

from evertrain.decide.eviction import listed
from evertrain.decide.failures import who
from evertrain.model.decisions import (
    Answered,
    AnyAction,
    AnyEvent,
    AskHuman,
    AttemptFailed,
    Enlist,
    Evict,
    Grow,
    Hold,
    Inspect,
    NobodyCame,
    Proven,
    Restart,
    RollBack,
    Stop,
    Tolerate,
    WaitForNodes,
)


def instead(event: AnyEvent, actions: tuple[AnyAction, ...]) -> tuple[AnyAction, ...]:
    """What is done instead of `actions`: a job whose attempt has failed ends, as it would without us."""
    would = ", then ".join(_in_words(action) for action in actions if not isinstance(action, Tolerate | AskHuman))
    if isinstance(event, AttemptFailed):
        if not actions or isinstance(actions[0], Stop):
            return actions
        what = f"{who(event)} ({event.cause})"
        return (Stop(because=f"{what}; with --observe-only nothing is restarted (it would: {would})"),)
    # an incident never gets further than its first decision: nothing is asked or waited for
    if not would or isinstance(event, Answered | NobodyCame | Proven):
        return actions
    first = actions[0]
    why = "; ".join(first.evidence) if isinstance(first, Evict) else first.because
    return (Tolerate(node=event.node, because=f"with --observe-only nothing is done; it would {would}: {why}"),)


def _in_words(action: AnyAction) -> str:
    match action:
        case Evict():
            new = f" ({listed(tuple(action.replacements.values()))} in its place)" if action.replacements else ""
            return f"evict {listed(action.nodes)}{new}"
        case WaitForNodes():
            return f"wait for {action.nodes} nodes"
        case Enlist():
            return f"make {action.node} a standby"
        case Grow():
            return f"go on with {listed(action.nodes)} as well"
        case Inspect():
            return "run the stop-time checks"
        case RollBack():
            return "undo the newest change of the code"
        case Hold():
            return "wait for storage"
        case Restart():
            return "restart in place"
        case _:
            return type(action).__name__.lower()
