"""What does one trace record look like, and the file that holds them? The one definition, for Python, numpy and C.

A file belongs to one rank and one kind of writer, who alone writes to it:

    ┌────────┬───────────────────────┬──────────────────────────────────────┐
    │ header │ table: what is so now │ ring: what has happened, newest over │  records of 128 bytes each
    └────────┴───────────────────────┴──────── oldest ──────────────────────┘

Record n of the ring, counted from 1, stands in place (n - 1) % capacity and is gone when n + capacity is written.
A record is written in one copy of finished bytes. Its number stands at both ends and a CRC covers what is between, so
that a reader takes only whole ones, whatever state the writer died in. A place of the table is written again and again
with numbers of its own; kind `none` there means that it is free. Place 0 of a rank's table is what it is blocked in.

Times are nanoseconds of the node's monotonic clock; the header has one moment by both clocks. Counts that were never
seen are `UNSEEN`, which is not 0. Standard library only: ranks import this.
"""

from __future__ import annotations

import struct
from zlib import crc32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

MAGIC = b"EVTRACE\0"
LAYOUT = 1
RECORD_BYTES = 128
HEADER_BYTES = 4096
UNSEEN = 0xFFFFFFFF
NOBODY = -1
"""As a rank: none, or it is not known."""
ANYBODY = -2
"""... as a peer: whoever sends first."""

Field = tuple[str, str]
"""Name and type: u or i, bits; or `text` and bytes."""

HEADER: tuple[Field, ...] = (
    ("magic", "text8"),
    ("layout", "u32"),
    ("record_bytes", "u32"),
    ("capacity", "u64"),  # records of the ring
    ("table", "u32"),  # places of the table
    ("writer", "u32"),
    ("rank", "i32"),
    ("pid", "u32"),
    ("term", "i64"),
    ("attempt", "i64"),
    ("monotonic_ns", "u64"),  # one moment ...
    ("wall_ns", "u64"),  # ... by both clocks
    ("node", "text64"),
    ("job", "text64"),
    ("crc", "u32"),  # of all before it
    ("pad", "u32"),
)
HEAD_AT, LOST_AT = 256, 264
"""Two counters of 64 bit that the writer keeps in the header: records written, which is only a hint of where the newest
stands, and records that it had to drop."""

WRITERS = {"hook": 1, "agent": 2, "nccl": 3}
"""torch.distributed's hook in the rank; the agent, on its behalf; the profiler plugin in NCCL."""

KINDS = {"none": 0, "done": 1, "state": 2, "blocked": 3, "flow": 4, "host": 5, "communicator": 6}
"""An operation that has ended; one that is in flight; what a rank is blocked in; a TCP connection; a process, or of the
writer `nccl` one of its threads, whose number is `seq`; a communicator of NCCL."""

SEEN = {"not": 0, "wait": 1, "poll": 2, "callback": 3, "kernel": 4, "proxy": 5}
"""How the end of an operation was seen."""

OPS = (
    "none", "all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "all_gather", "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "gather", "scatter", "all_to_all", "all_to_all_single", "barrier",
    "monitored_barrier", "send", "recv", "recv_any_source", "other",
)  # fmt: skip
"""By their numbers; names that torch gives its operators. What NCCL calls otherwise is translated."""

# flags of a record
POINT_TO_POINT = 1
COALESCED = 2
POSTED_ONLY = 4
"""Nobody will say when this has ended."""
GRAPH = 8
FOREIGN = 16
"""NCCL: a flow that this process serves for another one on the same node, whose pid is `order`; its communicator is not
known."""
RING = 32
"""NCCL: by the ring algorithm, where the first transfer of a rank needs nothing but its own data."""

SIDES = {"whole": 0, "send": 1, "receive": 2}
"""NCCL: what a record of an operation is about (`flow`): all of it on this rank, or one side of one channel. As the
whole of it `total`, `ready` and `done` count channels: all, those whose kernel has begun, those where it has ended. Of
a side they count chunks: to send `ready` are those that the GPU has given, `transmitted` handed to the network, `done`
confirmed by it; to receive `ready` are those asked for, `received` come, `transmitted` given to the GPU, `consumed`
done with by it. `bytes` of a side are those that it has moved. `t_wait` is when the first kernel was seen to run."""
HEADS = {
    "none": 0, "send_gpu": 8, "send_wait": 9, "recv_wait": 10, "recv_flush": 11, "recv_gpu": 12, "send_peer": 20,
    "begun": 31,
}  # fmt: skip
"""NCCL: states of a chunk, by its numbers; what the oldest open one of a side waits for. To send: data from the GPU,
its way through the network, a receiver who is ready. To receive: data from the network, its way to the GPU, a GPU that
takes it. `begun`: no state was told."""

