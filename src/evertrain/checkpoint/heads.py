"""What is a rank's checkpoint without its data? Its *head*: enough to ask for the data piece by piece, and to check it.

    ┌────────┬──────────┬───────────┬───────────┐
    │ header │ metadata │ directory │ checksums │      as in the slot, the data left out
    └────────┴──────────┴───────────┴───────────┘

From the checksums of a part follows its digest. Parts with the same digest are the same, on whatever rank they lie:
replicas need to be kept, and sent, once.
"""

from __future__ import annotations

import mmap
import os
from typing import NamedTuple
from zlib import crc32

import msgspec

from evertrain.checkpoint import sums
from evertrain.checkpoint.content import Directory
from evertrain.model.copies import Part
from evertrain.worker import slots as layout
from evertrain.worker.slots import SlotHeader


class Damaged(Exception):
    """What lies there is not what was saved; the text says where and why."""


class Gone(Exception):
    """It is not there, or no longer."""


class Place(NamedTuple):
    """A part in the data of a slot."""

    offset: int
    """From the beginning of the data."""
    part: Part


class Head(NamedTuple):
    header: SlotHeader
    metadata: bytes
    directory: bytes
    sums: bytes
    places: tuple[Place, ...]
    """Of the parts that are not empty."""
    groups: tuple[tuple[int, ...], ...]

    def pack(self) -> bytes:
        header = layout.pack(self.header).ljust(layout.HEADER_BYTES, b"\0")
        return header + self.metadata + self.directory + self.sums

    @property
    def bytes(self) -> int:
        return layout.HEADER_BYTES + len(self.metadata) + len(self.directory) + len(self.sums)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(dict.fromkeys(place.part for place in self.places))


def read(path: str) -> Head:
    """The head of a whole slot; checksums that the rank has not added yet are computed. Raises Gone and Damaged."""
    header = layout.read(path)
    if header is None or header.state != layout.COMPLETE:
        raise Gone(path)
    try:
        with open(path, "rb") as file:
            file.seek(header.metadata_at)
            metadata, directory, found = (
                file.read(size) for size in (header.metadata_bytes, header.directory_bytes, header.sums_bytes)
            )
            if header.sums_crc is None:
                _check(path, header, metadata, directory)
                found = _computed(file.fileno(), header, directory)
                header = header._replace(sums_crc=crc32(found))
    except OSError as error:
        raise Gone(f"{path}: {error.strerror}") from error
    now = layout.read(path)
    if now is None or now._replace(sums_crc=header.sums_crc) != header:
        raise Gone(f"{path} was overwritten while it was read")
    return _assembled(path, header, metadata, directory, found)


def parse(raw: bytes, where: str) -> Head:
    """A head that has been kept or sent; raises Damaged."""
    header = layout.parse(raw)
    if header is None or header.state != layout.COMPLETE or header.sums_crc is None:
        raise Damaged(f"{where}: its header is damaged")
    at = layout.HEADER_BYTES
    pieces = []
    for size in (header.metadata_bytes, header.directory_bytes, header.sums_bytes):
        pieces.append(raw[at : at + size])
        at += size
    if len(raw) != at:
        raise Damaged(f"{where}: {len(raw)} bytes instead of {at}")
    return _assembled(where, header, *pieces)


def _assembled(where: str, header: SlotHeader, metadata: bytes, directory: bytes, found: bytes) -> Head:
    _check(where, header, metadata, directory)
    if crc32(found) != header.sums_crc:
        raise Damaged(f"{where}: its checksums are damaged")
    try:
        said = msgspec.json.decode(directory, type=Directory)
    except msgspec.DecodeError as error:
        raise Damaged(f"{where}: its directory cannot be read: {error}") from error
    places, at = [], 0
    for part in said.parts:
        size = 8 * -(-part.bytes // layout.CHUNK_BYTES)
        if part.bytes:
            places.append(Place(part.offset, Part(sums.digest(found[at : at + size]), part.bytes)))
        at += size
    return Head(header, metadata, directory, found, tuple(places), said.groups)


def _check(where: str, header: SlotHeader, metadata: bytes, directory: bytes) -> None:
    if (crc32(metadata), crc32(directory)) != (header.metadata_crc, header.directory_crc):
        raise Damaged(f"{where}: its metadata do not match their checksum")


def _computed(descriptor: int, header: SlotHeader, directory: bytes) -> bytes:
    parts = layout.parts_of(directory)
    if not header.data_bytes:
        return b""
    length = layout.HEADER_BYTES + header.data_bytes
    if os.fstat(descriptor).st_size < length:
        raise Gone("cut off")
    with mmap.mmap(descriptor, length, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
        with view[layout.HEADER_BYTES :] as data:
            return layout.pack_sums(sums.of_data(data, parts))
