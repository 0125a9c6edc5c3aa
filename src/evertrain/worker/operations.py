"""What is this rank's communication doing? Operations in flight and their ends, told in the trace file of the hook.

    posted ──▶ a place of the table ──▶ wait() begins: the place, and place 0, what the rank is blocked in
                                    ──▶ seen to end: a record in the ring, and the place is free

Every record is made of bytes that are the same for all operations of a kind, which are made once, and of numbers.
"""

from __future__ import annotations

import struct
import time
from zlib import crc32

from evertrain.trace import layout, rings
from evertrain.worker import mapping, page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

NOT, WAIT, POLL = layout.SEEN["not"], layout.SEEN["wait"], layout.SEEN["poll"]

NAMES = {
    "allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced", "allgather": "all_gather",
    "_allgather_base": "all_gather_into_tensor", "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "_reduce_scatter_base": "reduce_scatter_tensor", "alltoall": "all_to_all", "alltoall_base": "all_to_all_single",
}  # fmt: skip
"""What the dispatcher calls otherwise than `layout.OPS`."""
_NUMBERS = {name: number for number, name in enumerate(layout.OPS)}

_PREFIX = struct.Struct("=BBBBHhiiQ")
"""From a record's kind to its communicator."""
_BODY = struct.Struct("@Q24s7Q32s")
"""Number, what `_PREFIX` packs, seq, order, bytes, t_posted, t_wait, t_done, t; and what the hook knows nothing of."""
_REST = struct.pack("=7I4x", 0, *[layout.UNSEEN] * 6)
assert _PREFIX.size == 24 and _BODY.size == layout.BODY_BYTES and struct.pack("=H", 1) == struct.pack("<H", 1)


class Communicator:
    """A process group, and how far this rank has come in it."""

    __slots__ = ("collectives", "id", "kinds", "name", "order", "own", "point_to_point", "ranks", "together")

    def __init__(self, name: str, identity: int, ranks: tuple[int, ...], own: int) -> None:
        self.name = page.text(name, 48)
        self.id = identity
        self.ranks = ranks
        """Global, by their positions; empty where torch does not say."""
        self.own = own
        """Position of this rank."""
        self.collectives = 0
        self.point_to_point = 0
        self.order = 0
        self.kinds: dict[tuple[str, int | None, bool], Kind] = {}
        self.together: list[Operation] | None = None
        """Posted in a coalescing block that has not ended; None: in none."""


class Kind:
    """One operator on one communicator, with one peer."""

    __slots__ = (
        "_common", "_flags", "_op", "blocked", "communicator", "count", "given_up", "is_any", "is_cpu", "is_quiet",
        "op", "polled", "posted", "waited", "waited_for",
    )  # fmt: skip

    def __init__(
        self, communicator: Communicator, name: str, op: bytes, peer: int, *, rank: int, device: int, is_cpu: bool,
        is_quiet: bool, is_point_to_point: bool,
    ) -> None:  # fmt: skip
        """`name` as the dispatcher has it, `op` as the page shows it; `peer` is global."""
        self.communicator = communicator
        self.op = op
        self.is_cpu = is_cpu
        self.is_quiet = is_quiet
        """Its end shows only where somebody waits for it."""
        self.is_any = is_point_to_point and peer == layout.ANYBODY
        self.count = 0
        """Of point-to-point: so many have there been."""
        self._op = _NUMBERS.get(NAMES.get(name, name), _NUMBERS["other"])
        self._flags = layout.POINT_TO_POINT * is_point_to_point | layout.COALESCED * name.endswith("_coalesced")
        self._common = (0, device, rank, peer, communicator.id)
        self.posted = self.prefix("state", flags=layout.POSTED_ONLY * is_quiet)
        self.waited_for = self.prefix("state")
        self.blocked = self.prefix("blocked")
        self.waited = self.prefix("done", WAIT)
        self.polled = self.prefix("done", POLL)
        self.given_up = self.prefix("done", NOT, layout.POSTED_ONLY)

    def prefix(self, kind: str, seen: int = NOT, flags: int = 0) -> bytes:
        return _PREFIX.pack(layout.KINDS[kind], seen, self._op, self._flags | flags, *self._common)


