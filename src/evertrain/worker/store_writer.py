"""How does a step get into the store? In PyTorch's Distributed Checkpoint format, without a process group.

Each writer (a node's upload process, or a rank outside `evertrain run`) says what it has, by content; looks who else
has the same; writes its share and says what it wrote. Whoever finishes reads what all have said and writes `.metadata`:

    has-0.json, has-4.json, …  ─▶  __0_….distcp, __4_….distcp, …  ─▶  done-0.json, done-4.json, …  ─▶  .metadata

Nobody has to wait for anybody: of all writers with some content the one that comes first in an order of that content's
own always writes it, because the others that it sees never change that. Who sees too few only writes too much.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import sys
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from evertrain.worker import slots, store_files
from evertrain.worker.slot_file import SavedSlot, SlotDamaged
from evertrain.worker.store_files import FILES, METADATA, File, Folder, StoreError
from evertrain.worker.store_metadata import Item, TensorHere, all_done, metadata

_FILE_BYTES = 512 << 20
"""A new file begins after so many bytes."""
_LOOK_S = 0.2


class RankState(NamedTuple):
    """One rank's state, taken apart as `worker.snapshot` does."""

    rank: int
    world_size: int
    entries: Mapping[str, bytes]
    tensors: Sequence[Tensor]
    directory: dict[str, Any]
    """As in a slot (`worker.directory`); describes `tensors` in their order."""
    code: str = ""


def read_slot(path: str) -> RankState:
    """The state in a file of slot format, all of it checked; raises StoreError."""
    header = slots.read(path)
    if header is None or header.state != slots.COMPLETE:
        raise StoreError(f"{path} is gone, damaged or incomplete")
    try:
        saved = SavedSlot(path, header)
        saved.copy_out({})  # only to see that all of it is whole
    except (SlotDamaged, OSError) as damage:
        raise StoreError(f"{path}: {damage}") from damage
    with open(path, "rb") as file:
        file.seek(header.directory_at)
        directory = json.loads(file.read(header.directory_bytes))
    return RankState(header.rank, header.world_size, saved.entries, saved.tensors, directory, header.code)


def write(folder: Folder, upload: str, states: Sequence[RankState], *, writers: int = 1, wait_s: float = 0.0) -> None:
    """Write this writer's share of a step. So long may it look out for the other writers' lists."""
    plans = folder.at(f"plans-{upload}")
    name = str(states[0].rank)
    if plans.read_json(f"done-{name}.json") is not None:
        return  # an earlier process of this upload had come to its end
    has = _Contents(states)
    plans.write_json(f"has-{name}.json", sorted(has.pieces))
    others = _others(plans, name, writers, wait_s)
    done = [said for other in others if (said := plans.read_json(f"done-{other}.json")) is not None]
    written = {content for said in done for content in said["wrote"]}
    mine = share([content for content in has.pieces if content not in written], name, others)
    wrote, files = _write_files(folder, upload, has, mine)
    said = {
        "world_size": states[0].world_size,
        "code": states[0].code,
        "made_by": states[0].directory["made_by"],
        "ranks": {str(state.rank): has.described[state.rank] for state in states},
        "wrote": wrote,
        "files": files,
    }
    plans.write_json(f"done-{name}.json", said)


def is_written(folder: Folder, upload: str, world_size: int) -> bool:
    """Whether every rank's state has been written."""
    return len(all_done(folder.at(f"plans-{upload}"), world_size)[0]) == world_size


def finish(folder: Folder, upload: str, world_size: int) -> None:
    """All have written their share: say what lies where. What is left is to commit the step."""
    ranks, said = all_done(folder.at(f"plans-{upload}"), world_size)
    if missing := [rank for rank in range(world_size) if rank not in ranks]:
        raise StoreError(f"store {folder.url}: the state of rank {missing[0]} was not written")
    wrote: dict[str, Item] = {}
    files: dict[str, File] = {}
    for one in said:
        wrote |= {content: tuple(item) for content, item in one["wrote"].items() if content not in wrote}
        files |= {name: File(*file) for name, file in one["files"].items()}
    needed = {tensor.content for rank in ranks.values() for tensor in rank.tensors}
    needed |= {content for rank in ranks.values() for content in rank.entries.values()}
    if lost := needed - wrote.keys():
        raise StoreError(f"store {folder.url}: {len(lost)} pieces of the state were written by nobody")
    store_files.uncommit(folder)
    described = pickle.dumps(metadata(ranks, wrote))
    folder.write(METADATA, described)
    used = {wrote[content][0] for content in needed}
    files = {name: file for name, file in files.items() if name in used}
    files[METADATA] = File(len(described), store_files.digest(described))
    folder.write_json(FILES, {"files": files, "made_by": said[0]["made_by"], "code": said[0]["code"]})


# -- what there is ---------------------------------------------------------------------------------------------------


