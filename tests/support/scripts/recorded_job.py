"""Jobs of a few gloo ranks that end in a fault, forked from one process that has imported torch.

Reads lines `{"kind", "ranks", "folder"}`; forks the ranks; answers with a line of their pids. Each rank serves its
flight recorder at FOLDER/RANK.sock, writes its groups to FOLDER/RANK.groups, trains a few steps and then does what
`kind` says. An alarm ends what nobody has ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

ODD = 2
STEPS = 6
LARGE = 1 << 21
"""gloo ends a process that receives more than it expects. So many values go in pieces, of which a rank with more of
them awaits some that never come."""


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        pids = []
        for rank in range(order["ranks"]):
            pid = os.fork()
            if not pid:
                try:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.alarm(90)
                    run(order["kind"], rank, order["ranks"], order["folder"])
                finally:
                    os._exit(1)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


def run(kind: str, rank: int, ranks: int, folder: str) -> None:
    server = c10d._WorkerServer(f"{folder}/{rank}.sock")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    everyone = list(range(ranks))
    layout = {
        "tp": [everyone[at : at + 2] for at in range(0, ranks, 2)],
        "dp": [everyone[at::2] for at in range(2)],
        "a": [everyone],
        "b": [everyone],
    }
    mine = {}
    for name, groups in layout.items():
        for members in groups:
            made = dist.new_group(members, group_desc=name)
            if rank in members:
                mine[name] = (made, members)
    told = [{"name": "0", "desc": "default_pg", "ranks": everyone}]
    told += [{"name": made.group_name, "desc": name, "ranks": members} for name, (made, members) in mine.items()]
    with open(f"{folder}/{rank}.new", "w") as file:
        json.dump(told, file)
    os.rename(f"{folder}/{rank}.new", f"{folder}/{rank}.groups")
    try:
        train(kind, rank, *(mine[name][0] for name in ("tp", "dp", "a", "b")))
    except RuntimeError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
    while server:
        time.sleep(60)


def train(kind: str, rank: int, tp: object, dp: object, a: object, b: object) -> None:
    x, y = torch.ones(8), torch.ones(LARGE if kind.startswith("wrong") else 32)

    parts = [torch.empty(8) for _ in range(dist.get_world_size())]
    here = [torch.empty(8) for _ in range(dist.get_world_size(dp))]
    is_odd = rank == ODD
    if kind == "nothing yet":
        time.sleep(0 if is_odd else 60)
    step = 0
    while True:
        step += 1
        is_now = step == STEPS or (kind == "at once" and step == 1)
        fault = kind if is_now else ""

        for _ in range(2):
            if not (fault == "tensor group left out" and is_odd):
                dist.all_reduce(x, group=tp)
        if fault == "another order" and is_odd:
            dist.all_gather(parts, x)
            dist.all_reduce(y)
        else:
            if fault in ("absent", "at once") and is_odd:
                time.sleep(60)
            if fault == "interpreter held" and is_odd:
                ctypes.PyDLL(None).sleep(60)
            if fault == "wrong size" and is_odd:
                y = torch.ones(2 * LARGE)
            if fault == "wrong type" and is_odd:
                y = torch.ones(LARGE, dtype=torch.float64)
            if not (fault == "left out" and is_odd):
                dist.all_reduce(y)
            dist.all_gather(parts, x)
        if fault == "wrong operation" and is_odd:
            dist.all_reduce(torch.ones(5), group=dp)
        dist.all_gather(here, x, group=dp)
        if fault == "two groups":
            for group in (a, b) if rank % 2 else (b, a):
                dist.all_reduce(x, group=group)
        if fault == "waits in a transfer":
            # rank 0 waits for 2, in what no recorder shows, and all others for rank 0
            if rank == 0:
                dist.recv(x, 2)
            if is_odd:
                time.sleep(60)
        if kind == "healthy":
            time.sleep(0.002)


if __name__ == "__main__":
    main()
