# ruff: noqa: E402
import os

# the first moment of the script: nothing has been opened or imported by it yet
START = {
    "descriptors": sorted(name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
    "threads of the system": len(os.listdir("/proc/self/task")),
    "names in __main__": sorted(globals()),
}

import atexit
import json
import multiprocessing
import pickle
import random
import sndhdr
import sys
import threading
from pathlib import Path

import neighbour
import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

FOLDER = Path(sys.argv[1])
RANK = int(os.environ["RANK"])
FACTS = {**START}
OWN = {}
"""What every rank should have for itself."""


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index * 10


def double(index, shared):
    shared *= 2


def in_the_end(who):
    main = sys.modules.get("__main__")
    FACTS[f"{who} sees __main__"] = main is not None and main.Numbers is Numbers
    FACTS[f"{who} can pickle"] = type(pickle.loads(pickle.dumps(Numbers()))).__name__
    write()


def write():
    (FOLDER / f"facts-{RANK}.json").write_text(json.dumps(FACTS))
    (FOLDER / f"own-{RANK}.json").write_text(json.dumps(OWN))


def outlive_main():
    threading.main_thread().join()
    in_the_end("a thread")


if __name__ == "__main__":
    import numpy

    FACTS |= neighbour.facts(sys.modules["__main__"])
    FACTS["a sibling called like a standard module"] = sndhdr.WHO
    OWN["seed of torch"] = torch.initial_seed()
    OWN["torch"] = torch.rand(2).tolist()
    FACTS["threads of torch"] = torch.get_num_threads()
    OWN["numpy"] = numpy.random.rand()
    OWN["random"] = random.random()
    OWN["authkey"] = multiprocessing.current_process().authkey.hex()
    if RANK == 0:
        for method in ("fork", "spawn", "forkserver"):
            loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context=method)
            FACTS[f"data loader by {method}"] = [batch.tolist() for batch in loader]
    else:
        shared = torch.ones(2).share_memory_()
        torch.multiprocessing.spawn(double, (shared,), nprocs=1)
        FACTS["torch.multiprocessing"] = shared.tolist()
    torch.distributed.init_process_group("gloo")
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    FACTS["all_reduce"] = total.item()
    torch.distributed.destroy_process_group()
    torch.optim.SGD([torch.nn.Parameter(total)], lr=0.1)  # imports the rest of torch
    FACTS |= neighbour.facts_after_torch()
    FACTS["stdin"] = sys.stdin.read() if RANK == 0 else ""
    print("written to stdout")
    sys.stdout.buffer.write(b"\xff no UTF-8, no end of line")
    print("written to stderr", file=sys.stderr)
    atexit.register(in_the_end, "atexit")
    threading.Thread(target=outlive_main).start()
