"""What does a rank of a test know, and how does it tell what it found?"""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

Line = dict[str, Any]


class Absent(Exception):
    """There is nothing to test here; the text says what is missing."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """One rank of one test, on its device."""

    node: str
    rank: int
    """Within the node, as are all."""
    ranks: int
    device: torch.device
    threads: int
    folder: str
    rendezvous: str
    """A file that does not exist yet, the same on all ranks of the node."""
    salt: str
    """Differs between tests."""
    deadline: float
    """By the monotonic clock; a little before the rank is killed."""
    send: Callable[[Line], None]

    def say(self, name: str, value: float, unit: str, *, ok: bool | None, **detail: Any) -> None:
        """One reading."""
        self.send({"is": "reading", "name": name, "value": value, "unit": unit, "ok": ok, "detail": detail})

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def finish(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds that it takes, the device's part included."""
        self.finish()
        began = time.perf_counter()
        work()
        self.finish()
        return max(time.perf_counter() - began, 1e-9)


def choose_device(wanted: str, rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    return device


def digest(tensor: Tensor) -> str:
    """Of its bits."""
    local = tensor.detach().to("cpu").contiguous()
    size = local.numel() * local.element_size()
    content = (ctypes.c_char * size).from_address(local.data_ptr()) if size else b""
    return hashlib.sha256(content).hexdigest()[:16]


def whole_numbers(shape: tuple[int, ...], low: int, high: int, seed: str) -> Tensor:
    """Random numbers of [low, high), the same on every machine: integers need no rounding."""
    generator = torch.Generator().manual_seed(int(hashlib.sha256(seed.encode()).hexdigest()[:15], 16))
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int64)


def fractions(shape: tuple[int, ...], scale: float, seed: str) -> Tensor:
    """Random float32 numbers of [-scale, scale), the same on every machine if `scale` is a power of two."""
    return whole_numbers(shape, -(1 << 20), 1 << 20, seed).to(torch.float32) * (scale / (1 << 20))


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{name!r} is no floating point type of torch")
    return found


def be_deterministic(threads: int) -> None:
    """The same bits each time, from kernels that promise it, at this number of threads."""
    torch.set_num_threads(threads)
    # what torch.use_deterministic_algorithms does, without importing the compiler, which takes seconds on each rank
    torch._C._set_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cudnn.allow_tf32 = False


def setting(device: torch.device, threads: int) -> Mapping[str, Any]:
    """What bits may depend on, other than on health (`locate.alignment.Setting`, but for the model)."""
    versions = [f"torch {torch.__version__}"]
    capability = torch.backends.cpu.get_cpu_capability()
    if device.type != "cuda":
        return {"device": _cpu(), "capability": capability, "threads": threads, "versions": versions[0]}
    major, minor = torch.cuda.get_device_capability(device)
    libraries = cast(Any, torch)  # parts of torch without types
    nccl = ".".join(map(str, libraries.cuda.nccl.version()))
    versions += [f"cuda {torch.version.cuda}", f"cudnn {libraries.backends.cudnn.version()}", f"nccl {nccl}"]
    return {
        "device": torch.cuda.get_device_name(device),
        "capability": f"{major}.{minor} {capability}",
        "threads": threads,
        "versions": ", ".join(versions),
    }


def _cpu() -> str:
    """The model, which libraries choose their kernels by."""
    import platform

    found: dict[str, str] = {}
    with open("/proc/cpuinfo") as file:
        for line in file:
            name, _, value = line.partition(":")
            found.setdefault(name.strip(), value.strip())
    part = " ".join(found[name] for name in ("CPU implementer", "CPU part") if name in found)
    return found.get("model name") or part or platform.machine()
