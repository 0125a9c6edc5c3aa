"""A training script as it was before anybody heard of Evertrain: DDP, and a checkpoint file every few steps.

torchrun --nproc-per-node 4 examples/plain.py --checkpoints /tmp/plain
evertrain run --nproc-per-node 4 examples/plain.py --checkpoints /tmp/plain     # is restarted when a rank dies
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--checkpoints", type=Path, required=True)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-every", type=int, default=10)
args = parser.parse_args()

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

newest = args.checkpoints / "newest.pt"
start = 0
if newest.exists():
    saved = torch.load(newest)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]
if rank == 0:
    print(f"starting after step {start}")

for step in range(start + 1, args.steps + 1):
    inputs = torch.randn(32, 256, generator=torch.Generator().manual_seed(1000 * step + rank))
    loss = (model(inputs) - inputs).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % args.save_every == 0:
        args.checkpoints.mkdir(parents=True, exist_ok=True)
        torch.save({"step": step, "model": net.state_dict(), "optimizer": optimizer.state_dict()}, f"{newest}.new")
        os.replace(f"{newest}.new", newest)
        print(f"step {step}  loss {loss.item():.4f}")

dist.destroy_process_group()
