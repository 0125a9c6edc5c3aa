"""What does one call of each hook cost? Run by overhead.py, pinned to one core, in three processes: hooked, plain, and
empty, where a kernel in Python hands `all_reduce` on and does nothing else.

Prints one JSON object: the median microseconds of one `all_reduce` on one rank, of one optimizer step on one small
parameter, and (with hooks) of one `report()`. The differences between the processes are the hooks' own cost.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

BATCHES, CALLS = 60, 200


def median_us(call: Callable[[], object]) -> float:
    """Median over batches of the mean of one call: a batch that was interrupted does not count."""
    for _ in range(CALLS):
        call()
    seen = []
    for _ in range(BATCHES):
        began = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        seen.append((time.perf_counter_ns() - began) / CALLS / 1000)
    return median(seen)


def become_a_rank(folder: Path) -> None:
    """Begin a session as the launcher does in a rank of a job."""
    from evertrain.trace import rings
    from evertrain.worker import hooks, page, session

    hooks.install()
    path, trace = str(folder / "page"), str(folder / "trace")
    page.create(path, job="overhead", term=1, attempt=1, rank=0)
    rings.create(trace, writer="hook", capacity=rings.capacity_of(16 << 20, 256), table=256, rank=0, attempt=1)
    session.begin(
        {
            "job": "overhead", "run_id": "overhead-0", "term": 1, "attempt": 1, "node": "node-0", "rank": 0,
            "local_rank": 0, "world_size": 1, "page": path, "trace": trace, "slots_dir": str(folder),
            "disk_dir": str(folder), "resume": None,
            "resume_tier": None, "reached": None, "restart": False, "faults": [], "fired_dir": str(folder),
            "exception_path": str(folder / "exception.json"), "mesh": None,
        }
    )  # fmt: skip


def hand_on() -> torch.library.Library:
    """The least that seeing a collective from Python can cost."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    redispatch = torch.ops.c10d.allreduce_.default._handle.redispatch_boxed
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    kernel = lambda keys, *arguments: redispatch(keys & after, *arguments)  # noqa: E731
    library.impl("allreduce_", kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def main() -> None:
    hooked = sys.argv[1] == "hooked"
    kept = hand_on() if sys.argv[1] == "empty" else None
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="evertrain-overhead-") as folder:
        if hooked:
            become_a_rank(Path(folder))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parameter = torch.nn.Parameter(torch.zeros(4))
        parameter.grad = torch.zeros(4)
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        four = torch.zeros(4)

        costs = {"all_reduce": median_us(lambda: dist.all_reduce(four)), "optimizer_step": median_us(optimizer.step)}
        if hooked:
            import evertrain

            steps = iter(range(10**9))
            costs["report"] = median_us(
                lambda: evertrain.report(step=next(steps), loss=1.5, grad_norm=0.5, tokens=4096)
            )
        print(json.dumps(costs), flush=True)
        dist.destroy_process_group()
    del kept


if __name__ == "__main__":
    # the last core: the first one takes most interrupts
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    main()
