"""How do tensors get into a slot at the speed of memory? A mapped file, filled in place, used again and again."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from zlib import crc32

import torch
from torch import Tensor

from evertrain.worker import mapping, slots, sums
from evertrain.worker.slots import Part, SlotHeader
from evertrain.worker.snapshot import Snapshot, TensorPlace, lay_out

_GROWTH = 64 << 10
"""Room for metadata that grows a little, so that the file need not."""

Describe = Callable[[Sequence[TensorPlace], Sequence[Part]], bytes]
"""Makes the directory for a layout; asked only when the layout has changed."""


class SlotFile:
    """One slot of this rank: mapped when first used, then kept; the pages stay warm."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.header = slots.read(path)
        self._storage: torch.UntypedStorage | None = None
        self._places: list[TensorPlace] = []
        self._parts: list[Part] = []
        self._directory = b""
        self.views: list[Tensor] = []
        """Where each tensor of the snapshot is to be copied to; valid from `begin` to `commit`."""

    @property
    def size(self) -> int:
        """Bytes that the file has now."""
        try:
            return os.stat(self.path).st_size
        except FileNotFoundError:
            return 0

    def begin(self, header: SlotHeader, snapshot: Snapshot, describe: Describe) -> None:
        """Give up what the slot held and write all but the tensors; the slot is `writing` until `commit`."""
        places, parts = lay_out(snapshot, slots.HEADER_BYTES)
        changed = places != self._places or parts != self._parts
        directory = describe(places, parts) if changed or not self._directory else self._directory
        metadata = pickle.dumps((snapshot.entries, places), protocol=pickle.HIGHEST_PROTOCOL)
        header = header._replace(
            state=slots.WRITING,
            data_bytes=sum(part.bytes for part in parts),
            metadata_bytes=len(metadata),
            metadata_crc=crc32(metadata),
            directory_bytes=len(directory),
            directory_crc=crc32(directory),
            sums_bytes=slots.sums_bytes(parts),
            sums_crc=None,
        )
        storage = self._mapped(header.size)
        self._write_header(storage, header)
        raw = self._bytes(storage)
        if changed or not self.views:
            self._places, self._parts, self._directory = places, parts, directory
            self.views = [place.view(storage) for place in places]
            self._data(storage, header).zero_()  # what lies between the tensors must be the same on every rank
        raw[header.metadata_at : header.directory_at] = metadata
        raw[header.directory_at : header.sums_at] = directory

    def commit(self) -> None:
        """The slot holds a checkpoint from here on."""
        assert self.header is not None and self._storage is not None
        self._write_header(self._storage, self.header._replace(state=slots.COMPLETE))

    def seal(self) -> None:
        """Add the checksums of a committed slot."""
        assert self.header is not None and self._storage is not None
        found = slots.pack_sums(sums.of_data(self._data(self._storage, self.header), self._parts))
        self._bytes(self._storage)[self.header.sums_at : self.header.size] = found
        self._write_header(self._storage, self.header._replace(sums_crc=crc32(found)))

    def clear(self) -> None:
        """The slot holds nothing that anybody may use."""
        if self.header is not None and self.header.state != slots.EMPTY:
            header = self.header._replace(state=slots.EMPTY)
            with open(self.path, "r+b", buffering=0) as file:
                file.write(slots.pack(header))
            self.header = header

    def _mapped(self, size: int) -> torch.UntypedStorage:
        if self._storage is None or self._storage.nbytes() < size:
            self._places, self.views, self._storage = [], [], None
            if self.size < size:
                os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
                mapping.allocate(self.path, file_bytes(size))
            self._storage = _open(self.path, self.size, shared=True)
            mapping.prefault(self._storage.data_ptr(), self._storage.nbytes())
        return self._storage

    def _write_header(self, storage: torch.UntypedStorage, header: SlotHeader) -> None:
        self._bytes(storage)[: slots.PACKED_BYTES] = slots.pack(header)
        self.header = header

    @staticmethod
    def _data(storage: torch.UntypedStorage, header: SlotHeader) -> Tensor:
        whole = torch.empty(0, dtype=torch.uint8)
        return whole.set_(storage, slots.HEADER_BYTES, (header.data_bytes,), (1,))

    @staticmethod
    def _bytes(storage: torch.UntypedStorage) -> memoryview:
        return mapping.view(storage.data_ptr(), storage.nbytes())


def file_bytes(content: int) -> int:
    """Size of the file for so much content: whole pages, with some room to grow."""
    return content + _GROWTH + -(content + _GROWTH) % slots.HEADER_BYTES


def _open(path: str, size: int, *, shared: bool) -> torch.UntypedStorage:
    storage = torch.UntypedStorage.from_file(path, shared=shared, nbytes=size)
    assert isinstance(storage, torch.UntypedStorage)
    return storage


class SlotDamaged(Exception):
    """A slot whose content is not what its header promises."""


def open_slot(path: str, header: SlotHeader) -> tuple[dict[str, bytes], list[Tensor]]:
    """The pickled entries and the tensors of a complete slot, checked; tensors are views, copied when written to."""
    storage = _open(path, header.size, shared=False)
    raw = mapping.view(storage.data_ptr(), header.size)
    if slots.parse(raw) != header:
        raise SlotDamaged("its header has changed")
    metadata, directory = raw[header.metadata_at : header.directory_at], raw[header.directory_at : header.sums_at]
    if crc32(metadata) != header.metadata_crc or crc32(directory) != header.directory_crc:
        raise SlotDamaged("its metadata do not match their checksum")
    entries, places = pickle.loads(metadata)
    if header.sums_crc is not None:
        _check_data(storage, raw, header)
    return entries, [place.view(storage) for place in places]


def _check_data(storage: torch.UntypedStorage, raw: memoryview, header: SlotHeader) -> None:
    expected = raw[header.sums_at : header.size]
    if crc32(expected) != header.sums_crc:
        raise SlotDamaged("its checksums are damaged")
    parts = slots.parts_of(raw[header.directory_at : header.sums_at])
    if slots.pack_sums(sums.of_data(SlotFile._data(storage, header), parts)) != expected:
        raise SlotDamaged("its data do not match their checksums")
