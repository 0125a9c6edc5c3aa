"""How does a checkpoint become a file that anybody can load? Run by the interpreter of the ranks, with one argument.

    {"files": ["…/r0", "…/r1"], "to": "step-40.pt", "format": "torch", "only": ["model"], "shards": false}

Shards of a tensor are put together again, unless they are wanted as they are. What is the same on all ranks is written
once; entries that differ in parts (pipeline stages) are joined; what cannot be joined, as the states of random number
generators, is there for each rank, under `by_rank`. `safetensors` takes tensors only, by their names.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evertrain.worker import slots
from evertrain.worker.slot_file import SavedSlot, SlotDamaged

State = dict[str, Any]


class ExportError(Exception):
    """Why there is no export, in one line."""


class _Copy:
    """One rank's copy: its tensors, what the directory says of them, and the pickles around them."""

    def __init__(self, path: str) -> None:
        header = slots.read(path)
        if header is None or header.state != slots.COMPLETE:
            raise ExportError(f"{path} is damaged or incomplete")
        try:
            saved = SavedSlot(path, header)
            saved.copy_out({})  # verifies all of it
        except SlotDamaged as damage:
            raise ExportError(f"{path}: {damage}") from damage
        self.entries, self.tensors = saved.entries, saved.tensors
        with open(path, "rb") as file:
            file.seek(header.directory_at)
            listed = json.loads(file.read(header.directory_bytes))["parts"]
        self.rank = header.rank
        self.described = [tensor for part in listed for tensor in part["tensors"]]


def collect(files: Sequence[str]) -> tuple[list[_Copy], dict[str, Tensor]]:
    """The copies of all ranks, and every tensor that is divided among them, whole, by its name."""
    copies = sorted(map(_Copy, files), key=lambda copy: copy.rank)
    wholes: dict[str, Tensor] = {}
    for copy in copies:
        for tensor, said in zip(copy.tensors, copy.described, strict=True):
            shard = said.get("shard")
            if shard is None:
                continue
            name, offset = said["name"], tuple(shard["offset"])
            if name not in wholes:
                wholes[name] = torch.zeros(shard["shape"], dtype=tensor.dtype)
            place = tuple(slice(begin, begin + size) for begin, size in zip(offset, tensor.shape, strict=True))
            wholes[name][place].copy_(tensor)
    return copies, wholes


def states(copies: Sequence[_Copy], wholes: Mapping[str, Tensor], only: Sequence[str]) -> State:
    """The state as one process would have it."""
    found: State = {}
    by_rank: dict[str, dict[int, Any]] = {}
    names = dict.fromkeys(name for copy in copies for name in copy.entries if not only or name in only)
    for name in names:
        values = {copy.rank: _rebuilt(copy, name, wholes) for copy in copies if name in copy.entries}
        owners = {copy.rank: _owners(copy, name, values[copy.rank]) for copy in copies if copy.rank in values}
        if len({tuple(of_rank.items()) for of_rank in owners.values()}) > 1:
            # stages number their parameters each from 0: only names tell them apart
            values = {rank: _by_name(value, owners[rank]) for rank, value in values.items()}
        try:
            found[name] = _joined(name, list(values.values()))
        except _Different:
            by_rank[name] = values  # random number generators, loaders: each rank's own
    if by_rank:
        found["by_rank"] = by_rank
    return found


def tensors(copies: Sequence[_Copy], wholes: Mapping[str, Tensor], only: Sequence[str]) -> dict[str, Tensor]:
    """Every tensor by its name; one that differs between ranks once for each."""
    found: dict[str, Tensor] = {}
    for copy in copies:
        for tensor, said in zip(copy.tensors, copy.described, strict=True):
            name = said["name"]
            if only and not any(name == entry or name.startswith(f"{entry}.") for entry in only):
                continue
            value = wholes.get(name, tensor)
            if name in found and not _equal(found[name], value):
                name = f"{name}@rank{copy.rank}"
            found[name] = value.contiguous()
    if len(only) == 1:
        prefix = f"{only[0]}."
        return {name.removeprefix(prefix): value for name, value in found.items()}
    return found


