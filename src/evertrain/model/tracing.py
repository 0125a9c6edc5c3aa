"""How far is each flow of a collective at one moment, and what does it wait for?

The same for what NCCL's proxies count in chunks and for what a TCP connection shows. All ranks are global.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Head = Literal["none", "send_gpu", "send_peer", "send_wait", "recv_wait", "recv_flush", "recv_gpu"]
"""What the oldest open chunk waits for. To send: data from this rank; a receiver who is ready; its way through the
network. To receive: data from the network; its way to the GPU; a GPU (or a process) that takes it."""
Side = Literal["send", "receive"]
Transport = Literal["ib", "socket"]
"""What `done` means to a sender: the data is at the receiver's; or the kernel has taken it over."""


class FlowState(msgspec.Struct, frozen=True, kw_only=True):
    """One side of one channel of an operation, as one rank sees it."""

    rank: int
    peer: int
    comm: int
    channel: int = 0
    side: Side
    transport: Transport = "ib"
    op: str = ""
    order: int = 0
    """Among the operations of the communicator on this rank."""
    is_ring: bool = False
    """The first chunk that a rank sends needs nothing but its own data."""
    head: Head = "none"
    stuck_s: float = 0.0
    """Since a counter has changed."""
    total: int | None = None
    """Chunks; None, here and below: it was not told."""
    ready: int | None = None
    """To send: given by the GPU. To receive: asked for."""
    transmitted: int | None = None
    """Handed to the network; or, received, to the GPU."""
    done: int | None = None
    """To send: confirmed by the network, in the meaning of the transport."""
    received: int | None = None
    consumed: int | None = None
    """By the GPU."""


class OperationState(msgspec.Struct, frozen=True, kw_only=True):
    """An operation in flight, as one rank sees the whole of it."""

    rank: int
    comm: int
    order: int
    op: str = ""
    seq: int = 0
    channels: int | None = None
    begun: int | None = None
    """Channels whose kernel has begun; None: kernels are not traced."""
    ended: int | None = None
    stuck_s: float = 0.0


class ThreadState(msgspec.Struct, frozen=True, kw_only=True):
    """A thread that serves flows; in good health it spins while it waits."""

    rank: int
    ran: float
    """Part of the time that it ran,"""
    delayed: float = 0.0
    """... and that it was ready and was not let run."""
    state: str = "R"
    """Letter of the kernel's; X: it is gone."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is in flight at one moment."""

    t_s: float
    flows: tuple[FlowState, ...] = ()
    operations: tuple[OperationState, ...] = ()
    threads: tuple[ThreadState, ...] = ()
    members: dict[int, tuple[int, ...]] = {}
    """Ranks of each communicator, where they are known."""


HeadComponent = Literal["host", "gpu", "proxy", "pcie", "network", "none"]
"""The rank has not launched it; its GPU; its proxy thread; the way between its network interface and its GPU; the
network between two ranks, or their interfaces; nobody can be named."""


class HeadCause(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a collective up."""

    component: HeadComponent
    ranks: tuple[int, ...] = ()
    """The suspects; of a link first the sender."""
    link: tuple[int, int] | None = None
    channels: tuple[int, ...] = ()
    """Where only some channels are held up: it is a path, not the rank."""
    confidence: float = 0.0
    first_s: float | None = None
    """Of the first picture that shows it."""
    evidence: tuple[str, ...] = ()
    path: tuple[int, ...] = ()
    """From a rank that waits, along the ranks that are waited for, to the suspect."""
