"""examples/train_3d.py, paced: sleeps stand for an accelerator's work, so that eight ranks fit on two cores.

    evertrain run … paced_3d.py --control DIR [--cgroups DIR] [--forward-ms 30] [--backward-ms 60] [… of train_3d.py]

The training script is imported as it is; it gets its batches and its model from here. Each rank reads now and then
whether DIR/rank-N.json says that it is ill, which nothing but this script knows of:

    {"slow": 8}               its accelerator takes eight times as long
    {"copy_bytes_per_s": B}   what leaves the accelerator for the host does so at this speed
    {"stall_until": T}        the next batch comes at this time

Rank 0 notes the beginning of every step in DIR/steps.log, the others nothing. What would take most of two cores is
done otherwise than in the training script: layers are cut in parts by hand, with the same all-reduces, instead of by
DTensor; steps are saved now and then only; AdamW goes over all parameters at once. And there are more bytes to send.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch
import torch.distributed as dist
import train_3d
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel

import evertrain

PIECE_BYTES = 16384
SAVE_EVERY = 40
BALLAST = 2_800_000
"""Parameters that nothing is computed with: something to send that takes no processor."""

parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
parser.add_argument("--control", type=Path, required=True)
parser.add_argument("--cgroups", type=Path, help="folder of cgroups, one a rank")
parser.add_argument("--forward-ms", type=float, default=30.0)
parser.add_argument("--backward-ms", type=float, default=60.0)

options, rest = parser.parse_known_args()
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ORDERS = options.control / f"rank-{RANK}.json"

draw, build = train_3d.draw, train_3d.build


def orders() -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(ORDERS.read_bytes())
    except FileNotFoundError:
        return {}
    return found


def accelerator(milliseconds: float) -> None:
    time.sleep(milliseconds * orders().get("slow", 1) / 1000)


def to_host(tensor: Tensor) -> None:
    """What leaves an accelerator goes over a bus, in pieces."""
    speed = orders().get("copy_bytes_per_s")
    words = tensor.detach().reshape(-1)
    each = PIECE_BYTES // words.element_size() if speed else len(words)
    buffer = torch.empty(each, dtype=words.dtype)
    for piece in words.split(each):
        buffer[: len(piece)].copy_(piece)
        if speed:
            time.sleep(PIECE_BYTES / speed)


class Backward(torch.autograd.Function):
    """The identity, whose gradient takes the time of a backward pass."""

    @staticmethod
    def forward(context: Any, output: Tensor) -> Tensor:
        to_host(output)
        return output.view_as(output)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        accelerator(options.backward_ms)
        to_host(gradient)
        return gradient


# --- tensor parallel layers, as they were made before there was DTensor


class Enter(torch.autograd.Function):
    """All parts of a layer have the same input: its gradient is the sum of theirs."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        whole = gradient.contiguous()
        dist.all_reduce(whole, group=context.group)
        return whole, None


class Leave(torch.autograd.Function):
    """The output is the sum of what the parts bring."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        whole = x.clone()
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def cut(block: nn.Module, mesh: DeviceMesh, plan: dict[str, object]) -> None:
    """In place of torch's `parallelize_module`."""
    group, parts, part = mesh.get_group(), mesh.size(), mesh.get_local_rank()
    for name, how in plan.items():
        layer = block.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        is_by_columns = isinstance(how, ColwiseParallel)
        with torch.no_grad():
            layer.weight = nn.Parameter(layer.weight.chunk(parts, 0 if is_by_columns else 1)[part].clone())
            layer.bias = nn.Parameter(layer.bias.chunk(parts)[part].clone() if is_by_columns else layer.bias / parts)
        if is_by_columns:
            layer.register_forward_pre_hook(lambda module, inputs: Enter.apply(inputs[0], group))
        else:
            layer.register_forward_hook(lambda module, inputs, output: Leave.apply(output, group))


# --- its place, and its batches


class Heavier(train_3d.Stage):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ballast = nn.Parameter(torch.zeros(BALLAST))


def paced(args: argparse.Namespace, mesh: DeviceMesh) -> train_3d.Stage:
    model = build(args, mesh)
    model.register_forward_pre_hook(lambda *_: accelerator(options.forward_ms))
    model.register_forward_hook(lambda module, inputs, output: Backward.apply(output))
    gc.freeze()  # what is there stays
    return model


class NowAndThen(evertrain.Checkpointer):
    def save(self, step: int) -> None:
        if step % SAVE_EVERY == 0:
            super().save(step)


class Steps:
    """Rank 0's log."""

    def __init__(self) -> None:
        self.file = (options.control / "steps.log").open("a", buffering=1) if RANK == 0 else None

    def note(self) -> None:
        if self.file is not None:
            self.file.write(f"{time.time():.6f}\n")


steps = Steps()


def next_batch(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Called once a step, before its first operation."""
    steps.note()
    if (until := orders().get("stall_until")) is not None:
        time.sleep(max(0.0, until - time.time()))
    tokens, targets = draw(text, batch, context, generator)
    return tokens, targets


def take_place() -> None:
    """On the one or the other core, in a cgroup of its own, before any thread has begun; whoever hurts ranks by their
    pid finds it."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {cores[RANK * len(cores) // WORLD]})
    if options.cgroups is not None:
        (options.cgroups / f"rank-{RANK}" / "cgroup.procs").write_text("0")
    note = options.control / f"pid-{RANK}.new"
    note.write_text(str(os.getpid()))
    note.replace(note.with_suffix(""))


def main() -> None:
    take_place()
    train_3d.build, train_3d.draw, train_3d.parallelize_module = paced, next_batch, cut
    train_3d.Stage = Heavier  # type: ignore[misc]
    evertrain.Checkpointer = NowAndThen  # type: ignore[misc]
    torch.optim.AdamW = partial(torch.optim.AdamW, foreach=True)  # type: ignore[assignment, misc]
    sys.argv[1:] = rest
    train_3d.main()


if __name__ == "__main__":
    main()
