"""What had each rank been told to do? The operations of a flight recorder, in one shape for all its layouts."""

from __future__ import annotations

import re
from typing import Any

import msgspec

PEER = re.compile(r"\b(\d+)\s*(?:->|<-)\s*(\d+)")
"""Positions in the group, in the name of a transfer: the own one, and the peer's."""


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """A collective or a transfer that a rank has enqueued."""

    group: str
    """The same on all its members."""
    name: str
    """Without the backend: `all_reduce`, `send 0->3` (positions within the group)."""
    sequence: int
    """Counts the collectives of a group, or its transfers."""
    is_transfer: bool
    is_pending: bool
    shape: tuple[Any, ...] = ()
    """Sizes and types of input and output; empty if not known."""
    is_started: bool = False
    """The device is known to have begun it. A recorder without start events says so of none."""
    on_host: bool = False
    """No device is involved: gloo, mpi."""
    since: float = 0.0
    """When it was called, in seconds since the epoch by the clock of its node; 0 if not known, or done."""

    def __post_init__(self) -> None:
        # what comes over a network has lists in it, which cannot be counted
        if any(isinstance(one, list) for one in self.shape):
            msgspec.structs.force_setattr(self, "shape", _as_tuples(self.shape))

    @property
    def peer(self) -> int | None:
        """Position in the group of the one that sends to or receives from us."""
        found = PEER.search(self.name)
        return int(found[2]) if found else None

    @property
    def position(self) -> int | None:
        """Our own position in the group."""
        found = PEER.search(self.name)
        return int(found[1]) if found else None


def _as_tuples(shape: Any) -> Any:
    return tuple(map(_as_tuples, shape)) if isinstance(shape, list | tuple) else shape


class Group(msgspec.Struct, frozen=True):
    name: str
    description: str = ""
    members: tuple[int, ...] = ()
    """Global ranks by position; empty if the dump does not say."""

    def __str__(self) -> str:
        return f"{self.name} ({self.description})" if self.description else self.name


class Recording(msgspec.Struct, frozen=True, omit_defaults=True):
    """The dump of one rank."""

    rank: int
    count: int
    """Entries in the dump. None at all: the process lives, but could not write what it knows."""
    operations: tuple[Operation, ...] = ()
    """Oldest first. Of those that are done, only the last of each kind in each group: the others are history."""
    is_whole: bool = True
    """False for a summary, which holds the first pending operations only."""
    time: float = 0.0
    """When it was taken, by the clock of its node; 0 if not known."""
    missed: Operation | None = None
    """What it has left out by its own habit: always called at such a place before, with another operation there now,
    and not called since. A program may have its reasons, so this counts only where others wait in that operation."""
    is_new: bool = False
    """What it has called there instead it had never called before."""


class Recordings(msgspec.Struct, frozen=True):
    """The dumps of a job."""

    ranks: dict[int, Recording]
    groups: dict[str, Group]
