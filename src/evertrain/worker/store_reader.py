"""How does a rank get its state from the store?

As many ranks on the same device meshes as when it was saved: `of_rank` gives back exactly what this rank saved, bit for
bit. Otherwise `spread` divides model and optimizer anew: each tensor is filled from the chunks that it overlaps, an
optimizer's state is found by the names of its parameters, and what belongs to a rank and cannot be divided (random
numbers, loaders) is taken from rank `rank % ranks then`. Everything that is read is checked against its digest.
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

from evertrain.worker import directory, snapshot, store_files
from evertrain.worker.snapshot import SnapshotError
from evertrain.worker.store_files import METADATA, Folder, StoreError
from evertrain.worker.store_writer import (
    TensorHere,
    content_of,
    content_of_entry,
    entry_key,
    is_entry,
    rank_key,
    unique,
)

_RANGE_BYTES = 64 << 20
"""Neighbours in a file are read together up to so many bytes,"""
_GAP_BYTES = 1 << 20
"""... and with no more than this between them that nobody wants."""
_THREADS = 4

_OF_RANK = re.compile(r"@rank\d+$")

Use = Callable[[Any], object]


class _Hole(NamedTuple):
    """Where a tensor belongs in an entry."""

    number: int
    """Among all tensors of the rank."""
    here: TensorHere
    mesh: Any
    """Identifies the device mesh of a DTensor; None: a plain tensor."""


class _Entry(NamedTuple):
    """One entry of one rank's state, its tensors not read yet."""

    pickled: bytes
    tensors: dict[int, TensorHere]

    def holes(self) -> Any:
        """The entry with a `_Hole` in the place of each tensor."""
        return _Holes(self).load()

    def all_holes(self) -> list[_Hole]:
        """Those in places that nobody can look into as well."""
        unpickler = _Holes(self)
        unpickler.load()
        return unpickler.found

    def whole(self, tensors: Mapping[int, Tensor]) -> Any:
        return _Filled(self.pickled, tensors).load()


