"""What lies where in a slot, in words that programs without torch read? The JSON directory of a slot.

    {"parts":   [{"name": "model", "offset": 0, "bytes": 1048576, "tensors": [
                     {"name": "model.head.weight", "dtype": "float32", "shape": [256, 160], "stride": [160, 1],
                      "offset": 0, "bytes": 163840,                      from the beginning of the data
                      "shard": {"shape": [1024, 160], "offset": [256, 0]}}]}],  the whole tensor, and our place in it
     "groups":  [[0, 1], [0, 2]],                                         process groups that this rank is a member of
     "made_by": {"torch": "2.13.0", "threads": 1, "cpu": "AVX512"},
     "store":   null}

Tensors are named by their path in the state. An optimizer's are named after their parameter, not its number, so that
the name says the same on every rank: `optimizer.state.model.head.weight.exp_avg`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evertrain.worker.slots import HEADER_BYTES, Part
from evertrain.worker.snapshot import Snapshot, TensorPlace


def names(taken: Mapping[str, Any], live: Mapping[str, Any]) -> dict[int, str]:
    """The name of each tensor in `taken`, by its `id`: the states that the `live` objects of the same names gave."""
    found: dict[int, str] = {}
    known = parameters(live)
    for entry, state in taken.items():
        optimizer = live.get(entry)
        if isinstance(optimizer, torch.optim.Optimizer) and isinstance(state, Mapping) and "state" in state:
            state = {**state, "state": _by_parameter(state, optimizer, known)}
        for path, tensor in walk(state, entry):
            found.setdefault(id(tensor), path)
    return found


def of_snapshot(
    taken: Snapshot,
    places: Sequence[TensorPlace],
    parts: Sequence[Part],
    known: Mapping[int, str],
    store: Mapping[str, Any] | None = None,
) -> bytes:
    """The directory of a snapshot that is laid out like this; `known` are the names of its tensors."""
    described = iter(zip(taken.tensors, taken.wholes, places, strict=True))
    listed = []
    for part, count in zip(parts, taken.counts, strict=True):
        tensors = [
            _described(known.get(id(whole), f"{part.name}.{number}"), tensor, whole, place)
            for number, (tensor, whole, place) in enumerate(itertools.islice(described, count))
        ]
        listed.append({**part._asdict(), "tensors": tensors})
    said = {"parts": listed, "groups": groups(), "made_by": made_by(), "store": store}
    return json.dumps(said, separators=(",", ":")).encode()


def _described(name: str, tensor: Tensor, whole: Tensor, place: TensorPlace) -> dict[str, Any]:
    said: dict[str, Any] = {
        "name": name,
        "dtype": str(place.dtype).removeprefix("torch."),
        "shape": list(place.shape),
        "stride": list(place.stride),
        "offset": place.offset - HEADER_BYTES,
        "bytes": tensor.numel() * tensor.element_size(),
    }
    if hasattr(whole, "device_mesh"):
        said["shard"] = shard(whole)
    return said


def shard(tensor: Any) -> dict[str, Any]:
    """Shape of the whole DTensor, and where in it this rank's shard begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return {"shape": list(tensor.shape), "offset": list(offset), "placements": [str(one) for one in tensor.placements]}


def groups() -> list[list[int]]:
    """The process groups of this rank with more than one member, by their ranks."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return []
    found = {tuple(sorted(ranks)) for ranks in c10d._world.pg_group_ranks.values()}
    return sorted(list(ranks) for ranks in found if len(ranks) > 1)


def made_by() -> dict[str, Any]:
    """What bits depend on beside the state itself."""
    return {
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def parameters(live: Mapping[str, Any]) -> dict[int, str]:
    """The name of each parameter of the live modules, by its `id`."""
    return {
        id(parameter): f"{entry}.{name}"
        for entry, value in live.items()
        if isinstance(value, torch.nn.Module)
        for name, parameter in value.named_parameters(remove_duplicate=False)
    }


def _by_parameter(state: Mapping[str, Any], optimizer: torch.optim.Optimizer, known: Mapping[int, str]) -> Any:
    """An optimizer's state with the names of its parameters in place of their numbers, where these are known."""
    numbered: dict[Any, str] = {}
    for group, live in zip(state["param_groups"], optimizer.param_groups, strict=False):
        for number, parameter in zip(group["params"], live["params"], strict=False):
            if id(parameter) in known:
                numbered[number] = known[id(parameter)]
    return {numbered.get(number, number): value for number, value in state["state"].items()}


def walk(value: Any, path: str, kind: type = Tensor) -> Iterator[tuple[str, Any]]:
    """All tensors in a state, or what stands for them, with their paths."""
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from walk(inner, f"{path}.{key}", kind)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from walk(inner, f"{path}.{index}", kind)
