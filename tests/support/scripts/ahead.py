"""A small deterministic training whose set-up takes long, and is over before the script asks which rank it is.

Writes into the working directory: for each process `setup-<pid>.json` when its set-up is over, and
`began-a<attempt>-r<rank>` when `evertrain.init()` has told it who it is; `losses-r<rank>.jsonl` (one line a step, of
every attempt), and at the end `final-r<rank>.json` with a digest of the parameters.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import evertrain

parser = argparse.ArgumentParser()
parser.add_argument("--setup", type=float, default=2.0, help="seconds that the set-up takes")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.1, help="seconds a step sleeps")
options = parser.parse_args()

setup_began = time.time()
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
time.sleep(options.setup)
Path(f"setup-{os.getpid()}.json").write_text(json.dumps({"local_rank": int(os.environ["LOCAL_RANK"])}))

job = evertrain.init()
assert job is not None
Path(f"began-a{job.attempt}-r{job.rank}").write_text(
    json.dumps({"pid": os.getpid(), "node": job.node, "setup_began": setup_began, "time": time.time()})
)
dist.init_process_group("gloo")
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
checkpointer = evertrain.Checkpointer({"model": net, "optimizer": optimizer})
done = checkpointer.load() or 0

with open(f"losses-r{job.rank}.jsonl", "a", buffering=1) as losses:
    for step in range(done + 1, options.steps + 1):
        time.sleep(options.sleep)
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 1000 + job.rank))
        loss = (net(batch) - batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.write(json.dumps({"step": step, "loss": loss.item(), "attempt": job.attempt}) + "\n")
        evertrain.report(step=step, loss=loss.item())
        checkpointer.save(step)

checkpointer.wait()
whole = hashlib.sha256()
for value in net.state_dict().values():
    whole.update(value.numpy().tobytes())
Path(f"final-r{job.rank}.json").write_text(json.dumps({"digest": whole.hexdigest()}))
dist.barrier()
dist.destroy_process_group()
