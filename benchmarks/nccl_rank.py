"""One rank of nccl_overhead.py: the median microseconds of an all_reduce of each size, on its own GPU, as JSON."""

from __future__ import annotations

import json
import os
import sys
from statistics import median

import torch
import torch.distributed as dist

WARM_UP, BATCHES, CALLS = 20, 20, 10


def main() -> None:
    sizes = [int(size) for size in sys.argv[1].split(",")]
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = {}
    for size in sizes:
        data = torch.ones(max(1, size // 4), device="cuda")
        for _ in range(WARM_UP):
            dist.all_reduce(data)
        torch.cuda.synchronize()
        seen = []
        for _ in range(BATCHES):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(CALLS):
                dist.all_reduce(data)
            end.record()
            end.synchronize()
            seen.append(begin.elapsed_time(end) * 1000 / CALLS)
        found[size] = median(seen)
    if dist.get_rank() == 0:
        print(json.dumps({"us": found, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