COMMON: tuple[Field, ...] = (
    ("number", "u64"),
    ("kind", "u8"),
    ("seen", "u8"),
    ("op", "u8"),
    ("flags", "u8"),
    ("channel", "u16"),
    ("device", "i16"),
    ("rank", "i32"),  # global
    ("peer", "i32"),  # global; of point-to-point, or of a flow
    ("comm", "u64"),  # `communicator_id`
    ("seq", "u64"),  # by communicator; of point-to-point by communicator, source and destination
)
OPERATION: tuple[Field, ...] = (
    ("order", "u64"),  # among all operations of the communicator on this rank, where `seq` counts each kind by itself
    ("bytes", "u64"),
    ("t_posted", "u64"),
    ("t_wait", "u64"),  # when the host began to wait for it; 0: it has not
    ("t_done", "u64"),  # 0: not seen to end
    ("t", "u64"),  # of this record
    ("stuck_ms", "u32"),  # since a counter has changed
    ("total", "u32"),  # chunks, or bytes >> 10 where a transport has none
    ("ready", "u32"),
    ("transmitted", "u32"),
    ("done", "u32"),
    ("received", "u32"),
    ("consumed", "u32"),
    ("head", "u8"),  # state of the oldest open chunk, as the writer has it: send ...
    ("recv_head", "u8"),  # ... and receive side
    ("flow", "u16"),
)
"""Kinds `done`, `state`, `blocked`."""
FLOW: tuple[Field, ...] = (
    ("t", "u64"),
    ("dt_us", "u32"),  # since the record before it; deltas below are over this time
    ("inode", "u32"),
    ("sent", "u64"),  # bytes, delta
    ("acked", "u64"),  # bytes, delta
    ("notsent", "u32"),
    ("unacked", "u32"),  # segments
    ("rqueue", "u32"),  # received and not read
    ("busy_us", "u32"),  # delta
    ("rwnd_us", "u32"),  # delta: limited by the receiver's window
    ("sndbuf_us", "u32"),  # delta
    ("resent", "u32"),  # segments, delta
    ("rtt_us", "u32"),
    ("rate", "u32"),  # delivery rate, KiB/s
    ("last_ack_ms", "u32"),  # ago
    ("cwnd", "u32"),  # segments
    ("backoff", "u8"),
    ("state", "u8"),
    ("pad", "u16"),
)
HOST: tuple[Field, ...] = (
    ("t", "u64"),
    ("dt_us", "u32"),
    ("threads", "u16"),
    ("state", "u8"),  # letter of /proc/PID/stat
    ("frozen", "u8"),
    ("cpu_us", "u64"),  # delta, of all threads
    ("delay_us", "u64"),  # delta: runnable and not run, of all threads
    ("throttled_us", "u64"),  # delta, of its cgroup
    ("throttled", "u32"),  # delta, periods
    ("carrier", "u8"),  # of the interface of its traffic: 1 up, 0 down, 255 not seen
    ("pad8", "u8"),
    ("pad16", "u16"),
    ("faults", "u64"),  # major, delta
    ("read_bytes", "u64"),  # delta
    ("wrote_bytes", "u64"),  # delta
    ("wire_bytes", "u64"),  # delta, all that interfaces of its network sent and received, whoever it is of
)
COMMUNICATOR: tuple[Field, ...] = (
    ("t", "u64"),
    ("t_end", "u64"),  # 0: it is open
    ("of_rank", "i32"),  # this rank's number in it; peers of records are such numbers
    ("ranks", "i32"),
    ("nodes", "i32"),
    ("api", "u16"),  # version of the interface
    ("pad", "u16"),
    ("mask", "u32"),  # events that are asked for
    ("version", "u32"),  # of NCCL, by its number; 0: not known
    ("name", "text40"),
)
"""`comm` is NCCL's hash, the same on all ranks of the communicator."""
TAIL: tuple[Field, ...] = (("crc", "u32"), ("check", "u32"))
"""CRC of all before it; the lower half of the number again."""

BODIES: dict[str, tuple[Field, ...]] = {"operation": OPERATION, "flow": FLOW, "host": HOST,
                                           "communicator": COMMUNICATOR}  # fmt: skip
BODY_OF = {"none": "operation", "done": "operation", "state": "operation", "blocked": "operation", "flow": "flow",
           "host": "host", "communicator": "communicator"}  # fmt: skip

_STRUCT = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "i8": "b", "i16": "h", "i32": "i", "i64": "q"}
_C = {"u": "uint", "i": "int"}


def _format(fields: Iterable[Field]) -> str:
    return "".join(f"{kind[4:]}s" if kind.startswith("text") else _STRUCT[kind] for _, kind in fields)


