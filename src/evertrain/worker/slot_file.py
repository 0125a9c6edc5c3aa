"""How do tensors get into a slot at the speed of memory? A mapped file, filled in place, used again and again."""

from __future__ import annotations

import json
import os
import pickle
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from evertrain.worker import mapping, slots, sums
from evertrain.worker.slots import Part, SlotHeader
from evertrain.worker.snapshot import Snapshot, TensorPlace, lay_out

_GROWTH = 64 << 10
"""Room for metadata that grows a little, so that the file need not."""

_SPAN = 16
"""Chunks that one thread restores in a row."""
_MOST_THREADS = 4

Describe = Callable[[Sequence[TensorPlace], Sequence[Part]], bytes]
"""Makes the directory for a layout; asked only when the layout has changed."""


class SlotFile:
    """One slot of this rank: mapped when first used, then kept; the pages stay warm."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.header = slots.read(path)
        self._storage: torch.UntypedStorage | None = None
        self._file_id = (0, 0)
        """Of the file that is mapped: device and inode."""
        self._places: list[TensorPlace] = []
        self._parts: list[Part] = []
        self._directory = b""
        self._registered = False
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
            self._clear_gaps(raw, snapshot.tensors, header.metadata_at)
        raw[header.metadata_at : header.directory_at] = metadata
        raw[header.directory_at : header.sums_at] = directory

    def commit(self) -> None:
        """The slot holds a checkpoint from here on."""
        assert self.header is not None and self._storage is not None
        self._write_header(self._storage, self.header._replace(state=slots.COMPLETE))

    def seal(self, hurry: Callable[[], bool] = lambda: False) -> None:
        """Add the checksums of a committed slot; left out in a hurry."""
        assert self.header is not None and self._storage is not None
        if self.header.state != slots.COMPLETE:
            return
        numbers = sums.of_data(data_of(self._storage, self.header), self._parts, hurry)
        if numbers is None:
            return
        found = slots.pack_sums(numbers)
        self._bytes(self._storage)[self.header.sums_at : self.header.size] = found
        self._write_header(self._storage, self.header._replace(sums_crc=crc32(found)))

    def names(self) -> list[str]:
        """The names of the snapshot's tensors, in their order."""
        return names_in(self._directory)

    def register(self, page_lock: Callable[[int, int], int]) -> None:
        """Lock the slot's pages with a function of their address and length, once."""
        if not self._registered and self._storage is not None:
            self._registered = True
            page_lock(self._storage.data_ptr(), self._storage.nbytes())

    def clear(self) -> None:
        """The slot holds nothing that anybody may use."""
        if self.header is not None and self.header.state != slots.EMPTY:
            header = self.header._replace(state=slots.EMPTY)
            _overwrite_header(self.path, header)
            self.header = header

    def _clear_gaps(self, raw: memoryview, tensors: Sequence[Tensor], end: int) -> None:
        """What lies between the tensors must be the same on every rank."""
        at = slots.HEADER_BYTES
        for place, tensor in zip(self._places, tensors, strict=True):
            raw[at : place.offset] = bytes(place.offset - at)
            at = place.offset + tensor.numel() * tensor.element_size()
        raw[at:end] = bytes(end - at)

    def _mapped(self, size: int) -> torch.UntypedStorage:
        if self._storage is None or self._storage.nbytes() < size or not self._is_still_there(self._storage):
            self._places, self.views, self._storage, self._registered = [], [], None, False
            if self.size < size:
                os.makedirs(os.path.dirname(self.path), mode=0o700, exist_ok=True)
                mapping.allocate(self.path, file_bytes(size))
            self._storage = _open(self.path, self.size, shared=True)
            mapping.prefault(self._storage.data_ptr(), self._storage.nbytes())
            found = os.stat(self.path)
            self._file_id = found.st_dev, found.st_ino
        return self._storage

    def _is_still_there(self, storage: torch.UntypedStorage) -> bool:
        """Whether what is mapped can be found by others: somebody may have tidied up /dev/shm."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        return (found.st_dev, found.st_ino) == self._file_id and found.st_size >= storage.nbytes()

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


def data_of(storage: torch.UntypedStorage, header: SlotHeader) -> Tensor:
    """The data section of a slot."""
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(storage, slots.HEADER_BYTES, (header.data_bytes,), (1,))


def names_in(directory: bytes | memoryview) -> list[str]:
    return [tensor["name"] for part in json.loads(bytes(directory))["parts"] for tensor in part["tensors"]]


def _overwrite_header(path: str, header: SlotHeader) -> None:
    with open(path, "r+b", buffering=0) as file:
        file.write(slots.pack(header))


class SlotDamaged(Exception):
    """A slot whose content is not what its header promises."""


class SavedSlot:
    """A complete slot, open for reading.

    `tensors` are views of it that have not been verified before `copy_out`; they are copied when written to.
    """

    def __init__(self, path: str, header: SlotHeader) -> None:
        self.path = path
        self.header = header
        self._storage = _open(path, header.size, shared=False)
        raw = mapping.view(self._storage.data_ptr(), header.size)
        if slots.parse(raw) != header:
            raise SlotDamaged("its header has changed")
        metadata, directory = raw[header.metadata_at : header.directory_at], raw[header.directory_at : header.sums_at]
        if crc32(metadata) != header.metadata_crc or crc32(directory) != header.directory_crc:
            raise SlotDamaged("its metadata do not match their checksum")
        self._parts = slots.parts_of(directory)
        self._expected: Sequence[int] = ()
        """Empty where the slot has no checksums: its rank died before they were made."""
        if header.sums_crc is not None:
            packed = raw[header.sums_at : header.size]
            if crc32(packed) != header.sums_crc:
                raise SlotDamaged("its checksums are damaged")
            self._expected = slots.unpack_sums(packed)
        self.entries: dict[str, bytes]
        self.entries, self._places = pickle.loads(metadata)
        self.tensors = [place.view(self._storage) for place in self._places]

    def copy_out(self, targets: Mapping[int, Tensor]) -> None:
        """Verify all of the data, and copy tensors by their number to where they belong, chunk by chunk.

        The file is read, not mapped: a page fault for each of its pages would cost more than the copy. A chunk that
        belongs to one tensor is read straight to where it belongs and summed up there, while it is in the processor's
        cache. Targets are in the CPU's memory, of the same type and strides. SlotDamaged is raised at the first chunk
        that does not match its checksum; targets may hold anything then.
        """
        pieces = list(self._pieces(targets))
        chunks = list(enumerate(slots.chunks(self._parts)))
        spans = [chunks[at : at + _SPAN] for at in range(0, len(chunks), _SPAN)]
        threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        if threads < 2 or len(spans) < 2:
            for span in spans:
                self._copy_span(span, pieces)
        else:
            # nothing else goes on in this rank, and its share of the cores is idle
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda span: self._copy_span(span, pieces), spans))

    def _copy_span(self, span: Sequence[tuple[int, tuple[int, int]]], pieces: Sequence[_Piece]) -> None:
        buffer = torch.empty(slots.CHUNK_BYTES, dtype=torch.uint8)
        at = bisect_right(pieces, span[0][1][0], key=lambda piece: piece.end)
        with open(self.path, "rb", buffering=0) as file:
            for number, (offset, length) in span:
                end = offset + length
                own = pieces[at].covers(offset, end) if at < len(pieces) else None
                chunk = own if own is not None else buffer[:length]
                raw = mapping.view(chunk.data_ptr(), length)
                whole = os.preadv(file.fileno(), [raw], slots.HEADER_BYTES + offset) == length
                if not whole or (self._expected and sums.of_chunk(chunk) != self._expected[number]):
                    raise SlotDamaged(f"its data do not match their checksum at byte {slots.HEADER_BYTES + offset:,}")
                while at < len(pieces) and pieces[at].begin < end:
                    piece = pieces[at]
                    if own is None:
                        first, last = max(piece.begin, offset), min(piece.end, end)
                        piece.raw[first - piece.begin : last - piece.begin].copy_(chunk[first - offset : last - offset])
                    if piece.end > end:
                        break
                    at += 1

    def _pieces(self, targets: Mapping[int, Tensor]) -> Iterator[_Piece]:
        """In the order of the data."""
        for number in sorted(targets):
            target = targets[number]
            length = target.numel() * target.element_size()
            if length:
                raw = torch.empty(0, dtype=torch.uint8)
                raw.set_(target.untyped_storage(), target.storage_offset() * target.element_size(), (length,), (1,))
                yield _Piece(self._places[number].offset - slots.HEADER_BYTES, raw)


class _Piece(NamedTuple):
    """Bytes to be filled, and where in the data they come from."""

    begin: int
    raw: Tensor

    @property
    def end(self) -> int:
        return self.begin + len(self.raw)

    def covers(self, first: int, last: int) -> Tensor | None:
        """The bytes for this range of the data, if all of it is ours and words in it can be summed up in place."""
        if not self.begin <= first < last <= self.end:
            return None
        part = self.raw[first - self.begin : last - self.begin]
        return part if part.storage_offset() % 8 == 0 else None


def condemn(path: str, header: SlotHeader) -> None:
    """Mark a copy as damaged, so that it is neither chosen nor kept."""
    _overwrite_header(path, header._replace(state=slots.DAMAGED))
