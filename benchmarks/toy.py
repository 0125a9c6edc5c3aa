"""The job that the benchmarks train: the same file under Evertrain and under every other launcher.

Four layers in DDP over gloo. A step sleeps for 50 ms (TOY_SLEEP), as long as a small accelerator might compute, and
then runs forward, backward and AdamW on the CPU. With TOY_SAVE=evertrain it saves every step to the Checkpointer; with
TOY_SAVE=disk rank 0 saves to a file every 5 steps, as scripts without help do; with TOY_SAVE=none nothing is saved, and
every step is reported. TOY_KILL=RANK:STEP ends that rank by SIGKILL 20 ms into that step, once; with TOY_FAULT=hang it
sleeps for ever instead, with TOY_FAULT=stop it stops itself. TOY_TIMEOUT_S is the process group's timeout.

Each rank appends JSON lines to the file TOY_LOG: what happened, to which rank, at what time (unix seconds).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(os.environ.get("TOY_STEPS", "18"))
SAVE = os.environ.get("TOY_SAVE", "disk")
FOLDER = Path(os.environ["TOY_LOG"]).parent
RANK = int(os.environ["RANK"])
FAULT = os.environ.get("TOY_FAULT", "kill")
TIMEOUT = timedelta(seconds=float(os.environ.get("TOY_TIMEOUT_S", "1800")))
KILL_RANK, KILL_STEP = map(int, os.environ.get("TOY_KILL", "-1:-1").split(":"))
SLEEP_S, KILL_AFTER_S = float(os.environ.get("TOY_SLEEP", "0.05")), 0.02
DISK_EVERY = 5

LOG = os.open(os.environ["TOY_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def tell(event: str, **more: Any) -> None:
    line = {"event": event, "rank": RANK, "pid": os.getpid(), "time": time.time(), **more}
    os.write(LOG, f"{json.dumps(line)}\n".encode())


def sleep_or_die(step: int) -> None:
    time.sleep(min(SLEEP_S, KILL_AFTER_S))
    if (RANK, step) == (KILL_RANK, KILL_STEP) and first_time():
        tell("kill", step=step, fault=FAULT)
        if FAULT == "hang":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGSTOP if FAULT == "stop" else signal.SIGKILL)
    time.sleep(max(0.0, SLEEP_S - KILL_AFTER_S))


def first_time() -> bool:
    try:
        (FOLDER / "killed").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class Reports:
    """Saves nothing: every step is reported to Evertrain, which does nothing under another launcher."""

    def __init__(self) -> None:
        import evertrain

        self.report = evertrain.report

    def load(self) -> int | None:
        return None

    def save(self, step: int) -> None:
        self.report(step=step, loss=0.5, tokens=32)


class DiskSaves:
    """Whole state in one file, written by rank 0 every few steps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.file = model, optimizer, FOLDER / "checkpoint.pt"

    def load(self) -> int | None:
        if not self.file.exists():
            return None
        saved = torch.load(self.file)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        step: int = saved["step"]
        return step

    def save(self, step: int) -> None:
        if RANK == 0 and step % DISK_EVERY == 0:
            whole = {"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(whole, self.file.with_suffix(".new"))
            self.file.with_suffix(".new").replace(self.file)


def collectives_seen() -> int:
    """How many collectives Evertrain's hook has counted in this process; 0 where there is no hook."""
    session = sys.modules.get("evertrain.worker.session")
    current = session.current if session else None
    return current.page.collective[1] if current else 0


def batch(step: int) -> torch.Tensor:
    return torch.randn(32, 256, generator=torch.Generator().manual_seed(step * 1000 + RANK))


def train() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    saves: Any
    if SAVE == "evertrain":
        import evertrain

        evertrain.init()
        saves = evertrain.Checkpointer({"model": net, "optimizer": optimizer})
        done = saves.load() or 0
        evertrain.settle(model, batch(0))
    else:
        saves = DiskSaves(net, optimizer) if SAVE == "disk" else Reports()
        done = saves.load() or 0

    tell("ready", step=done)
    for step in range(done + 1, STEPS + 1):
        sleep_or_die(step)
        inputs = batch(step)
        loss = ((model(inputs) - inputs) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        saves.save(step)
        tell("step", step=step, loss=loss.item(), collectives=collectives_seen())


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    # a function of its own, so that DDP is gone before the group: in the other order torch 2.13 can hang at the end,
    # when gloo's thread wants the interpreter's lock to let go of the last gradients
    train()
    dist.barrier()
    tell("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
