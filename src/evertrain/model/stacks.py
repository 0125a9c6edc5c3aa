"""Where do the processes of a job stand? What agents see of them, and who is to blame by that.

CaptureOrder ──▶ every agent looks ──▶ NodeCapture, grouped on the node ──▶ merged by the controller ──▶ Located
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evertrain.model.activity import RankActivity
from evertrain.model.findings import Category
from evertrain.model.recording import Group, Recording

PlaceKind = Literal[
    "collective", "transfer", "rendezvous", "device",
    "loader", "pinning", "storage", "checkpoint", "lock", "compiling", "collecting", "exiting",
    "elsewhere", "unreadable",
]  # fmt: skip
"""`loader` waits for worker processes; `pinning` for a thread of its own process that hands their batches on."""

ProcessKind = Literal["trainer", "loader", "checkpoint", "helper"]
"""A rank itself; below it a data loader's worker, a checkpoint's writer, anything else."""


class Frame(msgspec.Struct, frozen=True):
    function: str
    file: str = ""
    """Source file, or the library of a native frame; empty if unknown."""
    line: int | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line is not None else self.file
        return f"{self.function} ({place})" if place else self.function


class Thread(msgspec.Struct, frozen=True):
    frames: tuple[Frame, ...] = ()
    """Innermost first."""
    name: str = ""
    is_main: bool = False
    state: Literal["active", "idle", ""] = ""
    """As py-spy saw it; empty where the form does not say."""
    holds_gil: bool = False


class Dump(msgspec.Struct, frozen=True):
    """One process."""

    threads: tuple[Thread, ...] = ()
    pid: int | None = None
    command: str = ""
    failure: str = ""
    """Why there are no threads."""

    @property
    def main(self) -> Thread | None:
        return next((one for one in self.threads if one.is_main), self.threads[0] if self.threads else None)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One look at one process."""

    rank: int
    """Whose process tree it belongs to."""
    pid: int
    kind: ProcessKind
    state: Literal["", "stopped", "uninterruptible", "ended"] = ""
    waits_in: str = ""
    dump: Dump


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One process of a rank."""

    rank: int
    pid: int
    looks: int = 1
    """In so many looks of the capture it stood there."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """One place in the program, and the processes that stand there: they have the same stack but for line numbers."""

    kind: ProcessKind
    state: Literal["", "stopped", "uninterruptible", "ended"] = ""
    """As the kernel sees the process; empty: it runs or sleeps as any other."""
    place: PlaceKind
    frames: tuple[Frame, ...] = ()
    """Of the thread that decides, innermost first, with the line numbers of one member."""
    is_idle: bool = False
    """It waits in the operating system."""
    waits_in: str = ""
    """Where in the kernel, as far as that can be seen: a function, or a system call's name."""
    is_held: bool = False
    """The thread that decides is in native code, asleep perhaps, and keeps the interpreter (GIL) from all others."""
    failure: str = ""
    """Why the stack could not be read."""
    members: tuple[Member, ...]


class CaptureOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Look at the processes of an attempt, now, and send what is seen."""

    number: int
    attempt: int
    looks: int = 1
    """How often each process is looked at;"""
    every_s: float = 0.0
    """... and how long after each other."""
    recorder: bool = True
    """The flight recorder is read, too."""
    deep: tuple[int, ...] = ()
    """Ranks that are stopped or blamed already: native frames may be taken, which stops a process for longer."""
    dumps: bool = False
    """What the flight recorders hold is sent as it is, too, after the capture (`RecorderDumps`)."""


class NodeCapture(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent saw. Its processes are those of ranks of the attempt, with all that they have started."""

    number: int
    """Of the order."""
    attempt: int
    node: str
    time: float
    """When the last look began, by the agent's clock."""
    positions: tuple[Position, ...] = ()
    activities: tuple[RankActivity, ...] = ()
    """Of all ranks here, from their pages."""
    groups: tuple[Group, ...] = ()
    """Process groups that the ranks here belong to, by the names they have in `RankActivity` and in the recorder."""
    recordings: tuple[Recording, ...] = ()
    blind: tuple[str, ...] = ()
    """What could not be seen, and why, one line each."""


class RecorderDumps(msgspec.Struct, frozen=True, kw_only=True):
    """The flight recorders of one node's ranks, as torch wrote them."""

    node: str
    dumps: dict[int, bytes] = {}
    """By rank, JSON compressed with gzip."""


LocatedKind = Literal[
    "stopped",  # SIGSTOP, a debugger
    "uninterruptible",  # sleeps in the kernel: dead disk, mount or driver
    "loader",  # a data loader delivers nothing
    "checkpoint",  # a save does not end
    "storage",  # inside file access
    "held",  # its interpreter is held (GIL) in native code
    "loop",  # computes without end outside of all operations
    "outside",  # sleeps outside of all operations
    "skipped",  # has left out an operation that the others wait in
    "order",  # calls operations in another order than the others
    "mismatch",  # same operation, other sizes or types
    "deadlock",  # groups wait for each other in a circle
    "device",  # waits for its device while peers are further
    "network",  # all are there, and nothing moves
    "slow",  # computes while the others wait for it
    "unknown",  # not enough evidence
]


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """Who or what the others wait for, by stacks, operations and recorders together."""

    kind: LocatedKind
    ranks: tuple[int, ...] = ()
    """The suspects; empty where nobody can be named."""
    nodes: tuple[str, ...] = ()
    """Theirs."""
    group: tuple[int, ...] = ()
    """The parallel group that the odd ones share, where the wait graph could not narrow it down."""
    group_name: str = ""
    eviction: tuple[str, ...] = ()
    """Nodes to take out if the ladder decides to; bounded. Empty for what is no machine's fault."""
    category: Category = "unknown"
    confidence: float = 0.0
    evidence: tuple[str, ...] = ()
    captures: tuple[int, ...] = ()
    """By their numbers, what this follows from."""

    @property
    def is_software(self) -> bool:
        """Another node would not help: the program, its data or the storage behind it."""
        return self.kind in ("loader", "checkpoint", "storage", "skipped", "order", "mismatch", "deadlock", "loop")
