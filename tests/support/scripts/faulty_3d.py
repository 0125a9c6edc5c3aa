"""examples/train_3d.py, in which one rank does at one step what makes a job hang, or is slow from then on.

    evertrain run … faulty_3d.py --fault loader --at 5:20 [--note FILE] [options of train_3d.py]

The faults need nothing of Evertrain: the training script is imported and gets its batches, and what surrounds them,
from here. They happen in the first attempt only. `--note` names the file to which the moment of the fault is written.
With `--compute-ms` each microbatch costs every rank that long; `--slow FACTOR` multiplies it for the rank of `--at`,
or, with `--at all:STEP`, for everybody.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import torch
import torch.distributed as dist
import train_3d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader, Dataset

MEBI_FLOATS = 1 << 18
"""gloo's ring sends pieces of 1 MiB at most: with more pieces than its peers have, a rank waits instead of failing."""

parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
parser.add_argument("--fault", default="")
parser.add_argument("--at", default="0:0", metavar="RANK:STEP")
parser.add_argument("--note", type=Path)
parser.add_argument("--file", type=Path, help="what `dead-mount` reads")
parser.add_argument("--loaders", action="store_true", help="batches come from data loaders whatever the fault")
parser.add_argument("--compute-ms", type=float, default=0.0)
parser.add_argument("--slow", type=float, default=1.0, metavar="FACTOR")
parser.add_argument("--group-timeout", type=float, default=0.0, metavar="SECONDS")

options, rest = parser.parse_known_args()
RANK = int(os.environ["RANK"])
AT_RANK, AT_STEP = options.at.split(":")
CHOSEN = AT_RANK in ("all", str(RANK))
ONCE = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

draw = train_3d.draw


class Job:
    """What the faults need to know of the training script."""

    step = 0
    """Of this attempt."""
    mesh: DeviceMesh


def note() -> None:
    if options.note and ONCE:
        line = {"rank": RANK, "pid": os.getpid(), "step": Job.step, "time": time.time()}
        with options.note.open("a") as file:
            file.write(json.dumps(line) + "\n")


# --- on one rank, outside of all operations


def pack_sequences() -> None:
    """Computes without end, in Python."""
    free = 1
    while free:
        free = free * 3 % 1000003 + 1


def decode_native() -> None:
    """Sleeps in C and keeps the interpreter's lock: no other thread of this process runs Python again."""
    ctypes.PyDLL(None).sleep(3600)


def match_record() -> None:
    """Computes without end in C, and keeps the interpreter's lock."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def read_shard() -> None:
    options.file.read_bytes()


def sleep_outside() -> None:
    time.sleep(3600)


def save_by_process() -> None:
    """The writer opens what nobody reads."""
    path = f"step-{Job.step}.pt"
    os.mkfifo(path)
    writer = multiprocessing.get_context("fork").Process(target=torch.save, args=(torch.zeros(1024), path))
    writer.start()
    wait_for_checkpoint(writer.join)


def save_by_thread() -> None:
    """The writer fills a pipe that nobody empties."""
    _, entry = os.pipe()
    writers = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
    done = writers.submit(torch.save, torch.zeros(MEBI_FLOATS), os.fdopen(entry, "wb", buffering=0))
    wait_for_checkpoint(done.result)


def wait_for_checkpoint(wait: Callable[[], object]) -> None:
    wait()


# --- in operations; all ranks take part


def skip() -> None:
    """A sum over all ranks that one leaves out."""
    if not CHOSEN:
        dist.all_reduce(torch.ones(1))


def swap() -> None:
    """Two operations of one group, which one rank calls the other way round."""
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_gather([torch.ones(1) for _ in range(dist.get_world_size())], torch.ones(1)),
    ]
    for call in reversed(calls) if CHOSEN else calls:
        call()


def send_less() -> None:
    """One rank has half as much to add as the others: they wait for the rest."""
    dist.all_reduce(torch.ones((2 if CHOSEN else 4) * dist.get_world_size() * MEBI_FLOATS))


def send_doubles() -> None:
    """One rank adds numbers of twice the size: the others are done, and it waits for the rest."""
    kind = torch.float64 if CHOSEN else torch.float32
    dist.all_reduce(torch.ones(2 * dist.get_world_size() * MEBI_FLOATS, dtype=kind))


def cross() -> None:
    """In the pipeline stage of the chosen rank, groups of tp and dp wait for each other in a circle."""
    stage = int(AT_RANK) // (dist.get_world_size() // Job.mesh.size(0))
    pp, dp, tp = Job.mesh.get_coordinate() or (0, 0, 0)
    dims = ("tp", "dp") if pp != stage or dp == tp else ("dp", "tp")
    for dim in dims:
        dist.all_reduce(torch.ones(1), group=Job.mesh.get_group(dim))


ALONE: dict[str, Callable[[], None]] = {
    "loop": pack_sequences, "sleep": sleep_outside, "held": decode_native, "held-busy": match_record,
    "dead-mount": read_shard, "writer-process": save_by_process, "writer-thread": save_by_thread,
}  # fmt: skip
TOGETHER: dict[str, Callable[[], None]] = {
    "skipped": skip, "order": swap, "shape": send_less, "dtype": send_doubles, "deadlock": cross,
}  # fmt: skip


class Records(Dataset[tuple[Tensor, Tensor]]):
    """Batches by the number of the step; one of them never comes."""

    def __init__(self, text: Tensor, batch: int, context: int) -> None:
        self.text, self.batch, self.context = text, batch, context

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        Job.step = index + 1
        if options.fault == "loader" and ONCE and CHOSEN and Job.step == int(AT_STEP):
            note()
            self.wait_for_record()
        return draw(self.text, self.batch, self.context, torch.Generator().manual_seed(index))

    def wait_for_record(self) -> None:
        time.sleep(3600)


def next_batch(text: Tensor, batch: int, context: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What train_3d.py draws its batches with: the faults happen before that."""
    global loaded
    Job.step += 1
    if ONCE and Job.step == int(AT_STEP):
        if CHOSEN and (options.fault in ALONE or options.fault in TOGETHER or options.slow != 1):
            note()
        if CHOSEN and options.fault in ALONE:
            ALONE[options.fault]()
        if options.fault in TOGETHER:
            TOGETHER[options.fault]()
    if options.fault != "loader" and not options.loaders:
        return draw(text, batch, context, generator)
    if loaded is None:
        loaded = iter(DataLoader(Records(text, batch, context), batch_size=None, num_workers=1))
    tokens, targets = next(loaded)
    return tokens, targets


loaded: Iterator[Any] | None = None


# --- what computing costs


def compute(*_: object) -> None:
    """An accelerator is at work for a while, and its rank waits for it; it has one of its own, however many ranks share
    the machine's cores."""
    time.sleep(options.compute_ms * (options.slow if CHOSEN and int(AT_STEP) <= Job.step else 1.0) / 1000)


def main() -> None:
    build = train_3d.build

    def built(args: argparse.Namespace, mesh: DeviceMesh) -> train_3d.Stage:
        Job.mesh = mesh
        model = build(args, mesh)
        if options.compute_ms:
            model.register_forward_pre_hook(compute)
        return model

    train_3d.build, train_3d.draw = built, next_batch
    if options.group_timeout:
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=options.group_timeout)
    sys.argv[1:] = rest
    train_3d.main()


if __name__ == "__main__":
    main()