class _Contents:
    """Everything that some ranks have, each content once."""

    def __init__(self, states: Sequence[RankState]) -> None:
        self.pieces: dict[str, tuple[int, Tensor | bytes]] = {}
        """By digest: a rank that has it, and the tensor, or the file of an entry's pickle."""
        self.described: dict[int, dict[str, Any]] = {}
        for state in states:
            self._add(state)

    def _add(self, state: RankState) -> None:
        tensors = []
        entries = {}
        numbers = iter(range(len(state.tensors)))
        keys = unique([tensor["name"] for part in state.directory["parts"] for tensor in part["tensors"]])
        for part in state.directory["parts"]:
            of_entry = []
            for said, number in zip(part["tensors"], numbers, strict=False):
                tensor = state.tensors[number]
                content = content_of(tensor)
                self.pieces.setdefault(content, (state.rank, tensor))
                shard = said.get("shard") or {"shape": said["shape"], "offset": None}
                here = TensorHere(
                    keys[number], said["dtype"], said["shape"], said["stride"], shard["shape"], shard["offset"], content
                )
                tensors.append(here)
                of_entry.append((number, *here))
            packed = pack_entry(state.entries[part["name"]], of_entry)
            content = content_of_entry(packed)
            self.pieces.setdefault(content, (state.rank, packed))
            entries[part["name"]] = content
        self.described[state.rank] = {"tensors": tensors, "entries": entries}


def unique(names: Sequence[str]) -> list[str]:
    """One thing can lie at two places of a state under one name; each place has a key of its own."""
    seen: dict[str, int] = {}
    unique = []
    for name in names:
        seen[name] = number = seen.get(name, 0) + 1
        unique.append(name if number == 1 else f"{name}~{number}")
    return unique


def content_of(tensor: Tensor) -> str:
    """Digest of a tensor's type, shape and elements, whatever their order in memory."""
    found = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel():
        found.update(flat.view(torch.uint8).numpy().data)
    return found.hexdigest()


_ENTRY = "entry-"


def content_of_entry(packed: bytes | memoryview) -> str:
    return _ENTRY + store_files.digest(packed)


def is_entry(content: str) -> bool:
    """Whether this is the content of an entry, not of a tensor."""
    return content.startswith(_ENTRY)


def pack_entry(pickled: bytes, tensors: Sequence[Any]) -> bytes:
    """An entry without its tensors, as the bytes of a file that `torch.load` reads."""
    buffer = io.BytesIO()
    torch.save({"pickle": pickled, "tensors": [tuple(one) for one in tensors]}, buffer)
    return buffer.getvalue()


# -- who writes what -------------------------------------------------------------------------------------------------


def _others(plans: Folder, name: str, writers: int, wait_s: float) -> dict[str, frozenset[str]]:
    """What the other writers have, as far as they have said so."""
    deadline = time.monotonic() + wait_s
    found: dict[str, frozenset[str]] = {}
    while True:
        for file in plans.names():
            other = file.removeprefix("has-").removesuffix(".json")
            if file.startswith("has-") and other != name and other not in found:
                owned = plans.read_json(file)
                if owned is not None:
                    found[other] = frozenset(owned)
        if len(found) >= writers - 1 or time.monotonic() >= deadline:
            return found
        time.sleep(_LOOK_S)


def share(contents: Iterable[str], name: str, others: Mapping[str, Container[str]]) -> list[str]:
    """What this writer writes, by what it knows of the `others`."""
    return [
        content
        for content in contents
        if all(
            _priority(content, name) < _priority(content, other) for other, owned in others.items() if content in owned
        )
    ]


def _priority(content: str, writer: str) -> bytes:
    """The order of the writers for some content: any, but the same for all, and another one for other content."""
    return hashlib.blake2b(f"{content} {writer}".encode(), digest_size=8).digest() + writer.encode()


def _write_files(
    folder: Folder, upload: str, has: _Contents, mine: Iterable[str]
) -> tuple[dict[str, Item], dict[str, File]]:
    """Write some contents, each into a file of a rank that has it."""
    wrote: dict[str, Item] = {}
    files: dict[str, File] = {}
    by_rank: dict[int, list[str]] = {}
    for content in mine:
        by_rank.setdefault(has.pieces[content][0], []).append(content)
    for rank, contents in sorted(by_rank.items()):
        left = list(reversed(contents))
        number = 0
        while left:
            name = f"__{rank}_{upload}_{number}.distcp"
            with folder.writing(name) as file:
                while left and file.bytes < _FILE_BYTES:
                    content, begin = left.pop(), file.bytes
                    piece = has.pieces[content][1]
                    if isinstance(piece, bytes):
                        file.write(piece)
                    else:
                        # a view would be saved with all of the memory that it is a view of
                        copy = piece.detach().cpu().clone(memory_format=torch.contiguous_format)
                        torch.save(copy, file)  # type: ignore[arg-type]  # it only writes
                    wrote[content] = (name, begin, file.bytes - begin)
            files[name] = file.done()
            number += 1
    return wrote, files


# -- the program -----------------------------------------------------------------------------------------------------


def program() -> None:
    """What an agent starts: the order is in the file that is the only argument."""
    from evertrain.worker import disguise

    with open(sys.argv[1], encoding="utf-8") as file:
        order = json.load(file)
    disguise.die_with_parent(order["parent"])
    disguise.name_process("evertrain-upload")
    os.nice(10)
    torch.set_num_threads(1)
    try:
        folder = Folder(order["folder"])
        if order["paths"]:
            states = [read_slot(path) for path in order["paths"]]
            write(folder, order["upload"], states, writers=order["writers"], wait_s=order["wait_s"])
        if order["finish"]:
            finish(folder, order["upload"], order["world_size"])
    except StoreError as error:
        sys.exit(str(error))