HEADER_STRUCT = struct.Struct("<" + _format(HEADER))
OPERATION_STRUCT = struct.Struct("<" + _format((*COMMON, *OPERATION)))
FLOW_STRUCT = struct.Struct("<" + _format((*COMMON, *FLOW)))
HOST_STRUCT = struct.Struct("<" + _format((*COMMON, *HOST)))
COMMUNICATOR_STRUCT = struct.Struct("<" + _format((*COMMON, *COMMUNICATOR)))
TAIL_STRUCT = struct.Struct("<" + _format(TAIL))
BODY_BYTES = RECORD_BYTES - TAIL_STRUCT.size
assert {OPERATION_STRUCT.size, FLOW_STRUCT.size, HOST_STRUCT.size, COMMUNICATOR_STRUCT.size} == {BODY_BYTES}
assert HEADER_STRUCT.size <= HEAD_AT


def sealed(body: bytes, number: int) -> bytes:
    """A whole record from all but its tail."""
    return body + TAIL_STRUCT.pack(crc32(body), number & 0xFFFFFFFF)


def communicator_id(attempt: int, name: str, ranks: Iterable[int]) -> int:
    """The same on all members; another one in each attempt, because names begin anew there."""
    from hashlib import blake2b

    said = f"{attempt}\0{name}\0{','.join(map(str, sorted(ranks)))}"
    return int.from_bytes(blake2b(said.encode(), digest_size=8).digest(), "little")


def size_of(capacity: int, table: int) -> int:
    """Bytes of a file."""
    return HEADER_BYTES + (table + capacity) * RECORD_BYTES


def dtype(body: str) -> Any:
    """For numpy: a record with this body; the same 128 bytes."""
    import numpy as np

    fields = [*COMMON, *BODIES[body], *TAIL]
    return np.dtype(
        [
            (name, f"S{kind[4:]}" if kind.startswith("text") else f"<{kind[0]}{int(kind[1:]) // 8}")
            for name, kind in fields
        ]
    )


def c_header() -> str:
    """`record.h`, for writers in C."""
    lines = [
        "/* Written by evertrain.trace.layout; a test compares the two. */",
        "#ifndef EVERTRAIN_RECORD_H", "#define EVERTRAIN_RECORD_H", "#include <stddef.h>", "#include <stdint.h>", "",
        f"#define EV_MAGIC \"{MAGIC[:-1].decode()}\"",
    ]  # fmt: skip
    numbers = {
        "LAYOUT": LAYOUT, "RECORD_BYTES": RECORD_BYTES, "HEADER_BYTES": HEADER_BYTES, "HEAD_AT": HEAD_AT,
        "LOST_AT": LOST_AT, "POINT_TO_POINT": POINT_TO_POINT, "COALESCED": COALESCED, "POSTED_ONLY": POSTED_ONLY,
        "GRAPH": GRAPH, "FOREIGN": FOREIGN, "RING": RING,
        **{f"SIDE_{name.upper()}": number for name, number in SIDES.items()},
        **{f"HEAD_{name.upper()}": number for name, number in HEADS.items()},
        **{f"WRITER_{name.upper()}": number for name, number in WRITERS.items()},
        **{f"KIND_{name.upper()}": number for name, number in KINDS.items()},
        **{f"SEEN_{name.upper()}": number for name, number in SEEN.items()},
        **{f"OP_{name.upper()}": number for number, name in enumerate(OPS)},
    }  # fmt: skip
    lines += [f"#define EV_{name} {number}" for name, number in numbers.items()]
    lines += [f"#define EV_UNSEEN {UNSEEN:#x}u", f"#define EV_NOBODY ({NOBODY})", f"#define EV_ANYBODY ({ANYBODY})", ""]
    lines += _c_struct("ev_header", HEADER)
    lines += _c_struct("ev_operation", (*COMMON, *OPERATION, *TAIL))
    lines += _c_struct("ev_host", (*COMMON, *HOST, *TAIL))
    lines += _c_struct("ev_communicator", (*COMMON, *COMMUNICATOR, *TAIL))
    lines += [
        "_Static_assert(sizeof(struct ev_host) == EV_RECORD_BYTES, \"a record has 128 bytes\");",
        "_Static_assert(sizeof(struct ev_communicator) == EV_RECORD_BYTES, \"a record has 128 bytes\");",
        "_Static_assert(sizeof(struct ev_operation) == EV_RECORD_BYTES, \"a record has 128 bytes\");",
        f"_Static_assert(sizeof(struct ev_header) == {HEADER_STRUCT.size}, \"of the header\");",
        f"_Static_assert(offsetof(struct ev_operation, crc) == {BODY_BYTES}, \"the CRC covers the rest\");",
        "#endif",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _c_struct(name: str, fields: Iterable[Field]) -> list[str]:
    lines = [f"struct {name} {{"]
    for field, kind in fields:
        if kind.startswith("text"):
            lines.append(f"    char {field}[{kind[4:]}];")
        else:
            lines.append(f"    {_C[kind[0]]}{kind[1:]}_t {field};")
    return [*lines, "};", ""]
