"""A rank has become slow, and the others wait for it: what is done?

Training goes on meanwhile, so what is done must be worth more than a restart costs, and a restart in place makes no
machine faster. The first time the rank is named, and that is all. Hardware evidence, or the same node named again
within a day, and a standby that is ready: it takes over. Where nobody can, training goes on as it is.
"""

from __future__ import annotations

from evertrain.decide import eviction
from evertrain.decide.eviction import Removal, listed
from evertrain.decide.state import JobState
from evertrain.locate.words import named as called
from evertrain.model.decisions import AnyAction, Policy, SlowRank, Tolerate
from evertrain.model.words import counted


def slow_rank(state: JobState, event: SlowRank, policy: Policy) -> tuple[AnyAction, ...]:
    """What follows from a verdict about slow training."""
    what = f"{_who(event)}: the others wait for {'it' if len(event.ranks) == 1 else 'them'}"
    named = eviction.still_active(state, event.nodes)
    if not named:
        return (_tolerate(event, f"{what}; not part of the job any more"),)
    if len(named) > 1 and policy.hang_policy != "paper":
        return (_tolerate(event, f"{what}; {len(named)} nodes at once: hardly the fault of a machine"),)
    otherwise = "named as slow (hang.policy: paper)" if policy.hang_policy == "paper" else ""
    found = {node: eviction.against(state, policy, node, event) or otherwise for node in named}
    reasons = {node: reason for node, reason in found.items() if reason}
    if not reasons:
        return (_tolerate(event, f"{what}; named, and left alone the first time: a restart makes no machine faster"),)
    why = f"{what}; {'; '.join(reasons.values())}"
    if state.closing or (state.incident is not None and state.incident.number != event.incident):
        return (_tolerate(event, f"{why}; a recovery comes first"),)
    ready = len(state.usable_standbys())
    if ready < len(reasons):
        because = f"{why}; {counted(ready, 'standby')} ready for {counted(len(reasons), 'node')}: training goes on"
        return (_tolerate(event, because),)
    window_s = policy.ladder.reading_window_s
    seen = tuple(line for node in reasons for line in eviction.signs(state.memory, node, event.time, window_s))
    removal = Removal(
        nodes=tuple(reasons),
        why=why,
        evidence=(*reasons.values(), *seen, *event.evidence),
        is_group=event.is_group,
        may_shrink=False,
        may_wait=False,
        is_grave=False,
        has_failed=False,
    )
    return eviction.remove(state, policy, event.time, removal)


def _who(event: SlowRank) -> str:
    return f"{called(event.ranks)} on {listed(event.nodes)} (slow)"


def _tolerate(event: SlowRank, because: str) -> Tolerate:
    return Tolerate(node=event.node, because=because)
