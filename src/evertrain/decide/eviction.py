"""Who takes over when a node has to go, may it go at all, and when does it come back?

    to be evicted ──over the budget──▶ training goes on, ask a human
          │
          ├──a standby is ready──▶ it takes over the ranks
          ├──none, and MIN allows──▶ the job becomes smaller
          ├──none, and the platform may bring one──▶ wait, with a deadline
          └──none──▶ training goes on, ask a human

The budget keeps one wrong idea from emptying a cluster. It limits harm, never recovery: over it everything but the
eviction goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from evertrain.decide.memory import Memory
from evertrain.decide.state import JobState
from evertrain.model.config import LadderConfig
from evertrain.model.decisions import (
    AnyAction,
    AskHuman,
    AttemptFailed,
    Evict,
    Grow,
    HardwareReading,
    Hold,
    NetworkAlert,
    NodeFault,
    NodeTested,
    Policy,
    Restart,
    SlowRank,
    Tolerate,
    WaitForNodes,
)

MOST_TIMES = 2
"""Evicted so often within the window, a node comes back only when somebody lets it."""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that should leave, and how far the job may go to be rid of them."""

    nodes: tuple[str, ...]
    why: str
    evidence: tuple[str, ...]
    lost: bool = False
    is_group: bool = False
    may_shrink: bool = True
    may_wait: bool = True
    is_grave: bool = True
    """A human is asked when the nodes have to stay."""
    has_failed: bool = True
    """An attempt has ended because of them; else it is only a sign, and whatever runs may go on."""


# -- who is there ------------------------------------------------------------------------------------------------------


def role(state: JobState, node: str) -> Literal["active", "standby"] | None:
    """What the node is to this job; None: no part of it."""
    if node not in state.roster:
        return None
    return "standby" if node in state.standbys() else "active"


def still_active(state: JobState, nodes: Sequence[str]) -> tuple[str, ...]:
    """Those that hold ranks now, each once."""
    if not nodes:
        return ()
    active = frozenset(state.active_nodes())
    return tuple(node for node in dict.fromkeys(nodes) if node in active)


def signs(memory: Memory, node: str, now: float, window_s: float) -> tuple[str, ...]:
    """What was seen of the node's hardware within the window, a line each."""
    oldest = now - window_s
    seen: list[HardwareReading | NetworkAlert | NodeFault] = [
        *memory.readings.get(node, ()),
        *memory.alerts.get(node, ()),
    ]
    if node in memory.faults and memory.faults[node] not in seen:
        seen.append(memory.faults[node])
    return tuple(f"{node}: {one.evidence}" for one in sorted(seen, key=lambda one: one.time) if one.time >= oldest)


def against(state: JobState, policy: Policy, node: str, event: AttemptFailed | SlowRank) -> str:
    """What speaks against a node beside that it is named in a hang, or as slow; empty: nothing."""
    config = policy.ladder
    if seen := signs(state.memory, node, event.time, config.reading_window_s):
        return f"{seen[-1]} (within {config.reading_window_s / 60:.0f} min)"
    source, did = ("slow", "was slow") if isinstance(event, SlowRank) else ("hang", "hung")
    oldest = event.time - config.repeat_window_s
    for one in reversed(state.memory.past):
        if one.source == source and node in one.nodes and one.time >= oldest and one.incident != event.incident:
            return f"{node} {did} before, in incident {one.incident}"
    return ""


# -- taking out --------------------------------------------------------------------------------------------------------


def remove(state: JobState, policy: Policy, now: float, removal: Removal) -> tuple[AnyAction, ...]:
    """Evict, or what is done instead."""
    nodes, why = removal.nodes, removal.why
    if not removal.lost and (over := over_budget(state, policy.ladder, now, len(nodes), is_group=removal.is_group)):
        return stay(state, removal, nodes, f"{why}: not evicted: {over}", f"{listed(nodes)} should go, but {over}")
    spare = state.usable_standbys()[: len(nodes)]
    missing = len(nodes) - len(spare)
    if not missing:
        return (_evict(removal, nodes, spare),)
    if removal.may_shrink and may_shrink(state, missing):
        return (_evict(removal, nodes, spare),)
    lack = f"no standby is ready for {missing} of {len(nodes)} nodes" if spare else "no standby is ready"
    assert state.run is not None
    if removal.may_wait and state.run.seats is not None:
        waits_s = policy.ladder.replace_wait_s
        return (
            WaitForNodes(
                nodes=missing,
                until=now + waits_s,
                instead_of=nodes,
                evidence=removal.evidence,
                because=f"{why}: {lack}; the platform is asked, and waited for, up to {waits_s:.0f} s",
            ),
        )
    kept = nodes[len(spare) :]
    smaller = "" if spare or not removal.may_shrink else f", and {why_not_smaller(state, missing)}"
    stays = f"{why}: {lack}{smaller}"
    question = f"{listed(kept)} should go and there is nothing to replace it with"
    if not spare:
        return stay(state, removal, kept, stays, question)
    evicted = _evict(removal, nodes[: len(spare)], spare)
    return (evicted, *stay(state, removal, kept, stays, question, restarts=True))


def _evict(removal: Removal, nodes: tuple[str, ...], spare: tuple[str, ...]) -> Evict:
    replacements = dict(zip(nodes, spare, strict=False))
    takes_over = [f"{new} takes over from {old}" for old, new in list(replacements.items())[:4]]
    if len(replacements) > len(takes_over):
        takes_over.append(f"and {len(replacements) - len(takes_over)} more")
    if smaller := len(nodes) - len(replacements):
        takes_over.append(f"no standby is left: the job goes on with {smaller} node{'s' * (smaller != 1)} less")
    return Evict(
        nodes=nodes,
        replacements=replacements,
        evidence=removal.evidence,
        lost=removal.lost,
        because=f"{removal.why}: {'replaced' if removal.lost else 'evicted'}; {', '.join(takes_over)}",
    )


