"""How does a rank get its state from the store?

With as many ranks on the same device meshes as when it was saved, `of_rank` gives back exactly what this rank saved,
bit for bit; otherwise `store_division` puts the pieces together anew. What is read is checked against its digest.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evertrain.worker import snapshot, store_files
from evertrain.worker.store_files import METADATA, Folder, StoreDamaged
from evertrain.worker.store_metadata import TensorHere, entry_key
from evertrain.worker.store_writer import content_of, content_of_entry, is_entry

_RANGE_BYTES = 64 << 20
"""Neighbours in a file are read together up to so many bytes,"""
_GAP_BYTES = 1 << 20
"""... and with no more than this between them that nobody wants."""
_THREADS = 4

_OF_RANK = re.compile(r"@rank\d+$")

Use = Callable[[Any], object]


class Hole(NamedTuple):
    """Where a tensor belongs in an entry."""

    number: int
    """Among all tensors of the rank."""
    here: TensorHere
    mesh: Any
    """Identifies the device mesh of a DTensor; None: a plain tensor."""


class Entry(NamedTuple):
    """One entry of one rank's state, its tensors not read yet."""

    pickled: bytes
    tensors: dict[int, TensorHere]

    def holes(self) -> Any:
        """The entry with a `Hole` in the place of each tensor."""
        return _Holes(self).load()

    def all_holes(self) -> list[Hole]:
        """Those in places that nobody can look into as well."""
        unpickler = _Holes(self)
        unpickler.load()
        return unpickler.found

    def whole(self, tensors: Mapping[int, Tensor]) -> Any:
        return _Filled(self.pickled, tensors).load()


