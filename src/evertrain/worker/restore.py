"""How does saved state get back into the live objects? In three steps, so that nothing is half done.

compare   what was saved with what is there: a model that has changed is named before a byte is overwritten
copy      tensors, verified, straight to where they belong: parameters in place, what others keep into fresh memory
hand over to each object's own `load_state_dict`
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from evertrain.worker import rng, snapshot
from evertrain.worker.snapshot import SnapshotError, local

RNG = "random number generators"
_NAMED = 5

CopyOut = Callable[[Mapping[int, Tensor]], None]
"""Copies tensors by their number in the snapshot to these places, and verifies all others."""


class Misfit(Exception):
    """Saved state that does not fit the live objects; the text says where."""


def put_back(
    live: Mapping[str, Any], entries: Mapping[str, bytes], tensors: Sequence[Tensor], copy_out: CopyOut
) -> None:
    """Restore all entries. `tensors` are not looked into before `copy_out` has been called."""
    _compare_names(live, entries)
    meshes = snapshot.live_meshes(live.values())
    place = _Placing(tensors)
    hand_over: list[tuple[str, Callable[[], Any]]] = []
    misfits: list[str] = []
    for name, value in live.items():
        try:
            hand_over.append((name, _prepare(name, value, entries[name], meshes, place, misfits)))
        except SnapshotError as error:
            raise Misfit(f"state[{name!r}]: {error}") from error
    if misfits:
        more = len(misfits) - _NAMED
        raise Misfit("; ".join(misfits[:_NAMED]) + (f"; and {more} more" if more > 0 else ""))
    states = snapshot.rebuild(entries[RNG], place.fresh, meshes)
    with torch.no_grad():
        copy_out(place.targets)
    for name, give in hand_over:
        try:
            give()
        except (RuntimeError, ValueError, KeyError) as error:
            raise Misfit(f"state[{name!r}]: {error}") from error
    rng.restore(states)


def _compare_names(live: Mapping[str, Any], entries: Mapping[str, bytes]) -> None:
    if missing := live.keys() - entries.keys():
        raise Misfit(f"it has no {', '.join(map(repr, sorted(missing)))}")
    if unknown := entries.keys() - live.keys() - {RNG}:
        raise Misfit(f"it has {', '.join(map(repr, sorted(unknown)))}, which the Checkpointer was not given")


class _Placing:
    """Where each tensor of the snapshot is to be copied to."""

    def __init__(self, saved: Sequence[Tensor]) -> None:
        self.saved = saved
        self.targets: dict[int, Tensor] = {}
        self.fresh = _Fresh(self)
        self._numbers = {tensor.data_ptr(): number for number, tensor in enumerate(saved) if tensor.numel()}

    def straight(self, saved: Tensor, live: Tensor) -> bool:
        """Have a saved tensor copied into a live one, if one is like the other byte by byte."""
        one, other = local(saved), local(live).detach()
        if one.layout is not torch.strided or other.layout is not torch.strided:
            return False  # sparse ones have no place in memory
        number = self._numbers.get(one.data_ptr())
        alike = (one.dtype, one.device, one.shape, one.stride()) == (
            other.dtype, other.device, other.shape, other.stride(),
        )  # fmt: skip
        if number is None or not alike or not _is_dense(other):
            return False
        self.targets[number] = other
        return True


class _Fresh:
    """The tensors of the snapshot for somebody who keeps them."""

    def __init__(self, placing: _Placing) -> None:
        self._placing = placing

    def __getitem__(self, number: int) -> Tensor:
        targets, saved = self._placing.targets, self._placing.saved[number]
        if number not in targets:
            targets[number] = torch.empty_strided(saved.shape, saved.stride(), dtype=saved.dtype)
        return targets[number]


def _prepare(
    name: str, live: Any, entry: bytes, meshes: Mapping[Any, Any], place: _Placing, misfits: list[str]
) -> Callable[[], Any]:
    """Have the tensors of one entry placed; gives what hands the state over when they are there."""
    if isinstance(live, Tensor):
        saved = snapshot.rebuild(entry, place.saved, meshes)
        if misfit := _misfit(name, saved, live):
            misfits.append(misfit)
        elif not place.straight(saved, live):
            return lambda: _fill(live, saved)
        return lambda: None
    if isinstance(live, torch.nn.Module):
        saved = snapshot.rebuild(entry, place.saved, meshes)
        if not all(isinstance(value, Tensor) for value in saved.values()):
            kept = snapshot.rebuild(entry, place.fresh, meshes)  # extra state, which a module may keep as it is
            saved.update({key: kept[key] for key, value in saved.items() if not isinstance(value, Tensor)})
        _place_module(name, live, saved, place, misfits)
        return lambda: live.load_state_dict(saved)
    if isinstance(live, torch.optim.Optimizer):
        saved = snapshot.rebuild(entry, place.saved, meshes)
        misfits += _group_misfits(name, saved, live)
        _place_states(saved, live, place)
    snapshot.rebuild(entry, place.fresh, meshes)
    # built again when the tensors are there: on the way to a GPU they are copied
    return lambda: live.load_state_dict(snapshot.rebuild(entry, place.fresh, meshes))


def _place_module(name: str, live: torch.nn.Module, saved: dict[str, Any], place: _Placing, misfits: list[str]) -> None:
    """Parameters and buffers are filled in place; given its own tensors, a module has nothing left to copy."""
    own = live.state_dict(keep_vars=True) if _takes(live.state_dict, "keep_vars") else {}
    if not own:
        return
    if type(live).load_state_dict is torch.nn.Module.load_state_dict:  # others may know how to fill a gap
        misfits += [f"{name}.{key} is not in the checkpoint" for key in own if key not in saved]
        misfits += [f"{name}.{key} is in the checkpoint and no longer in the model" for key in saved if key not in own]
    for key, value in saved.items():
        if key not in own:
            continue
        if isinstance(value, Tensor) and isinstance(own[key], Tensor):
            if misfit := _misfit(f"{name}.{key}", value, own[key]):
                misfits.append(misfit)
            elif place.straight(value, own[key]):
                saved[key] = own[key]


def _place_states(saved: Any, live: torch.optim.Optimizer, place: _Placing) -> None:
    """What the optimizer has kept so far is filled in place, where it is as large as what was saved."""
    numbers = (number for group in saved["param_groups"] for number in group["params"])
    parameters = (parameter for group in live.param_groups for parameter in group["params"])
    for number, parameter in zip(numbers, parameters, strict=False):
        own = live.state.get(parameter, {})
        for key, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and isinstance(own.get(key), Tensor):
                place.straight(value, own[key])


def _misfit(name: str, saved: Tensor, live: Tensor) -> str | None:
    if saved.dtype == live.dtype and saved.shape == live.shape and local(saved).shape == local(live).shape:
        return None
    was, now = _described(saved), _described(live)
    if was == now:
        was, now = _described(local(saved)), _described(local(live))
        return f"{name} was divided among the ranks in another way: {was} of it was here, now it is {now}"
    return f"{name} was {was} when it was saved and is {now} now"


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _group_misfits(name: str, saved: Any, live: torch.optim.Optimizer) -> list[str]:
    was = [len(group["params"]) for group in saved["param_groups"]]
    now = [len(group["params"]) for group in live.param_groups]
    return [] if was == now else [f"{name} had groups of {was} parameters when it was saved and has {now} now"]


def _fill(live: Tensor, saved: Tensor) -> None:
    with torch.no_grad():
        live.copy_(saved)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _takes(function: Any, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)
