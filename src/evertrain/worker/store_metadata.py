"""What does a step's `.metadata` say, once all writers have said what they have? In PyTorch's own words.

key                 a tensor, in chunks where ranks have different parts of it (DTensor)
key@rank3           rank 3's own version of it, where ranks that should have the same have not
entry@rank3.pickle  what is no tensor in an entry of rank 3's state, and the names of the tensors that belong in it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from evertrain.worker.store_files import Folder

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

Item = tuple[str, int, int]
"""File, offset and length of something that was written."""


class TensorHere(NamedTuple):
    """A tensor, or a rank's part of one, and its content."""

    key: str
    dtype: str
    shape: list[int]
    stride: list[int]
    whole: list[int]
    """Shape of the whole tensor."""
    offset: list[int] | None
    """Where this part begins in it; None: not a DTensor, every rank has all of it."""
    content: str
    """Digest of type, shape and elements."""


class Written(NamedTuple):
    """One rank's state, in the words of its writer."""

    tensors: list[TensorHere]
    entries: dict[str, str]


def all_done(plans: Folder, world_size: int) -> tuple[dict[int, Written], list[Any]]:
    """What the ranks have, by rank, and what the writers have said of it."""
    ranks: dict[int, Written] = {}
    said = []
    for name in plans.names():
        one = plans.read_json(name) if name.startswith("done-") else None
        if one is None or one["world_size"] != world_size:
            continue
        said.append(one)
        for rank, written in one["ranks"].items():
            tensors = [TensorHere(*tensor) for tensor in written["tensors"]]
            ranks[int(rank)] = Written(tensors, written["entries"])
    return dict(sorted(ranks.items())), said


def metadata(ranks: Mapping[int, Written], wrote: Mapping[str, Item]) -> Metadata:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    found = Metadata(state_dict_metadata={}, planner_data={}, storage_data={})

    def store(index: Any, content: str) -> None:
        found.storage_data[index] = info = _StorageInfo(*wrote[content])
        info.digest = content  # type: ignore[attr-defined]  # what `load` checks by; PyTorch does not look at it

    for key, entry, chunks in _tensors(ranks):
        first = chunks[0]
        sizes = [torch.Size(chunk.shape) for chunk in chunks]
        offsets = [torch.Size(chunk.offset or [0] * len(chunk.shape)) for chunk in chunks]
        found.state_dict_metadata[key] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, first.dtype)),
            torch.Size(first.whole),
            [ChunkStorageMetadata(offset, size) for offset, size in zip(offsets, sizes, strict=True)],
        )
        for number, (chunk, offset) in enumerate(zip(chunks, offsets, strict=True)):
            store(MetadataIndex(key, offset, number), chunk.content)
        rest = key.removeprefix(f"{entry}.")
        found.planner_data[key] = (key,) if rest == key else (entry, rest)
    for rank, written in ranks.items():
        for entry, content in written.entries.items():
            key = entry_key(entry, rank)
            found.state_dict_metadata[key] = BytesStorageMetadata()
            found.planner_data[key] = (key,)
            store(MetadataIndex(key), content)
    return found


def entry_key(entry: str, rank: int) -> str:
    return f"{entry}@rank{rank}.pickle"


def rank_key(key: str, rank: int) -> str:
    return f"{key}@rank{rank}"


def _tensors(ranks: Mapping[int, Written]) -> Iterator[tuple[str, str, list[TensorHere]]]:
    """Key, entry and chunks of each tensor of the step.

    The first rank's version of something is the one under the plain key; ranks that differ have their own beside it.
    """
    common: dict[str, dict[tuple[int, ...], TensorHere]] = {}
    own: list[tuple[str, TensorHere]] = []
    by_key: dict[str, list[tuple[int, TensorHere]]] = {}
    for rank, written in ranks.items():
        for tensor in written.tensors:
            by_key.setdefault(tensor.key, []).append((rank, tensor))
    entries = sorted({entry for written in ranks.values() for entry in written.entries}, key=len, reverse=True)
    for key, versions in by_key.items():
        first = versions[0][1]
        chunks = common.setdefault(key, {})
        others = []
        for rank, tensor in versions:
            same = (tensor.dtype, tensor.whole, tensor.offset is None) == (
                first.dtype,
                first.whole,
                first.offset is None,
            )
            if same and 0 in tensor.shape and 0 not in tensor.whole:
                continue  # this rank has nothing of it
            known = chunks.setdefault(tuple(tensor.offset or ()), tensor) if same else None
            if known is None or (known.shape, known.content) != (tensor.shape, tensor.content):
                others.append((rank, tensor))
        if sum(_count(chunk.shape) for chunk in chunks.values()) != _count(first.whole):
            # parts that do not add up (a sum that is still to be made): each rank can have its own back, no more
            del common[key]
            others = versions
        own += [(rank_key(key, rank), _alone(tensor)) for rank, tensor in others]
    found = [(key, list(chunks.values())) for key, chunks in common.items()]
    for key, tensors in (*found, *((key, [tensor]) for key, tensor in own)):
        entry = next((entry for entry in entries if key.startswith(f"{entry}.")), key)
        yield key, entry, tensors


def _alone(tensor: TensorHere) -> TensorHere:
    """A rank's part as a whole of its own."""
    return tensor._replace(whole=tensor.shape, offset=None)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
