"""What do controller and nodes tell each other about copies of checkpoints, on their way to others and to the store?"""

from __future__ import annotations

from typing import Literal

import msgspec

Save = tuple[int, int]
"""Attempt and step: what tells one save of a job from another."""


class Copy(msgspec.Struct, frozen=True, kw_only=True):
    """One complete copy of one rank's checkpoint on this node."""

    rank: int
    step: int
    attempt: int
    world_size: int
    """Ranks among which the state was divided when it was saved."""
    tier: Literal["memory", "disk"]

    @property
    def save(self) -> Save:
        return self.attempt, self.step


class Part(msgspec.Struct, frozen=True):
    """One part of a rank's state. Equal digest and length: equal content, whichever rank it is of."""

    digest: str
    """Of its checksums, in hexadecimal digits."""
    bytes: int


class Pinned(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's copy of a save that must stay, on its own node."""

    rank: int
    attempt: int
    step: int
    world_size: int
    head_bytes: int = 0
    """All of the copy but its data."""
    parts: tuple[Part, ...] | None = None
    """None: not known yet, checksums are being computed."""

    @property
    def save(self) -> Save:
        return self.attempt, self.step


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """What a node keeps of one save for other nodes."""

    attempt: int
    step: int
    world_size: int
    heads: dict[int, tuple[Part, ...]] = {}
    """By rank: the parts that make up its state."""
    parts: tuple[Part, ...] = ()
    """Those that lie here."""

    @property
    def save(self) -> Save:
        return self.attempt, self.step


class Peer(msgspec.Struct, frozen=True):
    """Where another agent gives out copies."""

    node: str
    address: str
    port: int


class Pull(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a node is to keep a copy of."""

    attempt: int
    step: int
    rank: int
    """Whose it is."""
    digest: str = ""
    """Of the part; empty: the rank's head."""
    bytes: int
    peer: Peer

    @property
    def save(self) -> Save:
        return self.attempt, self.step


class Fetch(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's copy of a save that its node needs before the rank can start, and who has pieces of it."""

    rank: int
    attempt: int
    step: int
    peers: tuple[Peer, ...]
    within_s: float

    @property
    def save(self) -> Save:
        return self.attempt, self.step


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """A fetch that came to nothing."""

    rank: int
    attempt: int
    step: int
    because: str

    @property
    def save(self) -> Save:
        return self.attempt, self.step


class RoundOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part in keeping a common step safe."""

    wanted: Save | None = None
    """The first save of this attempt at or after this step is to stay."""
    kept: tuple[Save, ...] = ()
    """... and these saves, where they are."""
    pulls: tuple[Pull, ...] = ()
    backups: tuple[Save, ...] = ()
    """Saves of which what is kept for other nodes is still needed."""
    disk: Save | None = None
    """To be written to the node's disk."""
    pinned: Save | None = None
    """Where it is on disk, it stays there."""
    bytes_per_s: int = 1 << 30
    """At which this node gives out what others pull."""


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the script wants of the shared store; it stands in the directory of each of its checkpoints."""

    url: str
    every_s: float = 1800.0
    every_steps: int | None = None
    """In place of `every_s`."""


class UploadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part in bringing a step from the nodes' disks to the store."""

    name: str
    """No other upload's."""
    attempt: int
    step: int
    folder: str
    """Of the step in the store."""
    world_size: int
    writers: int
    """So many nodes write."""
    finish: bool = False
    """All have written; this node is to say what lies where."""


class UploadReport(msgspec.Struct, frozen=True, kw_only=True):
    """What has come of it on one node."""

    name: str
    state: Literal["running", "written", "finished", "failed"]
    because: str = ""
    """Why it failed."""
