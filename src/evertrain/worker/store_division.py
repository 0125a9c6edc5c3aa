"""How is a state divided anew? When there are other ranks than those that saved it, or another kind of shards.

Model and optimizer follow the live ones: each tensor is filled from the chunks that it overlaps, and an optimizer's
state is found by the names of its parameters. What belongs to a rank and cannot be divided (random numbers, loaders)
is taken from rank `rank % ranks then`. Nothing changes before everything has been found to be there and to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from evertrain.worker import directory
from evertrain.worker.snapshot import SnapshotError
from evertrain.worker.store_metadata import rank_key
from evertrain.worker.store_reader import Entry, Hole, StoredStep, Use
from evertrain.worker.store_writer import unique


def spread(step: StoredStep, live: Mapping[str, Any], rank: int, *, aside: str) -> Any:
    """Divide the state anew into the live one; returns the entry `aside`, which is not part of that."""
    source = rank % step.manifest.world_size
    saved = step.entries(source)
    if missing := live.keys() - saved.keys():
        raise SnapshotError(f"it has no {', '.join(map(repr, sorted(missing)))}")
    if unknown := saved.keys() - live.keys() - {aside}:
        raise SnapshotError(f"it has {', '.join(map(repr, sorted(unknown)))}, which the Checkpointer was not given")
    wanted = _Wanted(step, source)
    finish = [_into(name, value, saved[name], live, wanted) for name, value in live.items()]
    put_aside = _whole(saved[aside], wanted)
    step.read(wanted.reads)
    for done in finish:
        done()
    return put_aside()


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

    def like(self, hole: Hole, live: Tensor | None) -> Tensor:
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


def _into(name: str, value: Any, saved: Entry, live: Mapping[str, Any], wanted: _Wanted) -> Callable[[], None]:
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


def _whole(saved: Entry, wanted: _Wanted, live: Mapping[str, Tensor] | None = None) -> Callable[[], Any]:
    """An entry with all its tensors, divided as the live ones of their names are."""
    tensors = {hole.number: wanted.like(hole, (live or {}).get(hole.here.key)) for hole in saved.all_holes()}
    return lambda: saved.whole(tensors)


def _into_module(name: str, module: torch.nn.Module, saved: Entry, wanted: _Wanted) -> Callable[[], None]:
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
    name: str, optimizer: torch.optim.Optimizer, saved: Entry, live: Mapping[str, Any], wanted: _Wanted
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
        hole.number: wanted.like(hole, None) for _, hole in directory.walk(then["param_groups"], "", Hole)
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
    name: str, entry: Entry, left: dict[str, tuple[int, Tensor]], wanted: _Wanted
) -> Callable[[], dict[int, Any]]:
    """What a saved optimizer knows of the parameters that are `left`, which it takes from these."""
    numbers: dict[Any, int] = {}
    tensors: dict[int, Tensor] = {}
    for old, part in entry.holes()["state"].items():
        holes = list(directory.walk(part, "", Hole))
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


def _named(entry: str, state: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state by their keys."""
    found = list(directory.walk(state, entry))
    return zip(unique([path for path, _ in found]), (tensor for _, tensor in found), strict=True)