class StoredStep:
    """A committed step; raises StoreDamaged where it is not what its manifest promises."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        manifest = store_files.read_manifest(folder)
        if manifest is None:
            raise StoreDamaged(f"store {folder.url}: there is no {store_files.MANIFEST}, so the step does not exist")
        self.manifest = manifest
        described = folder.read(METADATA)
        if store_files.digest(described) != manifest.files[METADATA].digest:
            raise StoreDamaged(f"store {folder.url}: {METADATA} does not match its checksum{self._instead}")
        metadata = pickle.loads(described)
        self._tensors: dict[str, Any] = metadata.state_dict_metadata
        self._places: dict[Any, Any] = metadata.storage_data
        self._by_content = {place.digest: place for place in self._places.values()}

    def fits(self, rank: int, world_size: int, live: Iterable[Any]) -> bool:
        """Whether `of_rank` gives what the live state takes, as far as ranks and device meshes go."""
        if world_size != self.manifest.world_size:
            return False
        meshes = set(snapshot.live_meshes(live))
        saved = {
            hole.mesh for entry in self.entries(rank).values() for hole in entry.all_holes() if hole.mesh is not None
        }
        return saved <= meshes and bool(saved) == bool(meshes)

    def of_rank(self, rank: int) -> tuple[dict[str, bytes], list[Tensor]]:
        """The pickled entries and the tensors of one rank, as they were saved."""
        entries = self.entries(rank)
        listed = dict(sorted((number, here) for entry in entries.values() for number, here in entry.tensors.items()))
        tensors = self._read_tensors(listed)
        return {name: entry.pickled for name, entry in entries.items()}, [tensors[number] for number in listed]

    # -- reading -------------------------------------------------------------------------------------------------------

    def entries(self, rank: int) -> dict[str, Entry]:
        """One rank's entries, by name."""
        ending = entry_key("", rank)
        names = [key.removesuffix(ending) for key in self._tensors if key.endswith(ending)]
        return dict(zip(names, self._read_entries([entry_key(name, rank) for name in names]), strict=True))

    def entries_of(self, ranks: Iterable[int], name: str) -> Iterator[Entry]:
        """One entry as each of these ranks had it."""
        for rank in ranks:
            if entry_key(name, rank) in self._tensors:
                yield from self._read_entries([entry_key(name, rank)])

    def _read_entries(self, keys: Sequence[str]) -> list[Entry]:
        index = _index_class()
        packed: dict[str, Any] = {}
        self.read((self._places[index(key)], partial(packed.__setitem__, key)) for key in keys)
        return [
            Entry(packed[key]["pickle"], {number: TensorHere(*here) for number, *here in packed[key]["tensors"]})
            for key in keys
        ]

    def _read_tensors(self, listed: Mapping[int, TensorHere]) -> dict[int, Tensor]:
        """Each tensor with the strides that it had."""
        made = {
            number: torch.empty_strided(here.shape, here.stride, dtype=getattr(torch, here.dtype))
            for number, here in listed.items()
        }
        self.read(
            (self._by_content[here.content], partial(torch.Tensor.copy_, made[number]))
            for number, here in listed.items()
            if made[number].numel()
        )
        return made

    def size_of(self, key: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and type of a whole tensor; None: there is none of that name."""
        found = self._tensors.get(key)
        return None if found is None or not hasattr(found, "chunks") else (tuple(found.size), found.properties.dtype)

    def reads_into(self, key: str, target: Tensor, offset: Sequence[int]) -> Iterator[tuple[Any, Use]]:
        """What is to be read to fill `target`, which is the part of the whole tensor that begins at `offset`."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
        from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

        if not target.numel():
            return
        part = ChunkStorageMetadata(torch.Size(offset), target.shape)
        for item in create_read_items_for_chunk_list(key, self._tensors[key], [part]):
            into = _narrowed(target, item.dest_offsets, item.lengths)

            def use(chunk: Tensor, item: Any = item, into: Tensor = into) -> None:
                into.copy_(_narrowed(chunk, item.storage_offsets, item.lengths))

            yield self._places[item.storage_index], use

    def keys_below(self, entry: str) -> set[str]:
        """The names of an entry's tensors, without the versions that single ranks have of them."""
        tensors = (key for key, found in self._tensors.items() if hasattr(found, "chunks"))
        return {key for key in tensors if _is_below(key, entry) and not _OF_RANK.search(key)}

    def read(self, wanted: Iterable[tuple[Any, Use]]) -> None:
        """Read pieces, each once, and hand each to all who want it; neighbours come in one piece."""
        by_place: dict[tuple[str, int], tuple[Any, list[Use]]] = {}
        for place, use in wanted:
            by_place.setdefault((place.relative_path, place.offset), (place, []))[1].append(use)
        ranges = list(_ranges([by_place[key] for key in sorted(by_place)]))
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(self._read_range, ranges):
                pass

    def _read_range(self, pieces: list[tuple[Any, list[Use]]]) -> None:
        first, last = pieces[0][0], pieces[-1][0]
        raw = memoryview(self.folder.read(first.relative_path, first.offset, last.offset + last.length))
        with torch.no_grad():
            for place, uses in pieces:
                piece = raw[place.offset - first.offset :][: place.length]
                content = self._content(place, piece)
                for use in uses:
                    use(content)

    def _content(self, place: Any, piece: memoryview) -> Any:
        """What was written there, if it still is that."""
        try:
            if is_entry(place.digest):
                if content_of_entry(piece) == place.digest:
                    return torch.load(io.BytesIO(piece), weights_only=False)
            else:
                content = torch.load(io.BytesIO(piece), weights_only=True)
                if content_of(content) == place.digest:
                    return content
        except Exception:  # damage shows as any of many errors
            pass
        raise StoreDamaged(
            f"store {self.folder.url}: {place.relative_path} is damaged between bytes {place.offset:,} and "
            f"{place.offset + place.length:,}{self._instead}"
        )

    @property
    def _instead(self) -> str:
        return f"; without its {store_files.MANIFEST} an older step is taken"


def _ranges(pieces: Sequence[tuple[Any, list[Use]]]) -> Iterator[list[tuple[Any, list[Use]]]]:
    together: list[tuple[Any, list[Use]]] = []
    for piece in pieces:
        if together:
            first, last, place = together[0][0], together[-1][0], piece[0]
            is_near = (
                place.relative_path == first.relative_path
                and place.offset - last.offset - last.length <= _GAP_BYTES
                and place.offset + place.length - first.offset <= _RANGE_BYTES
            )
            if not is_near:
                yield together
                together = []
        together.append(piece)
    if together:
        yield together


# -- pickles with holes ------------------------------------------------------------------------------------------------


class _Holes(pickle.Unpickler):
    """An entry with a `Hole` in the place of each tensor; `found` are all of them."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(io.BytesIO(entry.pickled))
        self._tensors = entry.tensors
        self.found: list[Hole] = []

    def persistent_load(self, identity: Any) -> Hole:
        hole = Hole(identity[0], self._tensors[identity[0]], identity[1] if len(identity) > 1 else None)
        self.found.append(hole)
        return hole


class _Filled(pickle.Unpickler):
    """An entry with the tensors that are there; what nobody has asked for stays empty."""

    def __init__(self, pickled: bytes, tensors: Mapping[int, Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, identity: Any) -> Tensor | None:
        return self._tensors.get(identity[0])


def _is_below(key: str, entry: str) -> bool:
    return key == entry or key.startswith(f"{entry}.")


def _narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def _index_class() -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex
