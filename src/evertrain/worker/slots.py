"""What does a checkpoint slot look like, and which slot may be overwritten next?

A slot is a file: one rank's state at one step, readable when the rank is dead, by programs without torch.

    ┌───────────────┬───────────────────────────────────────┬──────────┬───────────┬────────────┐
    │ header, 4 KiB │ data: part, part, … (raw tensor bytes) │ metadata │ directory │ checksums  │
    └───────────────┴───────────────────────────────────────┴──────────┴───────────┴────────────┘

`data` has one part for each entry of the checkpoint's state: its tensors, each at a multiple of 64 bytes, the part at a
multiple of a page and as many pages long; what lies between is zero, so that equal state is equal bytes on any rank.
`metadata` is what puts the tensors together again: a pickle that only a rank reads. `directory` is JSON for all
others: names and places of parts and tensors. `checksums` are one number for each chunk of each part (`worker.sums`).

The header says `writing` before the first byte changes and `complete` after the last one, by a single copy with a CRC
of its own: a rank that dies in between leaves a slot that nobody takes for a checkpoint. Checksums of the data come
later, when nobody waits.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple
from zlib import crc32

MAGIC = b"EVSLOT\n\0"
LAYOUT = 2
HEADER_BYTES = 4096
"""Room of the header, so that the data begins on a page of its own."""
PAGE_BYTES = 4096
"""Parts begin at multiples of this, and are so many pages long."""
CHUNK_BYTES = 1 << 20
"""Of a part; the last one may be shorter. What one checksum covers."""
SLOTS = 3
"""Ranks are at most one save apart. With two slots, a rank may overwrite step t-1 while another one's copy of t is
unfinished, and a kill then leaves no step that all of them have."""
MOST_SLOTS = SLOTS + 3
"""Three more where steps are pinned: the last one that is backed up, the one on its way, and the one before a change of
the code."""

EMPTY, WRITING, COMPLETE, DAMAGED = 0, 1, 2, 3
HAS_SUMS = 1

_HEADER = struct.Struct("@8s IIII qqqqq d QQQQQ III 64s 48s")
_CRC = struct.Struct("@I")
_SUM = struct.Struct("<Q")


class SlotHeader(NamedTuple):
    """Whose state lies in a slot, from when, and where its parts are."""

    state: int
    job: str
    term: int
    attempt: int
    rank: int
    world_size: int
    step: int
    time: float
    """When the save began, wall seconds."""
    data_bytes: int = 0
    metadata_bytes: int = 0
    metadata_crc: int = 0
    directory_bytes: int = 0
    directory_crc: int = 0
    sums_bytes: int = 0
    """Room for the checksums, also while they are not there yet."""
    sums_crc: int | None = None
    """None: the data has no checksums yet."""
    code: str = ""
    """Version of the user's code that saved it."""

    @property
    def metadata_at(self) -> int:
        return HEADER_BYTES + self.data_bytes

    @property
    def directory_at(self) -> int:
        return self.metadata_at + self.metadata_bytes

    @property
    def sums_at(self) -> int:
        return self.directory_at + self.directory_bytes

    @property
    def size(self) -> int:
        return self.sums_at + self.sums_bytes


class Part(NamedTuple):
    """One entry of the state, as bytes."""

    name: str
    offset: int
    """From the beginning of the data."""
    bytes: int


def pack(header: SlotHeader) -> bytes:
    flags = 0 if header.sums_crc is None else HAS_SUMS
    body = _HEADER.pack(
        MAGIC, LAYOUT, HEADER_BYTES, header.state, flags,
        header.term, header.attempt, header.rank, header.world_size, header.step, header.time,
        header.data_bytes, header.metadata_bytes, header.directory_bytes, header.sums_bytes, 0,
        header.metadata_crc, header.directory_crc, header.sums_crc or 0,
        header.job.encode()[:64], header.code.encode()[:48],
    )  # fmt: skip
    return body + _CRC.pack(crc32(body))


PACKED_BYTES = _HEADER.size + _CRC.size


