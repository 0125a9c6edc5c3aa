"""What is in a ring, and in its table? Whole records only, whatever its writer does or has died in.

A reader copies what it looks at and checks the copy. It never waits for a writer: what is being written is passed over.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from evertrain.trace import layout, rings

OPERATION, FLOW, HOST, COMMUNICATOR = (layout.dtype(body) for body in layout.BODIES)
_BODY_NUMBERS = {
    body: [layout.KINDS[kind] for kind, of in layout.BODY_OF.items() if of == body and kind != "none"]
    for body in layout.BODIES
}
_BLOCK = 4096
"""Records looked at first, where nobody knows how far back the window begins."""

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Records:
    """Whole records, by what they hold and by their numbers."""

    operations: Array
    flows: Array
    hosts: Array
    communicators: Array
    last: int
    """The number up to which all has been seen."""
    missed: int
    """Written over, or torn, before they could be read."""

    def __len__(self) -> int:
        return len(self.operations) + len(self.flows) + len(self.hosts) + len(self.communicators)


class Reader:
    """Reads one file, living or dead. Raises ValueError where it is none that this version reads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(self._descriptor).st_size
            self._header = rings.header_of(os.pread(self._descriptor, layout.HEADER_BYTES, 0), size)
        except BaseException:
            self.close()
            raise
        self._ring_at = layout.HEADER_BYTES + self._header.table * layout.RECORD_BYTES
        self._hole = 0
        """The number of a record that was not there although later ones were."""

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def header(self) -> rings.Header:
        return self._header

    def lost(self) -> int:
        """Records that the writer had no room for."""
        return self._counter(layout.LOST_AT)

    def head(self) -> int:
        """The number of the newest record; it may be whole or not."""
        number = self._counter(layout.HEAD_AT)
        while rings.number_of(self._read(number + 1, 1)) == number + 1:  # its writer died before it could count
            number += 1
        return number

    def table(self) -> Array:
        """What is so now: the places in use. `number` of each is the writer's; see `places` for which is which."""
        return self.places()[1]

    def places(self) -> tuple[Array, Array]:
        """The places in use, by their indices, and what they say."""
        count = self._header.table
        raw = os.pread(self._descriptor, count * layout.RECORD_BYTES, layout.HEADER_BYTES)
        found = np.frombuffer(raw, OPERATION, len(raw) // layout.RECORD_BYTES)
        at = np.flatnonzero(_whole(raw, found, found["kind"] != layout.KINDS["none"]))
        return at, found[at]

    def since(self, number: int) -> Records:
        """What has come after record `number`; pass `last` of the result the next time.

        A record that is not there while later ones are is waited for until the next call, then given up.
        """
        head = self.head()
        first = max(number, head - self._header.capacity) + 1
        if first > head:
            return self._split(np.empty(0, OPERATION), head if number > head else number, 0)
        found = self._found(first, head - first + 1)
        missing = np.setdiff1d(np.arange(first, head + 1, dtype=np.uint64), found["number"], assume_unique=True)
        last, hole = head, 0
        if len(missing) and (oldest := int(missing[0])) > self._hole and first == number + 1:
            last, hole = oldest - 1, head
            found = found[found["number"] <= last]
        self._hole = hole
        return self._split(found, last, last - number - len(found))

    def newest(self, count: int) -> Records:
        """The last so many, without those that are being written, or were when their writer died."""
        head = self.head()
        count = min(count, head, self._header.capacity)
        return self._split(self._found(head - count + 1, count), head, 0)

    def window(self, t0_ns: int, t1_ns: int) -> Records:
        """What was written between two moments of the node's monotonic clock; the writer wrote it in that order."""
        head = self.head()
        count = min(head, self._header.capacity)
        asked = min(_BLOCK, count)
        while True:
            found = self._found(head - asked + 1, asked)
            t = _times(found)
            if asked == count or (len(t) and t.min() < t0_ns):
                found = found[(t >= t0_ns) & (t <= t1_ns)]
                return self._split(found, head, 0)
            asked = min(asked * 8, count)

    def _counter(self, at: int) -> int:
        return int.from_bytes(os.pread(self._descriptor, 8, at), "little")

    def _found(self, first: int, count: int) -> Array:
        """The whole ones of `count` records from `first` on, by their numbers."""
        raw = self._read(first, count)
        found = np.frombuffer(raw, OPERATION, len(raw) // layout.RECORD_BYTES)
        expected = np.arange(first, first + len(found), dtype=np.uint64)
        candidates = found["number"] == expected
        whole: Array = found[_whole(raw, found, candidates)]
        return whole

    def _read(self, first: int, count: int) -> bytes:
        """The places of `count` records from `first` on."""
        capacity = self._header.capacity
        place = (first - 1) % capacity
        before_end = min(count, capacity - place)
        size = layout.RECORD_BYTES
        raw = os.pread(self._descriptor, before_end * size, self._ring_at + place * size)
        if before_end < count:
            raw += os.pread(self._descriptor, (count - before_end) * size, self._ring_at)
        return raw

    def _split(self, found: Array, last: int, missed: int) -> Records:
        return split(found, last, missed)


def split_table(table: Array) -> tuple[Array, Array]:
    """Of a table, the operations and NCCL's communicators."""
    is_communicator = table["kind"] == layout.KINDS["communicator"]
    return table[~is_communicator], table[is_communicator].view(COMMUNICATOR)


def split(found: Array, last: int = 0, missed: int = 0) -> Records:
    """`found`: whole records of any kind, as operations."""
    operations, flows, hosts, communicators = (
        found[np.isin(found["kind"], _BODY_NUMBERS[body])].view(kind)
        for body, kind in zip(layout.BODIES, (OPERATION, FLOW, HOST, COMMUNICATOR), strict=True)
    )
    return Records(operations, flows, hosts, communicators, last, missed)


def _whole(raw: bytes, found: Array, candidates: Array | None = None) -> Array:
    """Which records are whole: both numbers agree, and the sum is right."""
    good: Array = found["check"] == (found["number"] & 0xFFFFFFFF)
    if candidates is not None:
        good &= candidates
    size, body = layout.RECORD_BYTES, layout.BODY_BYTES
    at = np.flatnonzero(good)
    sums = [crc32(raw[start : start + body]) for start in (at * size).tolist()]
    good[at] = found["crc"][at] == np.array(sums, np.uint32)
    return good


def _times(found: Array) -> Array:
    """When each record was written: where its body has it."""
    is_operation = np.isin(found["kind"], _BODY_NUMBERS["operation"])
    times: Array = np.where(is_operation, found["t"], found.view(FLOW)["t"])
    return times
