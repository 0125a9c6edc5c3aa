"""What do agents say of the collectives of their ranks, and what follows from it?

    Pulse      once a second, of few ranks ──▶ is anything wrong?          (`detect.collectives`)
    RankTrace  of all ranks, when something is ──▶ who has begun it?       (`locate.collectives`) ──▶ RootCause

Clocks of nodes differ. So all that is compared here are durations, each by one rank's clock, and the order in which a
group's operations are numbered; the times of two ranks are never subtracted.
"""

from __future__ import annotations

from typing import Literal

import msgspec

ANYBODY = -2
"""As a peer: whoever sends first."""
NOBODY = -1


class Communicator(msgspec.Struct, frozen=True, array_like=True):
    id: str
    """The same on all members, another one in each attempt."""
    name: str
    description: str = ""
    members: tuple[int, ...] = ()
    """Global ranks by position."""


# -- watching ----------------------------------------------------------------------------------------------------------


class Watch(msgspec.Struct, frozen=True):
    """Ranks of one node whose seconds are wanted."""

    attempt: int
    ranks: tuple[int, ...]


class Stream(msgspec.Struct, frozen=True, array_like=True):
    """Operations of one kind and size in one communicator that have ended within a second."""

    comm: str
    op: str
    bucket: int
    """Of the bytes, the power of two."""
    ended: int
    interval_s: float
    """Between two ends, on average; the first is counted from the last one of an earlier second."""


class Pulse(msgspec.Struct, frozen=True, kw_only=True):
    """One second of one rank."""

    rank: int
    attempt: int
    number: int
    """Grows from one second of a rank to the next, also where its agent was started anew."""
    streams: tuple[Stream, ...] = ()
    longest_s: float = 0.0
    """The longest time without an end of any operation, of those that this second has ended."""
    waited_s: float = 0.0
    """The longest part of such a time in which it waited for what then ended."""
    still_s: float | None = None
    """At its end, since the last end of any operation; None: there was none yet."""
    in_flight: bool = False
    """It waits for an operation; what is only posted does not count."""
    phase: str = ""
    """That the script has declared."""


# -- looking -----------------------------------------------------------------------------------------------------------