class _Different(Exception):
    pass


class _Whole(pickle.Unpickler):
    """Puts an entry together with whole tensors in place of shards."""

    def __init__(self, entry: bytes, copy: _Copy, wholes: Mapping[str, Tensor]) -> None:
        super().__init__(io.BytesIO(entry))
        self._copy = copy
        self._wholes = wholes

    def persistent_load(self, identity: Any) -> Tensor:
        index = identity[0]
        said = self._copy.described[index]
        whole = self._wholes.get(said["name"]) if "shard" in said else None
        return whole if whole is not None else self._copy.tensors[index].clone()


def _rebuilt(copy: _Copy, name: str, wholes: Mapping[str, Tensor]) -> Any:
    return _Whole(copy.entries[name], copy, wholes).load()


def _owners(copy: _Copy, entry: str, value: Any) -> dict[Any, str]:
    """The parameter that each number in an optimizer's state stands for; empty where that is not known."""
    if not (isinstance(value, dict) and value.keys() >= {"state", "param_groups"}):
        return {}
    beginning = f"{entry}.state."
    known = [said["name"] for said in copy.described if said["name"].startswith(beginning)]
    owners = list(dict.fromkeys(name.removeprefix(beginning).rpartition(".")[0] for name in known))
    numbers = list(value["state"])
    if len(owners) != len(numbers) or any(owner.isdigit() for owner in owners):
        return {}
    return dict(zip(numbers, owners, strict=True))


def _by_name(optimizer: State, owners: Mapping[Any, str]) -> State:
    groups = [
        {**group, "params": [owners.get(number, number) for number in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    state = {owners.get(number, number): value for number, value in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": groups}


def _joined(name: str, values: list[Any]) -> Any:
    first, *others = values
    if all(_equal(first, other) for other in others):
        return first
    if not all(isinstance(value, dict) for value in values):
        raise _Different(name)
    joined: State = {}
    for key in dict.fromkeys(key for value in values for key in value):
        having = [value[key] for value in values if key in value]
        if name and key == "param_groups":
            joined[key] = _groups(having)
        else:
            joined[key] = _joined("", having)
    return joined


def _groups(ranks: list[list[State]]) -> list[State]:
    """Parameter groups of stages: the same options, each with its own parameters."""
    if len({len(groups) for groups in ranks}) != 1:
        raise _Different
    joined = []
    for same in zip(*ranks, strict=True):
        options = [{key: value for key, value in group.items() if key != "params"} for group in same]
        if not all(_equal(options[0], other) for other in options):
            raise _Different
        params = list(dict.fromkeys(parameter for group in same for parameter in group["params"]))
        joined.append({**options[0], "params": params})
    return joined


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one, other)
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def write(spec: Mapping[str, Any]) -> str:
    """Do what the spec says; a line for the user."""
    copies, wholes = collect(spec["files"])
    if spec["shards"]:
        wholes = {}
    partial = f"{spec['to']}.partial"
    if spec["format"] == "safetensors":
        try:
            from safetensors.torch import save_file
        except ImportError as error:
            raise ExportError(
                f"{sys.executable} has no safetensors; install it there, or use --format torch"
            ) from error
        named = tensors(copies, wholes, spec["only"])
        save_file(named, partial)
        said = f"{len(named)} tensors"
    else:
        state = states(copies, wholes, spec["only"])
        torch.save(state, partial)
        said = ", ".join(name for name in state if name != "by_rank")
        if "by_rank" in state:
            said += f"; by rank: {', '.join(state['by_rank'])}"
    os.replace(partial, spec["to"])
    return f"{said} of {len(copies)} ranks, {os.stat(spec['to']).st_size:,} bytes"


def main() -> int:
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    try:
        print(write(spec))
    except (ExportError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
