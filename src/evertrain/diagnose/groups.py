"""How do the ranks of a test find each other? Within a node through a file, between nodes through somebody's store."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from evertrain.diagnose.bench import Bench


def join_local(bench: Bench) -> None:
    """All ranks of this node."""
    _join(bench, FileStore(bench.rendezvous, bench.ranks), bench.rank, bench.ranks)


def join_remote(bench: Bench, store: Mapping[str, Any], key: str, rank: int, world: int) -> None:
    """Ranks of several nodes; `key` was not used with this store before."""
    limit = timedelta(seconds=max(bench.left_s, 1.0))
    client = TCPStore(str(store["host"]), int(store["port"]), is_master=False, timeout=limit)
    _join(bench, PrefixStore(f"evertrain-diagnose/{key}", client), rank, world)


def _join(bench: Bench, store: Store, rank: int, world: int) -> None:
    dist.init_process_group(
        "nccl" if bench.is_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=max(bench.left_s, 1.0)),
        device_id=bench.device if bench.is_cuda else None,
    )


def all_agree(bench: Bench, value: float) -> float:
    """The largest of all ranks' values."""
    shared = torch.tensor([value], dtype=torch.float64, device=bench.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return float(shared.item())