def stay(
    state: JobState, removal: Removal, nodes: Sequence[str], because: str, question: str, *, restarts: bool = False
) -> tuple[AnyAction, ...]:
    """The nodes keep their ranks. An attempt that still runs goes on for as long as it can: ending it mends nothing."""
    attempt = state.active
    runs = attempt is not None and attempt.ending is None
    if not restarts and (runs or not removal.has_failed):
        on = f"{because}; training goes on for as long as it can"
        return (Tolerate(node=nodes[0], because=on), AskHuman(because=question))
    restart = Restart(because=f"{because}; restart in place")
    return (restart, AskHuman(because=question)) if removal.is_grave else (restart,)


def restart_and_ask(because: str, question: str) -> tuple[AnyAction, ...]:
    return (Restart(because=because), AskHuman(because=question))


def over_budget(state: JobState, config: LadderConfig, now: float, more: int, *, is_group: bool = False) -> str:
    """Why `more` nodes may not be evicted now; empty when they may."""
    recent = [one for one in state.memory.evictions if one.counted and one.time >= now - config.budget_window_s]
    if is_group and not any(one.is_group for one in recent):
        return ""
    allowed = max(config.budget_nodes, int(config.budget_fraction * len(state.active_nodes())))
    done = sum(len(one.nodes) for one in recent)
    if done + more <= allowed:
        return ""
    return (
        f"the budget of {allowed} node{'s' * (allowed != 1)} in {config.budget_window_s / 60:.0f} min does not allow "
        f"{more} more ({done} evicted in this time)"
    )


# -- size --------------------------------------------------------------------------------------------------------------


def full_size(state: JobState) -> int:
    """Active nodes that the user asked for."""
    assert state.run is not None
    return state.run.seats.most if state.run.seats is not None else len(state.run.nodes) - state.run.standby


def may_shrink(state: JobState, by: int) -> bool:
    """Whether training may go on with so many nodes less."""
    return not why_not_smaller(state, by)


def why_not_smaller(state: JobState, by: int) -> str:
    """Why training cannot go on with so many nodes less; empty: it can."""
    assert state.run is not None
    least = state.run.least
    if least is None:
        return "the job never goes on with fewer nodes (--nnodes MIN:MAX lets it)"
    if len(state.active_nodes()) - by < least:
        return f"{least} nodes is the least that the job may have"
    if not state.stored:
        # with another number of ranks only what the shared store has can be gone on from
        return "nothing is in the shared store that fewer nodes could go on from"
    return ""


def grown(state: JobState, actions: tuple[AnyAction, ...]) -> tuple[AnyAction, ...]:
    """`actions`, and standbys that join in at the start that follows anyway, where the job had become smaller."""
    if not state.stored or not any(isinstance(action, Restart | Evict | Hold) for action in actions):
        return actions
    evictions = [action for action in actions if isinstance(action, Evict)]
    if any(evict.spare for evict in evictions):
        return actions  # nothing starts anew for it
    taken = {new for evict in evictions for new in evict.replacements.values()}
    gone = sum(len(evict.nodes) - len(evict.replacements) for evict in evictions)
    room = full_size(state) - (len(state.active_nodes()) - gone)
    left = {node for evict in evictions for node in evict.nodes}
    joining = tuple(node for node in state.usable_standbys() if node not in taken and node not in left)[: max(room, 0)]
    if not joining:
        return actions
    because = f"{listed(joining)} can take part again: the job goes on with {len(joining)} more, from the shared store"
    return (*actions, Grow(nodes=joining, because=because))


# -- coming back -------------------------------------------------------------------------------------------------------


def stays_out(memory: Memory, event: NodeTested, config: LadderConfig) -> str:
    """Why an evicted node may not come back yet; empty when it may."""
    node = event.node
    out = memory.blocked[node]
    allow = f"`evertrain node allow {node}` lets it back"
    if not event.passed:
        return f"its test failed{f': {event.evidence[0]}' if event.evidence else ''}"
    if out.is_drained:
        return f"it was taken out by the user ({out.because}); {allow}"
    if out.is_certain:
        return f"no test of ours can clear it ({out.because}); {allow}"
    if often := too_often(memory, node, event.time, config):
        return f"{often}; {allow}"
    quiet_s = event.time - _last_seen(memory, node, out.since)
    if quiet_s < config.quiet_s:
        return f"its test passed; quiet for {quiet_s:.0f} of {config.quiet_s:.0f} s"
    return ""


def too_often(memory: Memory, node: str, now: float, config: LadderConfig) -> str:
    """How often it was evicted, where that is too often for it to come back by itself; else empty."""
    window_s = config.human_window_s
    times = sum(node in one.nodes and one.time >= now - window_s for one in memory.evictions)
    return f"evicted {times} times within {window_s / 86400:g} days" if times >= MOST_TIMES else ""


def _last_seen(memory: Memory, node: str, since: float) -> float:
    signs = (*memory.alerts.get(node, ()), *memory.readings.get(node, ()))
    return max([since, *(one.time for one in signs)])


def listed(nodes: Sequence[str]) -> str:
    """As a person reads it."""
    if len(nodes) > 4:
        return f"{', '.join(nodes[:3])} and {len(nodes) - 3} more nodes"
    return " and ".join(nodes)