def parse(raw: bytes | memoryview) -> SlotHeader | None:
    """The header in the first bytes of a slot, or None if there is none, it is damaged, or of another layout."""
    if len(raw) < PACKED_BYTES:
        return None
    body = bytes(raw[: _HEADER.size])
    (
        magic, layout, header_bytes, state, flags, term, attempt, rank, world_size, step, time,
        data_bytes, metadata_bytes, directory_bytes, sums_bytes, _, metadata_crc, directory_crc, sums_crc, job, code,
    ) = _HEADER.unpack(body)  # fmt: skip
    whole = _CRC.unpack_from(raw, _HEADER.size)[0] == crc32(body)
    if not whole or (magic, layout, header_bytes) != (MAGIC, LAYOUT, HEADER_BYTES):
        return None
    return SlotHeader(
        state, _text(job), term, attempt, rank, world_size, step, time, data_bytes, metadata_bytes, metadata_crc,
        directory_bytes, directory_crc, sums_bytes, sums_crc if flags & HAS_SUMS else None, _text(code),
    )  # fmt: skip


def read(path: str) -> SlotHeader | None:
    """The header of a slot file, or None if there is none, it is damaged or torn, or the file is too short for it."""
    try:
        with open(path, "rb", buffering=0) as file:
            header = parse(file.read(PACKED_BYTES))
            return header if header is not None and os.fstat(file.fileno()).st_size >= header.size else None
    except OSError:
        return None


def parts_of(directory: bytes | memoryview) -> tuple[Part, ...]:
    """The parts that a slot's directory lists."""
    listed = json.loads(bytes(directory))["parts"]
    return tuple(Part(part["name"], part["offset"], part["bytes"]) for part in listed)


def chunks(parts: Sequence[Part]) -> Iterator[tuple[int, int]]:
    """Offset (from the beginning of the data) and length of each chunk that has a checksum, in their order."""
    for part in parts:
        for offset in range(part.offset, part.offset + part.bytes, CHUNK_BYTES):
            yield offset, min(CHUNK_BYTES, part.offset + part.bytes - offset)


def sums_bytes(parts: Sequence[Part]) -> int:
    return _SUM.size * sum(-(-part.bytes // CHUNK_BYTES) for part in parts)


def page_weights() -> list[int]:
    """What the sum of each page of a chunk is multiplied with (`worker.sums`): odd, so that no change is lost."""
    value, found = 0x9E3779B97F4A7C15, []
    for _ in range(CHUNK_BYTES // PAGE_BYTES):
        value = (value * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        found.append(value | 1)
    return found


def pack_sums(sums: Sequence[int]) -> bytes:
    return b"".join(map(_SUM.pack, sums))


def unpack_sums(raw: bytes | memoryview) -> tuple[int, ...]:
    return tuple(number for (number,) in _SUM.iter_unpack(raw))


def flushed_path(disk_dir: str, step: int, rank: int) -> str:
    """Where the node puts one rank's copy of a step when it writes the step to disk."""
    return os.path.join(disk_dir, f"step-{step:012d}", f"r{rank}")


Save = tuple[int, int]
"""Attempt and step: what tells one save from another."""


def save_in(slot: SlotHeader | None) -> Save | None:
    """The save that lies whole in a slot."""
    return None if slot is None or slot.state != COMPLETE else (slot.attempt, slot.step)


def slot_to_overwrite(
    slots: Sequence[SlotHeader | None], kept: Save | None = None, pinned: Container[Save] = (), count: int = SLOTS
) -> int | None:
    """Index of the slot that the next save takes: one that holds nothing whole, else the oldest, but never `kept`.

    With three slots the newest complete step and the one before it are left alone. Since ranks are at most one save
    apart, one of the two is complete on all of them, at any instant. Where that does not hold (a rank skips saves,
    because its loss is not finite) `kept` is the newest save that all have. Slots with a `pinned` save do not count:
    None says that `count` others are not there, and that one more slot is to be made.
    """
    turning = [index for index, slot in enumerate(slots) if save_in(slot) is None or save_in(slot) not in pinned]
    if len(turning) < count:
        return None
    free = [index for index in turning if kept is None or save_in(slots[index]) != kept]
    return min(free, key=lambda index: save_in(slots[index]) or (-1, -1))


def newest_in_common(own: Sequence[SlotHeader | None], slots_dir: str, rank: int) -> Save | None:
    """The newest save of ours that every other rank with slots on this node has whole as well; None: there is none."""
    others = [name for name in _names(slots_dir) if name != f"r{rank}" and name.startswith("r")]
    for save in sorted(filter(None, map(save_in, own)), reverse=True):
        if all(_has(os.path.join(slots_dir, other), save) for other in others):
            return save
    return None


def _has(folder: str, save: Save) -> bool:
    return any(save_in(read(os.path.join(folder, name))) == save for name in _names(folder))


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode("utf-8", "replace")
