"""What does the ladder remember? What was seen of nodes, what was evicted, and how far a chain of failures has climbed.

`evolve(memory, event, actions)` follows the log: the actions that were written down hold, whatever the policy of today
would say. How long something counts is the policy's to say, so what is kept here is bounded by number (the newest), and
`decide.ladder` looks at the times. A memory does not grow with the age of a job.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from evertrain.model.decisions import (
    Answered,
    AnyAction,
    AnyEvent,
    AskHuman,
    AttemptFailed,
    Enlist,
    Evict,
    HardwareReading,
    Hold,
    Inspect,
    NetworkAlert,
    NodeAllowed,
    NodeFault,
    Proven,
    Replay,
    Restart,
    RollBack,
    Rung,
    SensorBlind,
    SlowRank,
    Tolerate,
    WaitForNodes,
)

MOST_SIGNS = 32
"""Of one node, and of one kind."""
MOST_NODES = 4096
"""Of which anything is remembered; those that were heard of last."""
MOST_EVICTIONS = 1024
MOST_PAST = 256
MOST_CHAIN = 64

_RUNGS: dict[type, Rung] = {Inspect: "inspect", RollBack: "roll_back", Replay: "replay"}
Kept = TypeVar("Kept")


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes that were taken out because of a fault."""

    time: float
    nodes: tuple[str, ...]
    incident: int | None
    counted: bool
    """By the budget: neither nodes that were lost nor those that only waited are."""
    is_group: bool = False
    """A whole parallel group, of which nothing could say who in it was to blame."""


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node is out of the job, and on which way it may come back."""

    since: float
    because: str
    is_certain: bool
    """A machine fault that no test of ours can clear; it returns by `evertrain node allow` only."""
    is_drained: bool = False
    """The user took it out: it stays out until allowed."""


NO_HARDWARE = frozenset({"data", "storage", "hang_dataloader", "user_code", "user_config", "framework_bug"})
"""A hang for one of these reasons never costs a node its place, nor does it count against the node later."""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that may come again."""

    time: float
    incident: int
    signature: str
    """Of what went wrong, in terms that a repeat shares."""
    nodes: tuple[str, ...] = ()
    """Those that it named and that have not been out of the job since."""
    source: str = "exit"
    is_damage: bool = False


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Failures between which training has not proven itself."""

    incidents: tuple[int, ...] = ()
    asked: tuple[Rung, ...] = ()
    """Who was asked since it began."""
    reattempts: int = 0
    """Restarts after the first failure."""
    holds: int = 0
    evictions: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    alerts: dict[str, tuple[NetworkAlert, ...]] = {}
    """By node, oldest first; none from before it was last evicted."""
    readings: dict[str, tuple[HardwareReading, ...]] = {}
    faults: dict[str, NodeFault | NetworkAlert] = {}
    """For which a node was to be evicted and could not be; the newest of each."""
    evictions: tuple[Eviction, ...] = ()
    blocked: dict[str, Blocked] = {}
    past: tuple[Past, ...] = ()
    chain: Chain = Chain()
    hold_until: float = 0.0


def signature(event: AttemptFailed) -> str:
    """What makes two failures the same one; empty where nothing is known of it."""
    if event.signature:
        return f"{event.signature} at step {event.step}"
    if not event.nodes:
        return ""
    return f"{event.source}: {event.cause} on {', '.join(event.nodes)}"


def evolve(memory: Memory, event: AnyEvent, actions: tuple[AnyAction, ...], incident: int | None = None) -> Memory:
    """What is remembered after one more decision."""
    memory = _seen(memory, event)
    if isinstance(event, NetworkAlert) and any(isinstance(action, AskHuman | WaitForNodes) for action in actions):
        memory = replace(memory, faults=_put(memory.faults, event.node, event))
    for action in actions:
        if type(action) is not Tolerate:
            memory = _done(memory, event, action, incident)
    return memory


def with_other_code(memory: Memory) -> Memory:
    """The user has changed the code: that an older change was undone says nothing about this one."""
    chain = memory.chain
    return replace(memory, chain=replace(chain, asked=tuple(rung for rung in chain.asked if rung != "roll_back")))


# -- what was seen -----------------------------------------------------------------------------------------------------


def _seen(memory: Memory, event: AnyEvent) -> Memory:
    match event:
        case HardwareReading():
            return replace(memory, readings=_with_sign(memory.readings, event.node, event))
        case NetworkAlert():
            return replace(memory, alerts=_with_sign(memory.alerts, event.node, event))
        case SensorBlind():
            return memory
        case NodeFault():
            return _faulty(memory, event)
        case AttemptFailed():
            return _failed(memory, event)
        case SlowRank():
            past = Past(time=event.time, incident=event.incident, signature="", nodes=event.nodes, source="slow")
            return replace(memory, past=(*memory.past[1 - MOST_PAST :], past))
        case Proven():
            newest = memory.chain.incidents[-1:]
            return replace(memory, chain=Chain(), hold_until=0.0) if newest == (event.incident,) else memory
        case NodeAllowed():
            return _cleared(memory, event.node)
    return memory


def _with_sign(signs: dict[str, tuple[Kept, ...]], node: str, sign: Kept) -> dict[str, tuple[Kept, ...]]:
    return _put(signs, node, (*signs.get(node, ())[1 - MOST_SIGNS :], sign))


def _put(table: dict[str, Kept], node: str, value: Kept) -> dict[str, Kept]:
    """With one more; nodes that were not heard of for the longest time are forgotten first."""
    table = table.copy()
    table[node] = value
    if len(table) > MOST_NODES:
        del table[min(table, key=lambda name: _newest(table[name]))]
    return table


def _newest(kept: Any) -> float:
    newest = kept[-1] if isinstance(kept, tuple) else kept
    return newest.since if isinstance(newest, Blocked) else float(newest.time)


def _faulty(memory: Memory, fault: NodeFault) -> Memory:
    out = memory.blocked.get(fault.node)
    if out is None:
        return replace(memory, faults=_put(memory.faults, fault.node, fault))
    # it is out already; but now no test of ours will do
    certain = replace(out, is_certain=True, because=f"{out.because}; since then: {fault.evidence}")
    return memory if out.is_certain else replace(memory, blocked={**memory.blocked, fault.node: certain})


def _failed(memory: Memory, event: AttemptFailed) -> Memory:
    is_software = event.source == "hang" and event.category in NO_HARDWARE
    past = Past(
        time=event.time,
        incident=event.incident,
        signature=signature(event),
        # of a whole group nobody was named, and a program that hangs is nothing that a machine has done before
        nodes=() if event.is_group or is_software else event.nodes,
        source=event.source,
        is_damage=event.is_damage,
    )
    return _in_chain(replace(memory, past=(*memory.past[1 - MOST_PAST :], past)), event.incident)


def _in_chain(memory: Memory, incident: int | None) -> Memory:
    chain = memory.chain
    if incident is None or incident in chain.incidents:
        return memory
    return replace(memory, chain=replace(chain, incidents=(*chain.incidents[1 - MOST_CHAIN :], incident)))


# -- what was done -----------------------------------------------------------------------------------------------------


def _done(memory: Memory, event: AnyEvent, action: AnyAction, incident: int | None) -> Memory:
    chain = memory.chain
    match action:
        case Inspect() | RollBack() | Replay():
            rung = _RUNGS[type(action)]
            return memory if rung in chain.asked else replace(memory, chain=replace(chain, asked=(*chain.asked, rung)))
        case Restart():
            again = isinstance(event, Answered) or (isinstance(event, AttemptFailed) and len(chain.incidents) > 1)
            return replace(memory, chain=replace(chain, reattempts=chain.reattempts + again))
        case Hold():
            return replace(memory, hold_until=action.until, chain=replace(chain, holds=chain.holds + 1))
        case Evict():
            return _evicted(memory, event, action, incident)
        case Enlist():
            return _cleared(memory, action.node)
    return memory


def _evicted(memory: Memory, event: AnyEvent, evict: Evict, incident: int | None) -> Memory:
    gone = frozenset(evict.nodes)
    evictions = memory.evictions
    if not evict.planned:
        eviction = Eviction(
            time=event.time,
            nodes=evict.nodes,
            incident=incident,
            counted=not (evict.lost or evict.spare),
            is_group=isinstance(event, AttemptFailed | SlowRank) and event.is_group and not evict.lost,
        )
        evictions = (*evictions[1 - MOST_EVICTIONS :], eviction)
    blocked = memory.blocked
    for node in evict.nodes:
        why = Blocked(
            since=event.time,
            because=evict.because,
            is_certain=isinstance(memory.faults.get(node), NodeFault) and not evict.planned,
            is_drained=evict.planned,
        )
        blocked = _put(blocked, node, why)
    if not evict.spare and not evict.planned:
        memory = _in_chain(memory, incident)
        memory = replace(memory, chain=replace(memory.chain, evictions=memory.chain.evictions + 1))
    return replace(_clean_slate(memory, gone), evictions=evictions, blocked=blocked)


def _cleared(memory: Memory, node: str) -> Memory:
    """It takes part again, and nothing from before is held against it."""
    nodes = frozenset((node,))
    return replace(_clean_slate(memory, nodes), blocked=_without(memory.blocked, nodes))


def _clean_slate(memory: Memory, nodes: frozenset[str]) -> Memory:
    return replace(
        memory,
        alerts=_without(memory.alerts, nodes),
        readings=_without(memory.readings, nodes),
        faults=_without(memory.faults, nodes),
        past=tuple(
            one if nodes.isdisjoint(one.nodes) else replace(one, nodes=tuple(n for n in one.nodes if n not in nodes))
            for one in memory.past
        ),
    )


def _without(table: dict[str, Kept], nodes: frozenset[str]) -> dict[str, Kept]:
    if nodes.isdisjoint(table):
        return table
    table = table.copy()
    for node in nodes:
        table.pop(node, None)
    return table
