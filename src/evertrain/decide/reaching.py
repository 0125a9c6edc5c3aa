"""Is a node cut off from the others? What several nodes say together, where each alone accuses neither end.

Each node tries the next few in a ring in which all have their places by a hash of their names: whoever falls silent has
several witnesses, nobody has more work than the others, and a node more or less moves a few only. A node is cut off
when two others cannot reach it and it, whom we can still hear, reaches none of those that it tries. One alone may have
lost its port (`nic_down`); several at once have something in common (`switch_down`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from evertrain.decide import starting
from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.model import records as r
from evertrain.model.copies import Peer

TRIED = 3
"""By each node."""
WITNESSES = 2
KNOWN_S = 600.0
"""A node of which a network alert is no older is known to have trouble; it is one event."""


def tried(state: JobState) -> dict[str, tuple[str, ...]]:
    """By node, those that it should try."""
    if state.ended is not None or len(state.roster) <= WITNESSES:
        return {}
    return _tried(state.roster)


def peers(picture: Picture, nodes: Iterable[str]) -> tuple[Peer, ...]:
    """Where these are; nobody on one machine, where no network lies between."""
    known = (starting.peer_of(picture, node) for node in nodes)
    return tuple(peer for peer in known if peer is not None and not peer.address.startswith("127."))


def look(state: JobState, picture: Picture, now: float) -> list[r.SignalRaised]:
    """An alert about each node that is cut off and not known to be."""
    missed: dict[str, set[str]] = {}
    for node in state.roster:
        report = picture.report(node)
        for other in report.unreachable if report is not None and picture.connected(node) else ():
            missed.setdefault(other, set()).add(node)
    if not missed:
        return []
    missed = {node: by for node, by in missed.items() if len(by) >= WITNESSES}
    suspects = missed.keys() & frozenset(state.roster)
    # a switch may take a thousand along, and this is asked in every turn
    of_each = tried(state) if suspects else {}
    alone: dict[str, list[str]] = {}
    for node in sorted(suspects):
        witnesses = sorted(missed[node] - suspects)
        if len(witnesses) >= WITNESSES and _reaches_nobody(picture, node, of_each.get(node, ()), suspects):
            alone[node] = witnesses
    signal = "switch_down" if len(alone) > 1 else "nic_down"
    return [
        r.SignalRaised(
            time=now,
            node=node,
            signal=signal,
            evidence=f"{node} is cut off: {' and '.join(witnesses)} cannot reach it, and it reaches nobody",
            key=f"peers:{node}:{now:.0f}",
        )
        for node, witnesses in alone.items()
        if not _is_known(state, node, now)
    ]


def _reaches_nobody(picture: Picture, node: str, tries: tuple[str, ...], suspects: set[str]) -> bool:
    """It says so itself, and of healthy nodes: who is silent may be gone, which is not ours to judge."""
    report = picture.report(node)
    if report is None or not picture.connected(node):
        return False
    others = [other for other in tries if other not in suspects]
    return bool(others) and all(other in report.unreachable for other in others)


def _is_known(state: JobState, node: str, now: float) -> bool:
    alerts = state.memory.alerts.get(node, ())
    fault = state.memory.faults.get(node)
    return fault is not None or (bool(alerts) and now - alerts[-1].time < KNOWN_S)


@lru_cache(maxsize=4)
def _tried(nodes: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    ring = sorted(nodes, key=lambda node: hashlib.sha256(node.encode()).digest())
    number = min(TRIED, len(ring) - 1)
    return {
        node: tuple(ring[(place + ahead) % len(ring)] for ahead in range(1, number + 1))
        for place, node in enumerate(ring)
    }
