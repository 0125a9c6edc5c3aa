"""What is in one copy of one rank's checkpoint, and is it intact? For any file in slot format, without torch."""

from __future__ import annotations

import os
from typing import Any
from zlib import crc32

import msgspec

from evertrain.checkpoint import sums
from evertrain.worker import slots as layout
from evertrain.worker.slots import Part, SlotHeader


class Shard(msgspec.Struct, frozen=True):
    """Which part of a whole tensor a rank has."""

    shape: tuple[int, ...]
    """Of the whole."""
    offset: tuple[int, ...]
    """Where in the whole it begins."""
    placements: tuple[str, ...] = ()


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a part; `worker.directory` says what the fields mean."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    bytes: int
    shard: Shard | None = None


class PartInfo(msgspec.Struct, frozen=True):
    """One entry of the state."""

    name: str
    offset: int
    bytes: int
    tensors: tuple[TensorInfo, ...] = ()


class Directory(msgspec.Struct, frozen=True):
    """A slot's directory."""

    parts: tuple[PartInfo, ...]
    groups: tuple[tuple[int, ...], ...] = ()
    made_by: dict[str, Any] = {}
    store: dict[str, Any] | None = None


class Content(msgspec.Struct, frozen=True):
    """A copy, as far as its header and directory tell."""

    path: str
    header: SlotHeader
    directory: Directory


class Unreadable(Exception):
    """A file that is no whole copy; the text says why."""


def read(path: str) -> Content:
    """Header and directory of a complete copy; raises Unreadable."""
    header = layout.read(path)
    if header is None:
        raise Unreadable("damaged or cut off" if os.path.exists(path) else "gone")
    if header.state != layout.COMPLETE:
        raise Unreadable("found damaged before" if header.state == layout.DAMAGED else "unfinished")
    with open(path, "rb") as file:
        file.seek(header.directory_at)
        raw = file.read(header.directory_bytes)
    if crc32(raw) != header.directory_crc:
        raise Unreadable("its directory does not match its checksum")
    try:
        return Content(path, header, msgspec.json.decode(raw, type=Directory))
    except msgspec.DecodeError as error:
        raise Unreadable(f"its directory cannot be read: {error}") from error


def check(path: str) -> str:
    """Read all of a copy; why it is not intact, or nothing.

    A copy without checksums (saved a moment ago) is judged by its metadata. One that is replaced while it is read is
    gone, which is no damage.
    """
    try:
        content = read(path)
    except Unreadable as why:
        return str(why)
    header = content.header
    parts = [Part(part.name, part.offset, part.bytes) for part in content.directory.parts]
    with open(path, "rb") as file:
        file.seek(header.metadata_at)
        metadata = file.read(header.metadata_bytes)
        file.seek(header.sums_at)
        expected = file.read(header.sums_bytes)
        found = []
        if header.sums_crc is not None:
            for offset, length in layout.chunks(parts):
                file.seek(layout.HEADER_BYTES + offset)
                found.append(sums.of_chunk(file.read(length)))
    if layout.read(path) != header:
        return "overwritten while it was read"
    if crc32(metadata) != header.metadata_crc:
        return "its metadata do not match their checksum"
    if header.sums_crc is None:
        return ""
    if crc32(expected) != header.sums_crc:
        return "its checksums are damaged"
    wrong = [
        index
        for index, (one, other) in enumerate(zip(layout.unpack_sums(expected), found, strict=True))
        if one != other
    ]
    if not wrong:
        return ""
    at = [offset for offset, _ in layout.chunks(parts)]
    hit = sorted(
        {part.name for part in parts for index in wrong if part.offset <= at[index] < part.offset + part.bytes}
    )
    return f"{len(wrong)} of {len(found)} chunks do not match their checksums, in {', '.join(hit)}"
