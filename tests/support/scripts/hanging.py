"""A plain DDP training that hangs once, in the way that `--how` says, on rank `--rank` in step 6; not a line of ours.

`skip` leaves out a collective of all, `mismatch` calls another one than the rest, `deadlock` lets two halves wait in
different groups. `evaluate` (the others wait in a barrier), `save`, `refill` (a data loader's worker works, its rank
waits for it) and `compile` (all ranks, in the very first step) take `--seconds` and go on: healthy things that look
like a hang.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--how", default="")
parser.add_argument("--rank", type=int, default=2)
parser.add_argument("--seconds", type=float, default=5.0)
parser.add_argument("--steps", type=int, default=12)
options = parser.parse_args()


def first_time() -> bool:
    try:
        Path(f"hung-{os.environ['RANK']}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def compute(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.randn(64, 64) @ torch.randn(64, 64)


def save(seconds: float) -> None:
    until = time.monotonic() + seconds
    with open(f"big-{os.environ['RANK']}", "wb") as file:
        while time.monotonic() < until:
            file.seek(0)
            file.write(b"x" * 1_000_000)
            file.flush()
            time.sleep(0.05)


class Slow(torch.utils.data.Dataset[int]):
    """One item that takes its time to come from wherever it is."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        compute(options.seconds)
        return index


def misbehave(halves: list[dist.ProcessGroup]) -> None:
    """In step 6, once."""
    rank, how, chosen = dist.get_rank(), options.how, dist.get_rank() == options.rank
    if how == "deadlock":
        # each half waits for the other in a group of all: two operations that never meet
        dist.all_reduce(torch.ones(1), group=halves[rank % 2])
    elif chosen and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif chosen and how == "sleep":
        time.sleep(3600)
    elif chosen and how == "loop":
        compute(3600)
    elif chosen and how == "evaluate":
        compute(options.seconds)
    elif chosen and how == "refill":
        list(torch.utils.data.DataLoader(Slow(), num_workers=1))
    elif chosen and how == "save":
        save(options.seconds)
    if (how == "skip" and not chosen) or (how == "mismatch" and chosen) or how == "evaluate":
        dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    world = list(range(dist.get_world_size()))
    halves = [dist.new_group(world), dist.new_group(world)]
    model = DistributedDataParallel(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(1, options.steps + 1):
        time.sleep(0.05)
        if step == 1 and options.how == "compile" and first_time():
            compute(options.seconds)
        if step == 6 and options.how and first_time():
            misbehave(halves)
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    print("done", flush=True)


if __name__ == "__main__":
    main()
