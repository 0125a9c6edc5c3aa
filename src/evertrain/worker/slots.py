"""What does a checkpoint slot look like, and which slot may be overwritten next?

A slot is a file: one rank's state at one step, readable when the rank is dead, by programs without torch.

    ┌─────────────────┬───────────────────────────────────────────┬──────────────┐
    │ header, 4 KiB   │ raw tensor bytes, each at a multiple of 64 │ metadata     │
    └─────────────────┴───────────────────────────────────────────┴──────────────┘

The header says `writing` before the first byte changes and `complete` after the last one, by a single copy with a CRC
of its own: a rank that dies in between leaves a slot that nobody takes for a checkpoint.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

MAGIC = b"EVSLOT\n\0"
LAYOUT = 1
HEADER_BYTES = 4096
"""Room of the header, so that the data begins on a page of its own."""
SLOTS = 3
"""Ranks are at most one save apart. With two slots, a rank may overwrite step t-1 while another one's copy of t is
unfinished, and a kill then leaves no step that all of them have."""

EMPTY, WRITING, COMPLETE = 0, 1, 2
HAS_DATA_CRC = 1

_HEADER = struct.Struct("@8s IIII qqqqq d QQQ II 64s 48s")
_CRC = struct.Struct("@I")


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
    data_crc: int | None = None
    """Only copies on disk have one: in memory it would cost three times the copy itself."""
    code: str = ""
    """Version of the user's code that saved it."""

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.data_bytes + self.metadata_bytes


def pack(header: SlotHeader) -> bytes:
    flags = 0 if header.data_crc is None else HAS_DATA_CRC
    body = _HEADER.pack(
        MAGIC, LAYOUT, HEADER_BYTES, header.state, flags,
        header.term, header.attempt, header.rank, header.world_size, header.step, header.time,
        header.data_bytes, header.metadata_bytes, 0, header.metadata_crc, header.data_crc or 0,
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
        data_bytes, metadata_bytes, _, metadata_crc, data_crc, job, code,
    ) = _HEADER.unpack(body)  # fmt: skip
    whole = _CRC.unpack_from(raw, _HEADER.size)[0] == crc32(body)
    if not whole or (magic, layout, header_bytes) != (MAGIC, LAYOUT, HEADER_BYTES):
        return None
    return SlotHeader(
        state, _text(job), term, attempt, rank, world_size, step, time, data_bytes, metadata_bytes, metadata_crc,
        data_crc if flags & HAS_DATA_CRC else None, _text(code),
    )  # fmt: skip


def read(path: str) -> SlotHeader | None:
    """The header of a slot file that is long enough for what its header promises; None for anything else."""
    try:
        with open(path, "rb", buffering=0) as file:
            header = parse(file.read(PACKED_BYTES))
            return header if header is not None and os.fstat(file.fileno()).st_size >= header.size else None
    except OSError:
        return None


def flushed_path(disk_dir: str, step: int, rank: int) -> str:
    """Where the node puts one rank's copy of a step when it writes the step to disk."""
    return os.path.join(disk_dir, f"step-{step:012d}", f"r{rank}")


Save = tuple[int, int]
"""Attempt and step: what tells one save from another."""


def save_in(slot: SlotHeader | None) -> Save | None:
    """The save that lies whole in a slot."""
    return None if slot is None or slot.state != COMPLETE else (slot.attempt, slot.step)


def slot_to_overwrite(slots: Sequence[SlotHeader | None], kept: Save | None = None) -> int:
    """Index of the slot that the next save takes: one that holds nothing whole, else the oldest, but never `kept`.

    With three slots the newest complete step and the one before it are left alone. Since ranks are at most one save
    apart, one of the two is complete on all of them, at any instant. Where that does not hold (a rank skips saves,
    because its loss is not finite) `kept` is the newest save that all have.
    """
    free = [index for index in range(len(slots)) if kept is None or save_in(slots[index]) != kept]
    return min(free, key=lambda index: save_in(slots[index]) or (-1, -1))


def newest_in_common(own: Sequence[SlotHeader | None], slots_dir: str, rank: int) -> Save | None:
    """The newest save of ours that every other rank with slots on this node has whole as well; None: there is none."""
    others = [name for name in _names(slots_dir) if name != f"r{rank}"]
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
