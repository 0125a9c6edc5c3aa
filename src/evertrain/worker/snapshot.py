"""How does a rank's state become bytes, and bytes its state again?

`take` walks the state once: every tensor is put aside, to be copied raw, and everything else is pickled around the
holes. A DTensor (FSDP2, tensor parallel) is taken apart: only this rank's shard is copied, and on the way back it is
put together again on the live mesh. Nothing is gathered, no rank talks to another.
"""

from __future__ import annotations

import io
import itertools
import pickle
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from evertrain.worker.slots import PAGE_BYTES, Part


class Tensors(Protocol):
    """Tensors by their number in a snapshot."""

    def __getitem__(self, number: int, /) -> Tensor: ...


class Snapshot(NamedTuple):
    """State taken apart: the tensors themselves (not yet copied), and a pickle of all else per entry."""

    entries: dict[str, bytes]
    tensors: list[Tensor]
    counts: list[int]
    """How many of the tensors belong to each entry, in the order of `entries`."""
    wholes: list[Tensor]
    """For each tensor what it was in the state: itself, or the DTensor whose shard it is."""


class SnapshotError(Exception):
    """State that cannot be put back; the text names the part."""


def state_of(value: Any) -> Any:
    return value if isinstance(value, Tensor) else value.state_dict()


def take(state: Mapping[str, Any]) -> Snapshot:
    """Take the state apart. The tensors alias live memory until the caller has copied them."""
    tensors: list[Tensor] = []
    wholes: list[Tensor] = []
    entries = {}
    counts = []
    for name, value in state.items():
        buffer = io.BytesIO()
        before = len(tensors)
        with torch.no_grad():
            _Taker(buffer, tensors, wholes).dump(value)
        entries[name] = buffer.getvalue()
        counts.append(len(tensors) - before)
    return Snapshot(entries, tensors, counts, wholes)


def rebuild(entry: bytes, tensors: Tensors, meshes: Mapping[Any, Any]) -> Any:
    """The state of one entry again, around these tensors."""
    return _Builder(io.BytesIO(entry), tensors, meshes).load()


def live_meshes(state: Iterable[Any]) -> dict[Any, Any]:
    """The device meshes on which the live state lies, by what identifies them across restarts."""
    meshes = {}
    for value in state:
        for tensor in _tensors_of(value):
            if _is_dtensor(tensor):
                meshes[_mesh_key(tensor.device_mesh)] = tensor.device_mesh  # type: ignore[attr-defined]
    return meshes


class _Taker(pickle.Pickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor], wholes: list[Tensor]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._tensors = tensors
        self._wholes = wholes

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            # sparse, quantized and meta tensors pickle themselves
            if value.layout is torch.strided and not value.is_quantized and value.device.type != "meta":
                return (self._add(value, value),)
        elif _is_dtensor(value):
            placed: Any = value
            at = self._add(local(placed), placed)
            return at, _mesh_key(placed.device_mesh), placed.placements, placed.shape, placed.stride()
        return None

    def _add(self, tensor: Tensor, whole: Tensor) -> int:
        self._tensors.append(tensor.detach())
        self._wholes.append(whole)
        return len(self._tensors) - 1


class _Builder(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: Tensors, meshes: Mapping[Any, Any]) -> None:
        super().__init__(file)
        self._tensors = tensors
        self._meshes = meshes

    def persistent_load(self, identity: Any) -> Any:
        tensor = self._tensors[identity[0]]
        if len(identity) == 1:
            return tensor
        from torch.distributed.tensor import DTensor

        _, key, placements, shape, stride = identity
        mesh = self._meshes.get(key)
        if mesh is None:
            raise SnapshotError(f"it lies on the device mesh {key}, which this run does not have")
        local = tensor.to(mesh.device_type)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _tensors_of(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from group["params"]


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor: the shard of a DTensor, else the tensor itself."""
    if not _is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def _is_dtensor(tensor: Tensor) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # where nobody has imported it there are none
    return module is not None and isinstance(tensor, module.DTensor)


def _mesh_key(mesh: Any) -> Any:
    return mesh.device_type, mesh.mesh_dim_names, repr(mesh.mesh.tolist())


class TensorPlace(NamedTuple):
    """Where one tensor lies in a slot, and how it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def view(self, storage: torch.UntypedStorage) -> Tensor:
        tensor = torch.empty(0, dtype=self.dtype)
        tensor.set_(storage, self.offset // self.dtype.itemsize, self.shape, self.stride)
        return tensor


ALIGNMENT = 64


def lay_out(taken: Snapshot, start: int) -> tuple[list[TensorPlace], list[Part]]:
    """A place for each tensor from byte `start` on, and the parts of the data that the entries make up.

    Strides are kept where memory is dense, so that a restored optimizer state walks memory as the saved one did.
    """
    places: list[TensorPlace] = []
    parts: list[Part] = []
    end = begin = start
    tensors = iter(taken.tensors)
    for name, count in zip(taken.entries, taken.counts, strict=True):
        for tensor in itertools.islice(tensors, count):
            end += -end % ALIGNMENT
            dense = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
            places.append(TensorPlace(tensor.dtype, tuple(tensor.shape), tuple(dense.stride()), end))
            end += tensor.numel() * tensor.element_size()
        end += -end % PAGE_BYTES
        parts.append(Part(name, begin - start, end - begin))
        begin = end
    return places, parts
