"""What is done about an event? The ladder: cheap and certain first, and no eviction without evidence.

    certain machine fault ───────────────────────────▶ evict ──▶ a standby takes over, or the job becomes smaller,
    network alert ──▶ tolerate ──again within 5 min──▶ evict         or waits for nodes, or goes on and asks a human
    odd reading, odd numbers, blind sensor ──▶ tolerate
    a rank that the others wait for ──▶ name it ──hardware evidence, or again at that node──▶ evict
    an attempt has failed ──▶ `decide.failures`: restart, evict, checks, roll-back, replay, stop
                                   │ somebody is asked, or waited for
                                   ▼
                 an answer, a node, or a deadline ──▶ evict, restart, or the next rung
    training has proven itself ──▶ the next failure is a first one again

    evicted ──test passed, quiet──▶ standby        evicted ──`evertrain node allow`──▶ standby
    a new node ──▶ standby                         the user wants a node out ──▶ evict, if it can be done without

`decide(state, event, policy)` is pure: it reads no clock and does no I/O, so every decision can be taken again from the
log (`decide.replay`). What was decided holds because it was written down, never because it would be decided so again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import msgspec

from evertrain.decide import eviction, failures, observed, stragglers
from evertrain.decide.applying import apply
from evertrain.decide.eviction import Removal, listed, role
from evertrain.decide.state import Incident, JobState
from evertrain.model.config import Config
from evertrain.model.decisions import (
    Answered,
    AnyAction,
    AnyEvent,
    AttemptFailed,
    DrainRequested,
    Enlist,
    Evict,
    HardwareReading,
    NetworkAlert,
    NobodyCame,
    NodeAllowed,
    NodeArrived,
    NodeFault,
    NodeReady,
    NodeTested,
    Oddity,
    Policy,
    Proven,
    Restart,
    Rung,
    SensorBlind,
    SlowRank,
    Tolerate,
    WaitForNodes,
    strongest,
)
from evertrain.model.records import Decided


def policy_of(config: Config, sources: Iterable[Rung] = ("roll_back",)) -> Policy:
    """The policy that a configuration means, with those who can be asked."""
    return Policy(
        ladder=config.ladder,
        restart=config.restart,
        code=config.code,
        hang_policy=config.hang.policy,
        sources=tuple(sorted(set(sources))),
    )


def policy_hash(policy: Policy) -> str:
    """Names a policy in the log: the same in every process, another for every other policy."""
    return hashlib.sha256(msgspec.json.encode(policy, order="sorted")).hexdigest()[:16]


def step(state: JobState, event: AnyEvent, policy: Policy) -> tuple[JobState, tuple[AnyAction, ...]]:
    """Decide, and the state after the decision has been written down."""
    decided = decision(state, event, policy, state.policy)
    return apply(state, decided), decided.actions


def decision(
    state: JobState, event: AnyEvent, policy: Policy, policy_hash: str, incident: int | None = None
) -> Decided:
    """The record of a decision, to be written before anything of it is done; `incident` is what it belongs to."""
    actions = decide(state, event, policy)
    return Decided(
        time=event.time,
        incident=incident,
        action=strongest(actions),
        because=actions[0].because if actions else _NOTHING.get(type(event), "nothing waits for this any more"),
        event=event,
        actions=actions,
        policy=policy_hash,
    )


def decide(state: JobState, event: AnyEvent, policy: Policy) -> tuple[AnyAction, ...]:
    """What to do about an event; nothing where nobody waits for it any more."""
    actions = _judge(state, event, policy)
    if state.run is not None and state.run.observe_only:
        return observed.instead(event, actions)
    return actions


_NOTHING: dict[type, str] = {Proven: "training has proven itself: the next failure is a first one again"}


def _judge(state: JobState, event: AnyEvent, policy: Policy) -> tuple[AnyAction, ...]:
    match event:
        case HardwareReading():
            return (Tolerate(node=event.node, because=f"{event.node}: {_told(event)}: noted; alone it proves nothing"),)
        case Oddity():
            follows = "the attempt is ended" if event.is_fatal else "noted; it accuses no machine"
            return (Tolerate(node=event.node, because=f"{event.node}: {_told(event)}: {follows}"),)
        case SensorBlind():
            because = f"{event.node}: {event.sensor} cannot see: it neither accuses nor acquits"
            return (Tolerate(node=event.node, because=because),)
        case NetworkAlert():
            return network_alert(state, event, policy)
        case NodeFault():
            return node_fault(state, event, policy)
        case AttemptFailed():
            return failures.attempt_failed(state, event, policy) if _waits(state, event.incident) else ()
        case SlowRank():
            return stragglers.slow_rank(state, event, policy)
        case Answered():
            return failures.answered(state, event, policy) if _waits(state, event.incident) else ()
        case NobodyCame():
            return nobody_came(state, event, policy) if _waits(state, event.incident) else ()
        case NodeReady():
            return node_ready(state, event, policy)
        case NodeTested():
            return node_tested(state, event, policy)
        case NodeArrived():
            return node_arrived(state, event)
        case NodeAllowed():
            return node_allowed(state, event)
        case DrainRequested():
            return drain_requested(state, event)
        case Proven():
            return ()


# -- something is wrong with a node ------------------------------------------------------------------------------------


def network_alert(state: JobState, event: NetworkAlert, policy: Policy) -> tuple[AnyAction, ...]:
    """One flap heals by itself; two within five minutes do not."""
    config, node = policy.ladder, event.node
    oldest = event.time - config.alert_window_s
    earlier = [seen for seen in state.memory.alerts.get(node, ()) if seen.time >= oldest]
    count = len(earlier) + 1
    within = f"{count} of {config.alerts_to_evict} network alerts within {config.alert_window_s:.0f} s"
    if count < config.alerts_to_evict:
        return (Tolerate(node=node, because=f"{node}: {_told(event)}: {within}"),)
    why = f"{node}: {count} network alerts within {config.alert_window_s:.0f} s ({_told(event)})"
    evidence = tuple(f"{node}: {seen.evidence}" for seen in (*earlier, event))
    return _faulty(state, event, policy, why, evidence)


def node_fault(state: JobState, event: NodeFault, policy: Policy) -> tuple[AnyAction, ...]:
    """Nothing is waited for: it is certain."""
    why = f"{event.node}: {_told(event)}"
    return _faulty(state, event, policy, why, (f"{event.node}: {event.evidence}",))


def _faulty(
    state: JobState, event: NodeFault | NetworkAlert, policy: Policy, why: str, evidence: tuple[str, ...]
) -> tuple[AnyAction, ...]:
    """The node has to go, if it can."""
    node = event.node
    place = role(state, node)
    if place is None:
        return (Tolerate(node=node, because=f"{why}: it is not part of the job"),)
    if place == "standby":
        return (_spare(node, f"{why}: it only waited; training goes on", evidence),)
    if state.closing:
        return (Tolerate(node=node, because=f"{why}: the job is ending anyway"),)
    if used_up := failures.restarts_used_up(state):
        return (Tolerate(node=node, because=f"{why}: training goes on for as long as it can; {used_up}"),)
    nodes: tuple[str, ...] = (node,)
    if (waiting := state.waiting) is not None and (wait := waiting.wait) is not None:
        if node in wait.instead_of:
            return (Tolerate(node=node, because=f"{why}: a node in its place is waited for already"),)
        # one more for the same wait
        nodes, evidence = (*_still_to_go(state, waiting, wait), node), (*wait.evidence, *evidence)
    removal = Removal(nodes=nodes, why=why, evidence=evidence, has_failed=False)
    actions = eviction.remove(state, policy, event.time, removal)
    known = state.memory.faults.get(node)
    is_known = known is not None and known.time >= event.time - policy.ladder.repeat_window_s
    if is_known and not isinstance(actions[0], Evict):
        # another restart would change nothing, and whoever should look has been asked
        because = f"{why}: known, and it still cannot be replaced: training goes on for as long as it can"
        return (Tolerate(node=node, because=because),)
    return eviction.grown(state, actions)


def _spare(node: str, because: str, evidence: tuple[str, ...], *, planned: bool = False) -> Evict:
    return Evict(nodes=(node,), because=because, evidence=evidence, planned=planned, spare=True)


# -- nodes that come and go --------------------------------------------------------------------------------------------


def node_ready(state: JobState, event: NodeReady, policy: Policy) -> tuple[AnyAction, ...]:
    """A standby takes over at once where an incident waits for it; else it waits."""
    if (waiting := state.waiting) is not None and (wait := waiting.wait) is not None:
        return _replaced(state, event, policy, waiting, wait)
    if instead := _awaited(state):
        because = "; ".join(f"{node} is lost: {state.nodes[node].because}" for node in instead)
        removal = Removal(nodes=instead, why=because, evidence=(because,), lost=True)
        return eviction.remove(state, policy, event.time, removal)
    return (Tolerate(node=event.node, because=f"{event.node} has tested itself and waits as a standby"),)


def _replaced(
    state: JobState, event: NodeReady, policy: Policy, incident: Incident, wait: WaitForNodes
) -> tuple[AnyAction, ...]:
    nodes = _still_to_go(state, incident, wait)
    if not nodes:
        because = f"{listed(wait.instead_of)} went or was let off in the meantime: nothing is waited for any more"
        return (Restart(because=because),)
    ready = len(state.usable_standbys())
    if ready < len(nodes):
        because = f"{event.node} is ready: {ready} of {len(nodes)} nodes that incident {incident.number} waits for"
        return (Tolerate(node=event.node, because=because),)
    removal = Removal(nodes=nodes, why=_asked_for(incident, wait), evidence=wait.evidence, may_wait=False)
    return eviction.remove(state, policy, event.time, removal)


def _still_to_go(state: JobState, incident: Incident, wait: WaitForNodes) -> tuple[str, ...]:
    """Of the nodes that others are waited for in place of: those that are there, and that nobody has let off."""
    nodes = eviction.still_active(state, wait.instead_of)
    if incident.opened.source != "signal":
        return nodes
    return tuple(node for node in nodes if node in state.memory.faults)


def _awaited(state: JobState) -> tuple[str, ...]:
    """Nodes that are lost, and that the next start waits for, as many as can be replaced now."""
    if state.active is not None or state.closing:
        return ()
    gone = [node for node, seen in state.nodes.items() if seen.state == "lost"]
    return eviction.still_active(state, gone)[: len(state.usable_standbys())]


def nobody_came(state: JobState, event: NobodyCame, policy: Policy) -> tuple[AnyAction, ...]:
    """The wait is over: what can be replaced is, and training goes on."""
    incident = state.incidents.get(event.incident)
    wait = incident.wait if incident is not None else None
    nodes = _still_to_go(state, incident, wait) if incident is not None and wait is not None else ()
    if incident is None or wait is None or not nodes:
        return (Restart(because=f"incident {event.incident}: nothing is waited for any more: restart in place"),)
    why = f"{_asked_for(incident, wait)}; too few nodes came in {policy.ladder.replace_wait_s:.0f} s"
    removal = Removal(nodes=nodes, why=why, evidence=wait.evidence, may_wait=False)
    return eviction.grown(state, eviction.remove(state, policy, event.time, removal))


def node_arrived(state: JobState, event: NodeArrived) -> tuple[AnyAction, ...]:
    """Whoever comes may be a standby, but for those that were sent away."""
    node, memory = event.node, state.memory
    if node in state.roster:
        return (Tolerate(node=node, because=f"{node} is part of the job already"),)
    if (out := memory.blocked.get(node)) is not None:
        return (Tolerate(node=node, because=f"{node} stays out: {out.because}"),)
    if (known := memory.faults.get(node)) is not None:
        return (Tolerate(node=node, because=f"{node} stays out: {known.evidence}"),)
    return (Enlist(node=node, because=f"{node} has joined: it is tested, and waits as a standby"),)


def node_tested(state: JobState, event: NodeTested, policy: Policy) -> tuple[AnyAction, ...]:
    """An evicted node has earned its way back, or has not."""
    node = event.node
    if node not in state.memory.blocked:
        return (Tolerate(node=node, because=f"{node} is not out of the job"),)
    if why := eviction.stays_out(state.memory, event, policy.ladder):
        return (Tolerate(node=node, because=f"{node} stays out: {why}"),)
    because = f"{node} comes back as a standby: its test passed, and it was quiet for {policy.ladder.quiet_s:.0f} s"
    return (Enlist(node=node, because=because),)


def node_allowed(state: JobState, event: NodeAllowed) -> tuple[AnyAction, ...]:
    """The user knows better."""
    node, memory = event.node, state.memory
    if node in state.roster:
        return (Tolerate(node=node, because=f"{node} is part of the job already; nothing is held against it any more"),)
    if node in state.nodes or node in state.joined:
        return (Enlist(node=node, because=f"{node} comes back as a standby: {event.because}"),)
    if node in memory.blocked or node in memory.faults:
        return (Tolerate(node=node, because=f"{node} may come back when it joins: {event.because}"),)
    return (Tolerate(node=node, because=f"nobody knows {node}"),)


def drain_requested(state: JobState, event: DrainRequested) -> tuple[AnyAction, ...]:
    """No fault: the node goes only where training can do without it."""
    node = event.node
    evidence = (f"asked for by the user: {event.because}",)
    place = role(state, node)
    if place is None:
        return (Tolerate(node=node, because=f"{node} is not part of the job"),)
    if place == "standby":
        return (_spare(node, f"{node} is drained: {event.because}", evidence, planned=True),)
    if state.closing:
        return (Tolerate(node=node, because=f"{node} is not drained: the job is ending anyway"),)
    spare = state.usable_standbys()[:1]
    if not spare and not eviction.may_shrink(state, 1):
        because = f"{node} is not drained: no standby is ready, and the job cannot go on with one node less"
        return (Tolerate(node=node, because=because),)
    takes_over = f"{spare[0]} takes over" if spare else "the job goes on with one node less"
    evict = Evict(
        nodes=(node,),
        replacements=dict(zip((node,), spare, strict=False)),
        evidence=evidence,
        planned=True,
        because=f"{node} is drained: {event.because}; {takes_over}",
    )
    return eviction.grown(state, (evict,))


# -- who waits for what ------------------------------------------------------------------------------------------------


def _waits(state: JobState, number: int) -> bool:
    """Whether the incident still needs a decision; what comes too late changes nothing."""
    incident = state.incidents.get(number)
    return incident is None or (incident.decided is None and incident.closed is None)


def _asked_for(incident: Incident, wait: WaitForNodes) -> str:
    """Why nodes were waited for, without what was said of the wait itself."""
    return f"incident {incident.number} ({incident.opened.cause}): {listed(wait.instead_of)} should go"


def _told(event: NodeFault | NetworkAlert | HardwareReading | Oddity) -> str:
    return event.signal.replace("_", " ")
