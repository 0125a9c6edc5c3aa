"""One rank of checkpoint.py: saves and restores a state of a given size in one way, and prints the seconds as JSON.

    checkpoint_rank.py WAY MIB ROUNDS FOLDER        ours, torch_save, dcp, dcp_best, nvrx

Each round also times a memcpy of the same state (all its tensors into others of the same sizes, whose pages are
warm): what a shared machine does in a minute, it does to both.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TENSORS = 64
MATRIX = 256
BESIDE = 2.5
"""Forward and backward take so many times a memcpy of the state."""
WARM_UP = 4

Samples = dict[str, list[float]]


class State:
    """A model of 32 parameters with an optimizer that keeps as much again: 64 tensors of one size."""

    def __init__(self, mib: int) -> None:
        count = mib * (1 << 20) // 4 // TENSORS
        self.model = torch.nn.ParameterList([torch.rand(count) for _ in range(TENSORS // 2)])
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3, momentum=0.9)

    def step_once(self) -> None:
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> list[torch.Tensor]:
        kept = (self.optimizer.state[parameter]["momentum_buffer"] for parameter in self.model)
        return [*(parameter.detach() for parameter in self.model), *kept]


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class Memcpy:
    """The whole state, once from here to there."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._from = tensors
        self._to = [torch.ones_like(tensor) for tensor in tensors]

    def __call__(self) -> None:
        for target, source in zip(self._to, self._from, strict=True):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())


class Gradients:
    """Stands for forward and backward: a fixed amount of work that leaves memory and the interpreter's lock alone."""

    def __init__(self, about_s: float) -> None:
        self._matrix = torch.rand(MATRIX, MATRIX)
        one = min(seconds(lambda: self._matrix @ self._matrix) for _ in range(50))
        self._times = max(1, int(about_s / one))

    def __call__(self) -> None:
        for _ in range(self._times):
            torch.mm(self._matrix, self._matrix)