class StoredStep:
    """A committed step; raises StoreError where it is not what its manifest promises."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        manifest = store_files.read_manifest(folder)
        if manifest is None:
            raise StoreError(f"store {folder.url}: there is no {store_files.MANIFEST}, so the step does not exist")
        self.manifest = manifest
        described = folder.read(METADATA)
        if store_files.digest(described) != manifest.files[METADATA].digest:
            raise StoreError(f"store {folder.url}: {METADATA} does not match its checksum{self._instead}")
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
            hole.mesh for entry in self._entries(rank).values() for hole in entry.all_holes() if hole.mesh is not None
        }
        return saved <= meshes and bool(saved) == bool(meshes)

    def of_rank(self, rank: int) -> tuple[dict[str, bytes], list[Tensor]]:
        """The pickled entries and the tensors of one rank, as they were saved."""
        entries = self._entries(rank)
        listed = dict(sorted((number, here) for entry in entries.values() for number, here in entry.tensors.items()))
        tensors = self._read_tensors(listed)
        return {name: entry.pickled for name, entry in entries.items()}, [tensors[number] for number in listed]

    def spread(self, live: Mapping[str, Any], rank: int, *, aside: str) -> Any:
        """Divide the state anew into the live one; returns the entry `aside`, which is not part of that."""
        source = rank % self.manifest.world_size
        saved = self._entries(source)
        if missing := live.keys() - saved.keys():
            raise SnapshotError(f"it has no {', '.join(map(repr, sorted(missing)))}")
        if unknown := saved.keys() - live.keys() - {aside}:
            raise SnapshotError(f"it has {', '.join(map(repr, sorted(unknown)))}, which the Checkpointer was not given")
        wanted = _Wanted(self, source)
        finish = [_into(name, value, saved[name], live, wanted) for name, value in live.items()]
        put_aside = _whole(saved[aside], wanted)
        self.read(wanted.reads)
        for done in finish:
            done()
        return put_aside()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _entries(self, rank: int) -> dict[str, _Entry]:
        """One rank's entries, by name."""
        ending = entry_key("", rank)
        names = [key.removesuffix(ending) for key in self._tensors if key.endswith(ending)]
        return dict(zip(names, self._read_entries([entry_key(name, rank) for name in names]), strict=True))

    def entries_of(self, ranks: Iterable[int], name: str) -> Iterator[_Entry]:
        """One entry as each of these ranks had it."""
        for rank in ranks:
            if entry_key(name, rank) in self._tensors:
                yield from self._read_entries([entry_key(name, rank)])

    def _read_entries(self, keys: Sequence[str]) -> list[_Entry]:
        index = _index_class()
        packed: dict[str, Any] = {}
        self.read((self._places[index(key)], partial(packed.__setitem__, key)) for key in keys)
        return [
            _Entry(packed[key]["pickle"], {number: TensorHere(*here) for number, *here in packed[key]["tensors"]})
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
        raise StoreError(
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


# -- another division ------------------------------------------------------------------------------------------------


class _Wanted:
    """What has to be read for a state that is divided anew."""

    def __init__(self, step: StoredStep, source: int) -> None:
        self.step = step
        self.source = source
        self.reads: list[tuple[Any, Use]] = []

    def fill(self, key: str, target: Tensor, *, what: str = "") -> None:
        """Have a live tensor filled, from the version of the rank that this one follows if there is one."""
        placed: Any = target
        shape, offset, local = tuple(target.shape), [0] * target.dim(), target
        if hasattr(placed, "device_mesh"):
            offset = directory.shard(placed)["offset"]
            local = placed.to_local()
        elif self.step.size_of(rank_key(key, self.source)) is not None:
            key = rank_key(key, self.source)
        found = self.step.size_of(key)
        if found is None:
            raise SnapshotError(f"{what or key} is not in the checkpoint")
        if found[0] != shape:
            raise SnapshotError(f"{what or key} has the shape {shape} and had {found[0]} when it was saved")
        self.reads += self.step.reads_into(key, local, offset)

    def like(self, hole: _Hole, live: Tensor | None) -> Tensor:
        """A new tensor for a hole, divided as the live one of the same shape is; else whole."""
        dtype = getattr(torch, hole.here.dtype)
        placed: Any = live
        made: Tensor
        if placed is not None and hasattr(placed, "device_mesh") and tuple(placed.shape) == tuple(hole.here.whole):
            from torch.distributed.tensor import DTensor

            local = torch.empty(placed.to_local().shape, dtype=dtype, device=placed.device_mesh.device_type)
            made = DTensor.from_local(
                local,
                placed.device_mesh,
                placed.placements,
                run_check=False,
                shape=placed.shape,
                stride=placed.stride(),
            )
        elif hole.mesh is not None and placed is not None and hasattr(placed, "device_mesh"):
            raise SnapshotError(f"{hole.here.key} was divided, and there is nothing of its shape to divide it by now")
        elif hole.mesh is None:
            made = torch.empty_strided(hole.here.shape, hole.here.stride, dtype=dtype)
        else:
            made = torch.empty(hole.here.whole, dtype=dtype)
        self.fill(hole.here.key, made)
        return made


def _into(name: str, value: Any, saved: _Entry, live: Mapping[str, Any], wanted: _Wanted) -> Callable[[], None]:
    """Note what an entry needs; what is returned puts it in place when all is read."""
    if isinstance(value, Tensor):
        wanted.fill(name, value)
        return lambda: None
    if isinstance(value, torch.nn.Module):
        return _into_module(name, value, saved, wanted)
    if isinstance(value, torch.optim.Optimizer):
        return _into_optimizer(name, value, saved, live, wanted)
    divided = any(hole.mesh is not None for hole in saved.all_holes())
    now = dict(_named(name, value.state_dict())) if divided else {}
    whole = _whole(saved, wanted, now)
    return lambda: value.load_state_dict(whole())


def _whole(saved: _Entry, wanted: _Wanted, live: Mapping[str, Tensor] | None = None) -> Callable[[], Any]:
    """An entry with all its tensors, divided as the live ones of their names are."""
    tensors = {hole.number: wanted.like(hole, (live or {}).get(hole.here.key)) for hole in saved.all_holes()}
    return lambda: saved.whole(tensors)


def _into_module(name: str, module: torch.nn.Module, saved: _Entry, wanted: _Wanted) -> Callable[[], None]:
    """Its tensors are filled in place, shards and all."""
    now = module.state_dict()
    there = wanted.step.keys_below(name)
    tensors = dict(_named(name, now))
    # of a pipeline each rank has a part only, and it need not be the same one as before
    is_whole = there == {here.key for here in saved.tensors.values()}
    if is_whole and (gone := sorted(there - tensors.keys())):
        raise SnapshotError(f"it has {gone[0]}, which the model has no more")
    for key, tensor in tensors.items():
        wanted.fill(key, tensor.detach(), what=key)
    others = [key for key, tensor in now.items() if not isinstance(tensor, Tensor)]
    extra = _whole(saved, wanted) if others else None

    def done() -> None:
        if extra is not None:
            then = extra()
            now.update((key, then[key]) for key in others if key in then)
        module.load_state_dict(now)

    return done


def _into_optimizer(
    name: str, optimizer: torch.optim.Optimizer, saved: _Entry, live: Mapping[str, Any], wanted: _Wanted
) -> Callable[[], None]:
    """State by the names of parameters, which need not have any yet; settings of its groups as they were."""
    known = directory.parameters(live)
    groups = optimizer.state_dict()["param_groups"]
    parameters = {
        known.get(id(parameter), str(number)): (number, parameter)
        for group, listed in zip(optimizer.param_groups, groups, strict=True)
        for parameter, number in zip(group["params"], listed["params"], strict=True)
    }
    then = saved.holes()
    if len(then["param_groups"]) != len(groups):
        raise SnapshotError(
            f"{name} has {len(groups)} groups of parameters and had {len(then['param_groups'])} when it was saved"
        )
    settings = {
        hole.number: wanted.like(hole, None) for _, hole in directory.walk(then["param_groups"], "", _Hole)
    }  # fmt: skip
    left = dict(parameters)
    taken = [_take_state(name, saved, left, wanted)]
    if left and then["state"]:  # ranks of a pipeline have different parameters
        others = (rank for rank in range(wanted.step.manifest.world_size) if rank != wanted.source)
        for entry in wanted.step.entries_of(others, name):
            taken.append(_take_state(name, entry, left, wanted))
            if not left:
                break

    def done() -> None:
        state = {number: part for entry in taken for number, part in entry().items()}
        was = saved.whole(settings)["param_groups"]
        divided = [{**group, "params": listed["params"]} for group, listed in zip(was, groups, strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": divided})

    return done


def _take_state(
    name: str, entry: _Entry, left: dict[str, tuple[int, Tensor]], wanted: _Wanted
) -> Callable[[], dict[int, Any]]:
    """What a saved optimizer knows of the parameters that are `left`, which it takes from these."""
    numbers: dict[Any, int] = {}
    tensors: dict[int, Tensor] = {}
    for old, part in entry.holes()["state"].items():
        holes = list(directory.walk(part, "", _Hole))
        # without a tensor a parameter's state has no name; in plain settings it is the same one as before
        path, first = holes[0] if holes else ("", None)
        of = first.here.key.removeprefix(f"{name}.state.").removesuffix(path) if first is not None else str(old)
        if of in left:
            numbers[old], live = left.pop(of)
            tensors |= {hole.number: wanted.like(hole, live) for _, hole in holes}

    def done() -> dict[int, Any]:
        state = entry.whole(tensors)["state"]
        return {number: state[old] for old, number in numbers.items()}

    return done


# -- pickles with holes ------------------------------------------------------------------------------------------------


class _Holes(pickle.Unpickler):
    """An entry with a `_Hole` in the place of each tensor; `found` are all of them."""

    def __init__(self, entry: _Entry) -> None:
        super().__init__(io.BytesIO(entry.pickled))
        self._tensors = entry.tensors
        self.found: list[_Hole] = []

    def persistent_load(self, identity: Any) -> _Hole:
        hole = _Hole(identity[0], self._tensors[identity[0]], identity[1] if len(identity) > 1 else None)
        self.found.append(hole)
        return hole


class _Filled(pickle.Unpickler):
    """An entry with the tensors that are there; what nobody has asked for stays empty."""

    def __init__(self, pickled: bytes, tensors: Mapping[int, Tensor]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors

    def persistent_load(self, identity: Any) -> Tensor | None:
        return self._tensors.get(identity[0])


def _named(entry: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state by their keys."""
    found = list(directory.walk(state, entry))
    return zip(unique([path for path, _ in found]), (tensor for _, tensor in found), strict=True)


def _is_below(key: str, entry: str) -> bool:
    return key == entry or key.startswith(f"{entry}.")


def _narrowed(tensor: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    for dimension, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, offset, length)
    return tensor


def _index_class() -> Any:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return MetadataIndex
