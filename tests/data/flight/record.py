"""Makes the dumps beside it: `torchrun --nproc-per-node 4 record.py KIND FOLDER` (torch 2.13, gloo).

absent: rank 2 never calls the last collective. behind: rank 1 stays away from its half of the job, and the other half
runs on. mismatch: rank 1 calls another collective than the rest.
"""

import os
import sys
import threading
import time

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

kind, folder = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
half = [dist.new_group([0, 1], group_desc="tp"), dist.new_group([2, 3], group_desc="tp")][rank // 2]
x = torch.ones(8)
parts = [torch.empty(8) for _ in range(4)]
for _ in range(3):
    dist.all_reduce(x)
    dist.all_reduce(x, group=half)
    dist.all_gather(parts, x)
dist.barrier()


def dump() -> None:
    time.sleep(2)
    # without stack traces, which hold paths
    with open(f"{folder}/rank_{rank}", "wb") as file:
        file.write(c10d._dump_fr_trace(True, False, False))
    with open(f"{folder}/rank_{rank}.json", "wb") as file:
        file.write(c10d._dump_fr_trace_json(True, False))
    time.sleep(1)
    os._exit(0)


threading.Thread(target=dump, daemon=True).start()
if kind == "absent" and rank != 2:
    dist.all_reduce(x)
elif kind == "behind":
    if rank != 1:
        dist.all_reduce(x, group=half)
        dist.all_reduce(x)
elif kind == "mismatch":
    if rank == 1:
        dist.all_gather(parts, x)
    else:
        dist.all_reduce(x)
time.sleep(60)