def ours(mib: int, rounds: int, folder: Path) -> Samples:
    import evertrain
    from evertrain.worker import hooks, page, session
    from evertrain.worker.copier import THREAD

    page.create(str(folder / "page"), job="benchmark", term=1, attempt=1, rank=0)
    hooks.install()
    session.begin(
        {
            "job": "benchmark", "term": 1, "attempt": 1, "node": "node-0", "rank": 0, "local_rank": 0, "world_size": 1,
            "page": str(folder / "page"), "slots_dir": str(folder / "slots"), "disk_dir": str(folder / "disk"),
            "resume": None, "restart": False,
        }
    )  # fmt: skip
    current = session.current
    assert current is not None
    state = State(mib)
    state.step_once()
    memcpy = Memcpy(state.tensors())
    checkpointer = evertrain.Checkpointer({"model": state.model, "optimizer": state.optimizer})
    memcpy()
    gradients = Gradients(BESIDE * min(seconds(memcpy) for _ in range(5)))
    step = 0
    seen: Samples = {
        name: []
        for name in (
            *("memcpy", "copy", "unhidden", "blocked", "gradients", "gradients_beside"),
            *("memcpy_at_restore", "restore", "first_restore"),
        )
    }

    def save() -> None:
        nonlocal step
        step += 1
        checkpointer.save(step)

    for number in range(WARM_UP + rounds):
        copy_s = seconds(memcpy)
        alone_s = seconds(gradients)
        save_s = seconds(save)
        _pin_copier(THREAD)
        beside_s = seconds(gradients)
        wait_s = seconds(current.before_change)
        checkpointer.wait()
        checkpointer._beside = False
        unhidden_s = seconds(save)
        checkpointer.wait()
        checkpointer._beside = True
        (slot,) = (file for file in checkpointer._slots._files if file.header and file.header.step == step)  # type: ignore[union-attr]
        into_slot_s = seconds(lambda: torch._foreach_copy_(slot.views[:TENSORS], state.tensors()))  # noqa: B023
        if number >= WARM_UP:
            seen["memcpy"].append(copy_s)
            seen["copy"].append(into_slot_s)
            seen["unhidden"].append(unhidden_s)
            seen["blocked"].append(save_s + wait_s)
            seen["gradients"].append(alone_s)
            seen["gradients_beside"].append(beside_s + wait_s)
    save()
    checkpointer.wait()
    current.resume = step
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    for _ in range(max(3, rounds // 2)):
        # as after a restart: the parameters' memory is there, that for what the optimizer keeps is yet to be had
        fresh = State(mib)
        again = evertrain.Checkpointer({"model": fresh.model, "optimizer": fresh.optimizer})
        seen["first_restore"].append(seconds(again.load))
        # and once more, now that all memory is there, as for the memcpy
        seen["memcpy_at_restore"].append(seconds(memcpy))
        seen["restore"].append(seconds(again.load))
    if not all(map(torch.equal, fresh.tensors(), state.tensors())):
        sys.exit("what was restored is not what was saved")
    return seen


def _pin_copier(name: str) -> None:
    """The rank stays where it has been pinned to; the copier has the other core."""
    if len(os.sched_getaffinity(0)) == 1:
        for thread in threading.enumerate():
            if thread.name == name and thread.native_id is not None:
                os.sched_setaffinity(thread.native_id, {max(range(os.cpu_count() or 1))})


def torch_save(mib: int, rounds: int, folder: Path) -> Samples:
    state = State(mib)
    state.step_once()
    memcpy = Memcpy(state.tensors())
    whole = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
    seen: Samples = {"memcpy": [], "blocked": []}
    for number in range(1 + rounds):
        copy_s, save_s = seconds(memcpy), seconds(lambda: torch.save(whole, folder / "state.pt"))
        if number:
            seen["memcpy"].append(copy_s)
            seen["blocked"].append(save_s)
    return seen


def dcp(mib: int, rounds: int, folder: Path, *, best: bool = False) -> Samples:
    """`torch.distributed.checkpoint.async_save`: what the training thread is held up for, its staging included."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    state = State(mib)
    state.step_once()
    memcpy = Memcpy(state.tensors())
    memcpy()
    gradients = Gradients(BESIDE * min(seconds(memcpy) for _ in range(5)))
    whole = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
    more: dict[str, Any] = {}
    if best:
        options = StagingOptions(
            use_async_staging=True, use_shared_memory=True, use_pinned_memory=False, use_non_blocking_copy=False
        )
        more = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": DefaultStager(options)}
    seen: Samples = {"memcpy": [], "blocked": []}
    for number in range(2 + rounds):
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        copy_s = seconds(memcpy)
        began = time.perf_counter()
        answer = checkpoint.async_save(whole, checkpoint_id=folder / "dcp", **more)
        blocked_s = time.perf_counter() - began
        gradients()
        staged = getattr(answer, "staging_completion", None)
        if staged is not None:
            blocked_s += seconds(staged.result)
        getattr(answer, "upload_completion", answer).result()
        if number >= 2:
            seen["memcpy"].append(copy_s)
            seen["blocked"].append(blocked_s)
    return seen


def nvrx(mib: int, rounds: int, folder: Path) -> Samples:
    """nvidia-resiliency-ext's asynchronous `torch.save`."""
    import torch.distributed as dist
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
    state = State(mib)
    state.step_once()
    memcpy = Memcpy(state.tensors())
    whole = {"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()}
    saver = TorchAsyncCheckpoint()
    seen: Samples = {"memcpy": [], "blocked": []}
    for _ in range(rounds):
        seen["memcpy"].append(seconds(memcpy))
        seen["blocked"].append(seconds(lambda: saver.async_save(whole, folder / "nvrx.pt")))
        saver.finalize_async_save(blocking=True)
    return seen


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    way, mib, rounds, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    folder.mkdir(parents=True)
    ways: dict[str, Callable[[int, int, Path], Samples]] = {
        "ours": ours,
        "torch_save": torch_save,
        "dcp": dcp,
        "dcp_best": lambda *given: dcp(*given, best=True),
        "nvrx": nvrx,
    }
    try:
        print(json.dumps(ways[way](mib, rounds, folder)), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    # processes and threads of what was measured are not waited for
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
