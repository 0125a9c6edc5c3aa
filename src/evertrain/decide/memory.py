"""What does the ladder remember? What was seen of nodes, what was evicted, and how far a chain of failures has climbed.

`evolve(memory, event, actions)` follows the log: the actions that were written down hold, whatever the policy of today
would say. Only what can still matter is kept, so a memory does not grow with the age of a job.
"""

from __future__ import annotations

import msgspec

from evertrain.model.decisions import (
    AnyAction,
    AnyEvent,
    HardwareReading,
    NetworkAlert,
    Rung,
)


class Eviction(msgspec.Struct, frozen=True, kw_only=True):
    time: float
    nodes: tuple[str, ...]
    incident: int | None
    counted: bool
    """By the budget: neither lost nodes nor those that the user took out are."""


class Blocked(msgspec.Struct, frozen=True, kw_only=True):
    """Why a node is out of the job, and on which way it may come back."""

    since: float
    because: str
    is_certain: bool
    """A machine fault that no test of ours can clear; it returns by `evertrain node allow` only."""
    times: int = 1
    """So often evicted within the window that asks for a human."""
    is_drained: bool = False
    """The user took it out: it stays out until allowed."""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """A failure that may come again."""

    time: float
    incident: int
    signature: str
    """Of what went wrong, in terms that a repeat shares."""
    nodes: tuple[str, ...] = ()
    source: str = "exit"


class Chain(msgspec.Struct, frozen=True, kw_only=True):
    """Failures between which training has not proven itself."""

    incidents: tuple[int, ...] = ()
    asked: tuple[Rung, ...] = ()
    """Who was asked since it began."""
    reattempts: int = 0
    holds: int = 0


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    alerts: dict[str, tuple[NetworkAlert, ...]] = {}
    """By node, those that still count."""
    readings: dict[str, tuple[HardwareReading, ...]] = {}
    evictions: tuple[Eviction, ...] = ()
    blocked: dict[str, Blocked] = {}
    past: tuple[Past, ...] = ()
    chain: Chain = Chain()
    hold_until: float = 0.0


def evolve(memory: Memory, event: AnyEvent, actions: tuple[AnyAction, ...]) -> Memory:
    """What is remembered after one more decision."""
    raise NotImplementedError
