"""How do tensors get into a slot at the speed of memory? A mapped file, filled in place, used again and again."""

from __future__ import annotations

import os
import pickle
from zlib import crc32

import torch
from torch import Tensor

from evertrain.worker import mapping, slots
from evertrain.worker.slots import SlotHeader
from evertrain.worker.snapshot import Snapshot, TensorPlace, lay_out

_GROWTH = 64 << 10
"""Room for metadata that grows a little, so that the file need not."""


class SlotFile:
    """One slot of this rank: mapped when first used, then kept; the pages stay warm."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.header = slots.read(path)
        self._storage: torch.UntypedStorage | None = None
        self._places: list[TensorPlace] = []
        self._views: list[Tensor] = []

    @property
    def size(self) -> int:
        """Bytes that the file has now."""
        try:
            return os.stat(self.path).st_size
        except FileNotFoundError:
            return 0

    def begin(self, header: SlotHeader, snapshot: Snapshot) -> None:
        """Give up what the slot held and copy the tensors; the slot is `writing` until `commit`."""
        places, end = lay_out(snapshot.tensors, slots.HEADER_BYTES)
        metadata = pickle.dumps((snapshot.entries, places), protocol=pickle.HIGHEST_PROTOCOL)
        header = header._replace(
            state=slots.WRITING,
            data_bytes=end - slots.HEADER_BYTES,
            metadata_bytes=len(metadata),
            metadata_crc=crc32(metadata),
        )
        storage = self._mapped(header.size)
        self._write_header(storage, header)
        if places != self._places:
            self._places, self._views = places, [place.view(storage) for place in places]
        torch._foreach_copy_(self._views, snapshot.tensors)
        self._bytes(storage)[end : header.size] = metadata

    def commit(self) -> None:
        """The slot holds a checkpoint from here on."""
        assert self.header is not None and self._storage is not None
        self._write_header(self._storage, self.header._replace(state=slots.COMPLETE))

    def clear(self) -> None:
        """The slot holds nothing that anybody may use."""
        if self.header is not None and self.header.state != slots.EMPTY:
            header = self.header._replace(state=slots.EMPTY)
            with open(self.path, "r+b", buffering=0) as file:
                file.write(slots.pack(header))
            self.header = header

    def _mapped(self, size: int) -> torch.UntypedStorage:
        if self._storage is None or self._storage.nbytes() < size:
            self._places, self._views, self._storage = [], [], None
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
    end = slots.HEADER_BYTES + header.data_bytes
    if slots.parse(raw) != header:
        raise SlotDamaged("its header has changed")
    if crc32(raw[end:]) != header.metadata_crc:
        raise SlotDamaged("its metadata do not match their checksum")
    if header.data_crc is not None and crc32(raw[slots.HEADER_BYTES : end]) != header.data_crc:
        raise SlotDamaged("its data do not match their checksum")
    entries, places = pickle.loads(raw[end:])
    return entries, [place.view(storage) for place in places]
