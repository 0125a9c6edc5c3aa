"""How does a record get into a ring so that it is there whole or not at all? The writer's side; `reading` is the other.

One copy of finished bytes and one counter, no lock and no system call: a writer that dies in between leaves one record
that readers pass over. A signal handler or another thread of the writer's process gets a number and a place of its own.

Standard library only: ranks import this.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from zlib import crc32

from evertrain.trace import layout
from evertrain.worker import mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from collections import namedtuple

SMALLEST_BYTES = 64 << 10
"""A ring below this shows too little to be worth its memory."""
_CRC_AT = layout.HEADER_STRUCT.size - 8

if TYPE_CHECKING:

    class Header(NamedTuple):
        """Of a file, as `layout.HEADER` has it, with texts as such."""

        layout: int
        capacity: int
        table: int
        writer: int
        rank: int
        pid: int
        term: int
        attempt: int
        monotonic_ns: int
        wall_ns: int
        node: str
        job: str

else:
    Header = namedtuple(
        "Header", "layout capacity table writer rank pid term attempt monotonic_ns wall_ns node job"
    )  # at a twentieth of what `typing` costs a rank's start


def capacity_of(size: int, table: int = 0) -> int:
    """Records of the ring in a file of at most `size` bytes; 0 where it is too small to be one."""
    return 0 if size < SMALLEST_BYTES else (size - layout.HEADER_BYTES) // layout.RECORD_BYTES - table


def create(
    path: str, *, writer: str, capacity: int, table: int = 0, job: str = "", node: str = "", rank: int = layout.NOBODY,
    pid: int = 0, term: int = 0, attempt: int = 0,
) -> None:  # fmt: skip
    """Allocate an empty file at `path`, in place of one that is there. `writer` is one of `layout.WRITERS`.

    Raises OSError with the bytes needed and free when the shared memory is full.
    """
    fields = (
        layout.MAGIC, layout.LAYOUT, layout.RECORD_BYTES, capacity, table, layout.WRITERS[writer], rank, pid, term,
        attempt, time.monotonic_ns(), time.time_ns(), _text(node, 64), _text(job, 64),
    )  # fmt: skip
    header = bytearray(layout.HEADER_STRUCT.pack(*fields, 0, 0))
    struct.pack_into("<I", header, _CRC_AT, crc32(header[:_CRC_AT]))
    fresh = f"{path}.new"
    mapping.allocate(fresh, layout.size_of(capacity, table))
    with open(fresh, "r+b", buffering=0) as file:
        file.write(header)
    os.replace(fresh, path)


def header_of(raw: bytes | memoryview, size: int) -> Header:
    """From the beginning of a file of `size` bytes. Raises ValueError with one line on why it is none of ours."""
    if len(raw) < layout.HEADER_STRUCT.size:
        raise ValueError(f"no trace file: {size:,} bytes are less than a header has")
    magic, version, record_bytes, capacity, table, writer, rank, pid, term, attempt, monotonic_ns, wall_ns, node, job, \
        crc, _ = layout.HEADER_STRUCT.unpack_from(raw)  # fmt: skip
    if magic != layout.MAGIC:
        raise ValueError("no trace file: it begins with other bytes")
    if version != layout.LAYOUT or record_bytes != layout.RECORD_BYTES:
        raise ValueError(
            f"trace file of layout {version} with records of {record_bytes} bytes; "
            f"this version of Evertrain reads layout {layout.LAYOUT} with {layout.RECORD_BYTES}"
        )
    if crc != crc32(raw[:_CRC_AT]):
        raise ValueError("the header of the trace file is damaged")
    if size < layout.size_of(capacity, table) or not capacity:
        raise ValueError(f"the trace file is cut off: {size:,} of {layout.size_of(capacity, table):,} bytes are there")
    return Header(
        version, capacity, table, writer, rank, pid, term, attempt, monotonic_ns, wall_ns, _said(node), _said(job)
    )


def open_writer(path: str) -> Writer:
    """For the one writer of a file, where a mapping may keep a descriptor; ranks map it without."""
    with open(path, "r+b", buffering=0) as file:
        if not os.fstat(file.fileno()).st_size:
            raise ValueError("no trace file: it is empty")
        return Writer(memoryview(mmap.mmap(file.fileno(), 0)))


class Writer:
    """The one who writes a file. Goes on after the last record of a writer before it."""

    __slots__ = ("_counters", "_numbers", "_view", "capacity", "header", "ring_at", "table")

    def __init__(self, view: memoryview) -> None:
        """`view`: the whole file, mapped writable. Raises ValueError where it is none that this version writes."""
        self.header = header = header_of(bytes(view[: layout.HEADER_BYTES]), len(view))
        self._view = view
        self.capacity, self.table = header.capacity, header.table
        self.ring_at = layout.HEADER_BYTES + self.table * layout.RECORD_BYTES
        self._counters = view[layout.HEAD_AT : layout.LOST_AT + 8].cast("Q")
        last = self._counters[0]
        while number_of(bytes(self._place(last + 1))) == last + 1:  # it died before it could count
            last += 1
        self._numbers = itertools.count(last + 1).__next__

    def take(self) -> int:
        """The number of a record that `put` will write."""
        return self._numbers()

    def put(self, number: int, body: bytes) -> None:
        """Write a record into the ring: all but its tail, with the number from `take` in front."""
        at = self.ring_at + (number - 1) % self.capacity * 128
        self._view[at : at + 128] = body + _pack_tail(crc32(body), number & 0xFFFFFFFF)
        self._counters[0] = number

    def append(self, rest: bytes) -> int:
        """Write a record of all but number and tail; returns its number."""
        number = self._numbers()
        self.put(number, _pack_number(number) + rest)
        return number

    def set_place(self, place: int, body: bytes) -> None:
        """Write a place of the table: all but the tail of a record, with a number of the caller's in front."""
        at = 4096 + place * 128
        self._view[at : at + 128] = body + _pack_tail(crc32(body), int.from_bytes(body[:4], "little"))

    def free_place(self, place: int) -> None:
        at = 4096 + place * 128
        self._view[at : at + 128] = FREE

    def lose(self, count: int = 1) -> None:
        """Records that are missing because there was no room for them."""
        self._counters[1] += count

    def _place(self, number: int) -> memoryview:
        at = self.ring_at + (number - 1) % self.capacity * layout.RECORD_BYTES
        return self._view[at : at + layout.RECORD_BYTES]


def number_of(record: bytes) -> int:
    """The number of a whole record; 0 where it is none."""
    number, crc, check = _ends(record)
    return number if check == number & 0xFFFFFFFF and crc == crc32(record[: layout.BODY_BYTES]) else 0


def _ends(record: bytes) -> tuple[int, int, int]:
    (number,) = _NUMBER.unpack_from(record)
    crc, check = layout.TAIL_STRUCT.unpack_from(record, layout.BODY_BYTES)
    return number, crc, check


def _text(value: str, size: int) -> bytes:
    return value.encode("utf-8", "backslashreplace")[: size - 1]


def _said(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "replace")


FREE = bytes(layout.RECORD_BYTES)
"""A place of the table in which nothing is. Not a whole record, as the rest of one that was being written is not."""
_NUMBER = struct.Struct("<Q")
_pack_number = _NUMBER.pack
_pack_tail = layout.TAIL_STRUCT.pack
assert (layout.RECORD_BYTES, layout.HEADER_BYTES) == (128, 4096)  # written out above, where it counts