if TYPE_CHECKING:
    Operation = tuple[Kind, int, int, int, int, int, int, int, Any]
    """Kind, its number on the page, seq, order, bytes, t_posted; t_wait and place in the table; and the Work."""


class Trace:
    """The trace file of this rank's hook. Nothing here takes a lock; any thread may come, in a signal handler too."""

    __slots__ = ("_free", "_take", "_view", "_waits", "_writer")

    def __init__(self, path: str) -> None:
        self._view = mapping.map_file(path)
        self._writer = rings.Writer(self._view)
        self._take = self._writer.take
        # offsets in the file; place 0 is not one of them
        self._free = [_TABLE + place * 128 for place in range(self._writer.table - 1, 0, -1)]
        self._waits: dict[int, tuple[Operation, int]] = {}
        """What threads of this rank are blocked in, by the id of the Work; the newest last."""

    def post(self, kind: Kind, seq: int, order: int, size: int, now: int, t_wait: int) -> int:
        """An operation is launched; returns its place, 0 where there was none.

        `t_wait` is `now` where the caller will wait for it in a moment, else 0.
        """
        try:
            at = self._free.pop()
        except IndexError:
            self._writer.lose()
            return 0
        body = _pack(now, kind.posted, seq, order, size, now, t_wait, 0, now, _REST)
        self._view[at : at + 128] = body + _pack_tail(crc32(body), now & 0xFFFFFFFF)
        return at

    def withdraw(self, at: int) -> None:
        """... and it was refused."""
        if at:
            self._view[at : at + 128] = rings.FREE
            self._free.append(at)

    def wait(self, key: int, operation: Operation) -> int:
        """The host begins to wait for it; returns when."""
        kind, _, seq, order, size, t_posted, t_wait, at, _ = operation
        now = _now()
        self._waits[key] = operation, now
        body = _pack(now, kind.blocked, seq, order, size, t_posted, now, 0, now, _REST)
        self._view[_TABLE:_FIRST] = body + _pack_tail(crc32(body), now & 0xFFFFFFFF)
        if at and not t_wait:
            body = _pack(now, kind.waited_for, seq, order, size, t_posted, now, 0, now, _REST)
            self._view[at : at + 128] = body + _pack_tail(crc32(body), now & 0xFFFFFFFF)
        return now

    def go_on(self, key: int) -> None:
        """The host no longer waits for it."""
        waits = self._waits
        del waits[key]
        if not waits:
            self._view[_TABLE:_FIRST] = rings.FREE
            return
        try:
            (kind, _, seq, order, size, t_posted, *_), since = list(waits.values())[-1]
        except (IndexError, RuntimeError):  # another thread has come or gone
            return
        body = _pack(since, kind.blocked, seq, order, size, t_posted, since, 0, since, _REST)
        self._view[_TABLE:_FIRST] = body + _pack_tail(crc32(body), since & 0xFFFFFFFF)

    def waits_for(self, key: int) -> bool:
        return key in self._waits

    def end(self, operation: Operation, prefix: bytes, t_wait: int, t_done: int) -> None:
        """It has ended, or nobody will say when (`t_done` is 0)."""
        _, _, seq, order, size, t_posted, _, at, _ = operation
        number = self._take()
        body = _pack(number, prefix, seq, order, size, t_posted, t_wait, t_done, t_done or _now(), _REST)
        self._writer.put(number, body)
        if at:
            self._view[at : at + 128] = rings.FREE
            self._free.append(at)


_TABLE = layout.HEADER_BYTES
_FIRST = _TABLE + layout.RECORD_BYTES
_pack = _BODY.pack
_pack_tail = layout.TAIL_STRUCT.pack
_now = time.monotonic_ns