class Call(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """An operation of a rank that has not ended."""

    comm: str
    op: str
    seq: int
    """Of collectives by communicator; of point-to-point by communicator, source and destination."""
    peer: int = NOBODY
    seconds: float = 0.0
    """Since it was posted, or since the rank is blocked in it."""
    is_sure: bool = True
    """Of what a rank is blocked in: it has said so. Otherwise it is the oldest that it has posted, and it does nothing:
    C++ waits without saying so."""


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """How far a rank has come in a communicator: with collectives, or with what it sends to a peer or gets from it."""

    comm: str
    posted: int
    ended: int
    source: int = NOBODY
    target: int = NOBODY


class Kind(msgspec.Struct, frozen=True, array_like=True):
    """Operations that can be compared."""

    comm: str
    op: str
    bucket: int
    peer: int = NOBODY


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Operations that have ended, oldest first, by columns. Where there are many, those whose number can be divided by
    a power of two, which is the same choice on all ranks."""

    kind: tuple[int, ...] = ()
    """Place in `RankTrace.kinds`."""
    seq: tuple[int, ...] = ()
    took_s: tuple[float, ...] = ()
    """By the rank's own clock: of a collective since it was posted, of point-to-point since the rank waited for it."""
    own_s: tuple[float, ...] = ()
    """The rank was blocked in nothing for so long before."""
    ago_s: tuple[float, ...] = ()
    """It ended so long before the look."""


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process over some time."""

    seconds: float = 0.0
    samples: int = 0
    stopped: int = 0
    """Samples in which it was stopped (state T),"""
    frozen: int = 0
    """... its cgroup was frozen,"""
    uninterruptible: int = 0
    """... it slept in the kernel (state D),"""
    carrier_down: int = 0
    """... its network interface had no carrier."""
    cpu_s: float = 0.0
    delay_s: float = 0.0
    """Threads were ready and did not run, all of them together."""
    throttled_s: float = 0.0
    """Its cgroup's quota held it."""
    wire_bytes: int = 0
    """That interfaces of its network sent and received, whoever they are of."""


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank sends to a peer, and has not read from it, over some time in which operations were in flight."""

    peer: int
    inode: int = 0
    """Of one whose peer this node does not know."""
    seconds: float = 0.0
    sent: int = 0
    """Bytes, with those sent again."""
    acked: int = 0
    resent: int = 0
    """Segments; without any, what is not acknowledged is only on its way."""
    notsent: int = 0
    """Bytes that wait in the socket, on average."""
    busy: float = 0.0
    """Part of the time in which there was something to send;"""
    rwnd: float = 0.0
    """... and in which the receiver had no room."""
    rqueue: int = 0
    """Received and not read, at the end."""
    backoff: int = 0
    """The most time-outs in a row."""


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of one rank's time, cut where operations end."""

    seconds: float = 0.0
    ended: int = 0
    """Operations."""
    own_s: float = 0.0
    """Blocked in nothing;"""
    between_s: float = 0.0
    """... of that around the ends of steps: between the last operation of one and the first of the next."""
    operations: Ended = Ended()
    host: Host | None = None
    """None: it was not seen."""
    flows: tuple[Flow, ...] = ()


ProcessState = Literal["", "stopped", "frozen", "uninterruptible", "ended"]


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of one rank say."""

    rank: int
    node: str
    blind: str = ""
    """Why nothing can be said of it."""
    state: ProcessState = ""
    """As the kernel saw it last; empty: it runs or sleeps as any other."""
    blocked: Call | None = None
    """None: it is blocked in nothing, whatever it has in flight."""
    own_s: float = 0.0
    """For so long it is blocked in nothing, if it is."""
    still_s: float | None = None
    """Since an operation ended; None: none is known that has."""
    is_between: bool = False
    """It has posted nothing since its last step."""
    in_flight: tuple[Call, ...] = ()
    progress: tuple[Progress, ...] = ()
    kinds: tuple[Kind, ...] = ()
    now: Period = Period()
    before: Period = Period()
    """The time before that."""


class Ends(msgspec.Struct, frozen=True, array_like=True):
    """A connection of a rank, by its addresses."""

    rank: int
    inode: int
    own: str
    peer: str


class NodeTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent has read for one look."""

    number: int
    attempt: int
    node: str
    time: float
    """Of the look, by the agent's clock."""
    ranks: tuple[RankTrace, ...] = ()
    communicators: tuple[Communicator, ...] = ()
    ends: tuple[Ends, ...] = ()
    """Of connections, from which it follows who is at the other end of one between nodes."""
    blind: tuple[str, ...] = ()


# -- the answer --------------------------------------------------------------------------------------------------------

Symptom = Literal["stuck", "slow"]

Component = Literal[
    "compute",  # the rank itself computes for longer: its accelerator, its processor, its program
    "host",  # its process gets no processor, or is stopped
    "sender",  # what it sends does not get out: its network interface
    "receiver",  # it does not read what has come
    "network",  # between the two
    "outside",  # it stands outside of all collectives and does nothing
    "storage",  # it waits for data, or for storage
    "none",  # communication is not the cause
]


class Step(msgspec.Struct, frozen=True, array_like=True):
    """Of the path along which one waits for the other: a rank, what it does, and for whom it waits there."""

    rank: int
    node: str
    what: str
    waits_for: tuple[int, ...] = ()


class RootCause(msgspec.Struct, frozen=True, kw_only=True):
    """Who has begun it, and what is the matter there."""

    symptom: Symptom
    component: Component
    ranks: tuple[int, ...] = ()
    """The suspects; empty where nobody can be named."""
    nodes: tuple[str, ...] = ()
    link: tuple[int, int] | None = None
    """Sender and receiver, where only one connection is odd: of a pair that is named it cannot be seen which it is."""
    first_s: float | None = None
    """So long before the look it began, by the clock of the first suspect."""
    time: float | None = None
    """The same as a time, by the controller's clock;"""
    bound_s: float = 0.0
    """... as far as clocks go right by so much."""
    confidence: float = 0.0
    evidence: tuple[str, ...] = ()
    path: tuple[Step, ...] = ()
    blind: tuple[str, ...] = ()

    @property
    def is_pair(self) -> bool:
        """It lies between two ranks, and accuses neither."""
        return self.link is not None and len(self.ranks) > 1

    @property
    def is_named(self) -> bool:
        return bool(self.ranks) and self.component != "none"
