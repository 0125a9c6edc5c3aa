"""Steps that cost nothing but time, on ranks that keep in step: a job that a test restarts again and again.

Each start adds a line to `starts-r<rank>.jsonl`: attempt, arguments, the variable ADDED, torch's threads, the step that
it resumed from. Files that the test makes change what happens: with `noisy` rank 1's losses are no longer reproducible,
with `silent` there are none, while there is `pause` no step is made, and `over` ends the job.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import evertrain

parser = argparse.ArgumentParser()
parser.add_argument("--sleep", type=float, default=0.15, help="seconds a step sleeps")
options = parser.parse_args()

RANK = int(os.environ["RANK"])

dist.init_process_group("gloo")
value = torch.full((64,), 1 / 3)
checkpointer = evertrain.Checkpointer({"value": value})
resumed = checkpointer.load()
job = evertrain.init()
start = {
    "attempt": job.attempt if job else 0,
    "argv": sys.argv[1:],
    "added": os.environ.get("ADDED"),
    "threads": torch.get_num_threads(),
    "resumed": resumed,
}
with open(f"starts-r{RANK}.jsonl", "a") as starts:
    starts.write(json.dumps(start) + "\n")

step = resumed or 0
while True:
    step += 1
    time.sleep(options.sleep)
    with evertrain.phase("pause"):
        while Path("pause").exists():
            time.sleep(0.02)
    is_over = torch.tensor(float(Path("over").exists()))
    dist.all_reduce(is_over)
    if is_over:
        break
    value.mul_(1.1).add_(step).sin_()
    loss = value.sum().item() + RANK
    if RANK == 1 and Path("noisy").exists():
        loss += time.monotonic() * 1e-9
    evertrain.report(step=step, loss=None if Path("silent").exists() else loss)
    checkpointer.save(step)

dist.destroy_process_group()
