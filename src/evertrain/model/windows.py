"""What do agents send when somebody wants to see the last seconds of all trace rings? Whole records, as they are.

An agent's part is packed once, and only whoever looks at it unpacks it: the controller hands it on.
"""

from __future__ import annotations

import zlib
from typing import TypeVar

import msgspec

from evertrain.model.collectives import Ends as Ends
from evertrain.model.collectives import NodeTrace

Part = TypeVar("Part")

MOST_BYTES = 1 << 30
"""Of one node, unpacked."""


class WindowOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Read the rings of an attempt, and send what was written in the last seconds."""

    number: int
    attempt: int
    seconds: float
    brief: bool = False
    """Only how far each rank has come: what is so now, and the newest operations of each communicator."""
    now_s: float = 0.0
    """Above 0: not the records are wanted but what they come to (`model.collectives.NodeTrace`), of so long until now
    and of `seconds` before that."""
    most: int = 256
    """So many operations of a rank are told one by one, of each of the two."""
    writers: tuple[str, ...] = ()
    """Only rings of these are wanted; empty: all."""


class RingWindow(msgspec.Struct, frozen=True, kw_only=True):
    """What one ring holds."""

    rank: int
    writer: str
    pid: int = 0
    """Of a writer that has one in its file's name."""
    monotonic_ns: int = 0
    """One moment by the node's monotonic clock ..."""
    wall_ns: int = 0
    """... and by its wall clock."""
    last: int = 0
    """Number of the newest record."""
    lost: int = 0
    table: bytes = b""
    """Places in use, 128 bytes each."""
    records: bytes = b""
    problem: str = ""
    """Why it could not be read."""


class TracedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A communicator, as one of its members has written it down."""

    id: str
    """In hexadecimal, as in `layout.communicator_id`."""
    name: str = ""
    desc: str = ""
    ranks: tuple[int, ...] = ()


class NodeWindow(msgspec.Struct, frozen=True, kw_only=True):
    """One agent's part."""

    number: int
    attempt: int
    node: str
    monotonic_ns: int
    """When it was read."""
    zero: float
    """What to add to seconds of the monotonic clock for the agent's clock."""
    rings: tuple[RingWindow, ...] = ()
    groups: tuple[TracedGroup, ...] = ()
    ends: tuple[Ends, ...] = ()
    blind: tuple[str, ...] = ()


class NodePart(msgspec.Struct, frozen=True, kw_only=True):
    """... on its way through the controller."""

    node: str
    offset_s: float = 0.0
    """What to add to the agent's clock for the controller's,"""
    bound_s: float = 0.0
    """... which is right within this."""
    packed: bytes


class JobWindow(msgspec.Struct, frozen=True, kw_only=True):
    """All that has come."""

    job: str
    number: int
    attempt: int
    seconds: float
    time: float
    """When it was asked for, by the controller's clock."""
    parts: tuple[NodePart, ...] = ()
    missing: tuple[str, ...] = ()
    """Nodes that have ranks of the attempt and sent nothing in time."""


_encoder = msgspec.msgpack.Encoder()
_node_decoder = msgspec.msgpack.Decoder(NodeWindow)
_trace_decoder = msgspec.msgpack.Decoder(NodeTrace)
_job_decoder = msgspec.msgpack.Decoder(JobWindow)


def pack(window: NodeWindow | NodeTrace) -> bytes:
    return zlib.compress(_encoder.encode(window), 1)


def unpack(packed: bytes) -> NodeWindow:
    """Raises ValueError, in one line."""
    return _unpacked(packed, _node_decoder)


def unpack_trace(packed: bytes) -> NodeTrace:
    """Where that was wanted. Raises ValueError, in one line."""
    return _unpacked(packed, _trace_decoder)


def _unpacked(packed: bytes, decoder: msgspec.msgpack.Decoder[Part]) -> Part:
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(packed, MOST_BYTES)
        if not unpacker.eof:
            raise ValueError("it is cut short, or too large")
        return decoder.decode(raw)
    except (zlib.error, msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"a node's part of a trace that cannot be read: {error}") from error


def encode(window: JobWindow) -> bytes:
    return _encoder.encode(window)


def decode(content: bytes) -> JobWindow:
    """Raises ValueError, in one line."""
    try:
        return _job_decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this is no window of a trace, or one of another version: {error}") from error
