"""Deterministic trainings of several kinds: which wrapper shards the model must not matter for what comes out.

    --kind ddp | fsdp | hsdp     a small stack of layers; hsdp on a mesh of 2 replicas
    --kind vision                a CNN with BatchNorm and dropout, EMA weights, scheduler, GradScaler, and a loader with
                                 workers; with --save-first the checkpoint is saved before the scheduler's step

Writes `losses-r<rank>.jsonl` and `final-r<rank>.json` into the working directory, as train.py does. Digests of sharded
kinds are of the whole parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import evertrain

parser = argparse.ArgumentParser()
parser.add_argument("--kind", choices=("ddp", "fsdp", "hsdp", "vision"), default="ddp")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.02, help="seconds a step sleeps")
parser.add_argument("--save-first", action="store_true", help="save before the scheduler's step, not after it")
options = parser.parse_args()

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Pictures(Dataset[tuple[Tensor, int]]):
    """Noise with a label hidden in it; the same for every index, always."""

    def __len__(self) -> int:
        return 12 * WORLD

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        made = torch.Generator().manual_seed(index)
        label = index % 3
        return torch.randn(3, 12, 12, generator=made) + label, label


def vision() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3, stride=2),
        nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 16, 3),
    )  # fmt: skip


def stack() -> nn.Module:
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(96, 96), nn.GELU(), nn.Dropout(0.1))])


def wrapped(net: nn.Module) -> nn.Module:
    if options.kind in ("ddp", "vision"):
        return DistributedDataParallel(net)
    sizes, names = ((WORLD,), ("shard",)) if options.kind == "fsdp" else ((2, WORLD // 2), ("replicate", "shard"))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for layer in net:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)  # type: ignore[no-any-return]


def noise(done: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(done + 1, options.steps + 1):
        x = torch.randn(16, 96, generator=torch.Generator().manual_seed(step * 1000 + RANK))
        yield x, x


def endless(loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def digest(net: nn.Module) -> str:
    whole = hashlib.sha256()
    for name, value in sorted(net.state_dict().items()):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole.update(name.encode() + value.contiguous().numpy().tobytes())
    return whole.hexdigest()


def train() -> None:
    torch.manual_seed(1)
    job = evertrain.init()
    net = vision() if options.kind == "vision" else stack()
    model = wrapped(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=options.steps + 1)
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    torch.manual_seed(100 + RANK)
    random.seed(RANK)
    if options.kind == "vision":
        ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        pictures = Pictures()
        loader = evertrain.ResumableLoader(
            DataLoader(pictures, batch_size=4, sampler=DistributedSampler(pictures, seed=3), num_workers=2)
        )
        state |= {"ema": ema, "scaler": scaler, "loader": loader}
    checkpointer = evertrain.Checkpointer(state)
    done = checkpointer.load() or 0
    if done and options.save_first:
        scheduler.step()  # it had not stepped when the checkpoint was saved
    if options.kind in ("ddp", "vision"):
        evertrain.settle(model, torch.zeros(4, 3, 12, 12) if options.kind == "vision" else torch.zeros(16, 96))
    batches = endless(loader) if options.kind == "vision" else noise(done)
    losses = open(f"losses-r{RANK}.jsonl", "a", buffering=1)  # noqa: SIM115
    for step in range(done + 1, options.steps + 1):
        time.sleep(options.sleep)
        x, y = next(batches)
        optimizer.zero_grad()
        if options.kind == "vision":
            loss = nn.functional.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            ema.update_parameters(net)
        else:
            loss = (model(x) - y).square().mean() * (1 + random.random())
            loss.backward()
            optimizer.step()
        losses.write(json.dumps({"step": step, "loss": loss.item(), "attempt": job.attempt if job else 1}) + "\n")
        evertrain.report(step=step, loss=loss.item())
        if options.save_first:
            checkpointer.save(step)
        scheduler.step()
        if not options.save_first:
            checkpointer.save(step)
    checkpointer.wait()
    found = digest(net) + (digest(ema) if options.kind == "vision" else "")
    Path(f"final-r{RANK}.json").write_text(json.dumps({"digest": found, "argv": sys.argv[1:]}))


def main() -> None:
    dist.init_process_group("gloo")
    train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
