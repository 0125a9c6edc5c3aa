"""A small deterministic DDP training that uses the whole API, and can be held in any phase to be killed there.

Writes into the working directory: `losses-r<rank>.jsonl` (one line a step, of every attempt) and at the end
`final-r<rank>.json` with a digest of the parameters. With `--hold PHASE:RANK[:STEP]` that rank writes its pid into the
file `held` when it gets there for the first time, and waits to be killed.
"""

from __future__ import annotations

import argparse
import atexit
import hashlib
import json
import os
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--sleep", type=float, default=0.02, help="seconds a step sleeps")
parser.add_argument("--hold", default="", metavar="PHASE:RANK[:STEP]")
parser.add_argument("--read", default="", metavar="FILE", help="whoever is held reads it instead of sleeping")
parser.add_argument("--no-settle", action="store_true")
parser.add_argument("--fail", default="", metavar="RANK:STEP", help="this rank raises ValueError at this step, always")
parser.add_argument("--own", type=int, default=0, metavar="KIB", help="so much state that no other rank has")
parser.add_argument("--until", default="", metavar="FILE", help="no further step once this file exists")
options = parser.parse_args()

RANK = int(os.environ["RANK"])
EVALUATE_EVERY = 4


def hold(phase: str, step: int | None = None) -> None:
    wanted_phase, _, rest = options.hold.partition(":")
    wanted_rank, _, wanted_step = rest.partition(":")
    if phase != wanted_phase or int(wanted_rank) != RANK:
        return
    if wanted_step and step is not None and step < int(wanted_step):
        return
    try:
        Path("held-once").touch(exist_ok=False)
    except FileExistsError:
        return
    Path("held.new").write_text(str(os.getpid()))
    os.replace("held.new", "held")
    if options.read:
        Path(options.read).read_bytes()
    else:
        time.sleep(60)


def leave(step: int) -> None:
    """The file `exit-R`, written by the test, ends rank R with the exit code that stands in it, once."""
    order = Path(f"exit-{RANK}")
    if order.exists():
        code = int(order.read_text())
        order.unlink()
        sys.exit(code)


def is_enough() -> bool:
    """Whether any rank sees the file of --until: all of them end after the same step."""
    found = torch.tensor(float(Path(options.until).exists()))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


hold("start")
atexit.register(hold, "exit")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import evertrain  # noqa: E402


class Held:
    """State whose reading can be held: `Checkpointer.save` is in the middle of its work then."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        if self.step:
            hold("save", self.step)
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 192, generator=torch.Generator().manual_seed(step * 1000 + RANK))


def digest(model: nn.Module) -> str:
    whole = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        whole.update(name.encode())
        whole.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return whole.hexdigest()


def train() -> None:
    torch.manual_seed(1)
    job = evertrain.init()
    net = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(192, 192), nn.Tanh(), nn.Dropout(0.1))])
    held = Held()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    own = torch.full((options.own * 256,), float(RANK))
    checkpointer = evertrain.Checkpointer({"model": net, "optimizer": optimizer, "held": held, "own": own})
    done = checkpointer.load() or 0
    if not bool((own == RANK + done).all()):
        raise AssertionError(f"rank {RANK} has got another one's state at step {done}, or an older one")
    if not options.no_settle:
        evertrain.settle(model, batch(0))

    losses = open(f"losses-r{RANK}.jsonl", "a", buffering=1)  # noqa: SIM115
    for step in range(done + 1, options.steps + 1):
        time.sleep(options.sleep)
        if options.fail and (RANK, step) == tuple(map(int, options.fail.split(":"))):
            raise ValueError(f"no good number at step {step}")
        hold("step", step)
        leave(step)
        loss = (model(batch(step)) - batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        held.step = step
        own += 1
        line = {"step": step, "loss": loss.item(), "attempt": job.attempt if job else 1}
        losses.write(json.dumps(line) + "\n")
        evertrain.report(step=step, loss=loss.item())
        checkpointer.save(step)
        if step % EVALUATE_EVERY == 0:
            with evertrain.phase("evaluate"), torch.no_grad():
                hold("evaluate", step)
                # no dropout here: random numbers drawn after `save` would not be drawn again after a restart
                net.eval()(batch(step))
                net.train()
        if options.until and is_enough():
            break

    checkpointer.wait()
    Path(f"final-r{RANK}.json").write_text(json.dumps({"digest": digest(net), "argv": sys.argv[1:]}))


def main() -> None:
    hold("init")
    dist.init_process_group("gloo")
    train()  # leaves no DDP behind: torch 2.13 can hang where the group is destroyed before it
    dist.barrier()
    dist.destroy_process_group()
    if RANK == 0:
        print("training is over")


if __name__ == "__main__":
    main()
