"""Do data between ranks arrive unchanged, and how fast? All-to-all within a node, or all-gather among nodes.

Each rank knows what every other one sends in each round, so it can say whose data came with other content.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evertrain.diagnose import groups
from evertrain.diagnose.bench import Absent, Bench, whole_numbers

ON_EACH_RANK = True
_U32 = struct.Struct("=I")
_TOTAL_RETRANS, _DATA_SEGS_OUT, _INFO_BYTES = 100, 156, 160
"""In the kernel's struct tcp_info."""


def run(
    bench: Bench,
    *,
    size_bytes: int = 0,
    rounds: int = 5,
    store: Mapping[str, Any] | None = None,
    nodes: Sequence[str] = (),
    key: str = "",
) -> None:
    size = size_bytes or (256 << 20 if bench.is_cuda else 8 << 20 if nodes else 4 << 20)
    if nodes:
        if store is None or bench.node not in nodes:
            raise ValueError(f"{bench.node} needs a store, and to be one of {', '.join(nodes)}")
        world, rank = bench.ranks * len(nodes), bench.ranks * list(nodes).index(bench.node) + bench.rank
        groups.join_remote(bench, store, key, rank, world)
        _repeat(bench, "all-gather", size, rounds, rank, world, nodes)
    else:
        if bench.ranks < 2:
            raise Absent("one rank alone has nobody to exchange data with")
        groups.join_local(bench)
        _repeat(bench, "all-to-all", size, rounds, bench.rank, bench.ranks, [bench.node])


# before torch 2.13 it had another name, which warns since
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _repeat(bench: Bench, kind: str, size: int, rounds: int, rank: int, world: int, nodes: Sequence[str]) -> None:
    part = -(-size // world)
    content = whole_numbers((part + 251 * 64,), 0, 256, "exchange").to(torch.uint8).to(bench.device)

    def sent_by(sender: int, to: int, number: int) -> Tensor:
        """A window of the same numbers, another one for each sender, receiver and round."""
        start = (sender * 37 + to * 11 + number * 101) % (251 * 64)
        return content[start : start + part]

    wrong: dict[int, int] = {}
    seconds: list[float] = []
    received = torch.empty(part * world, dtype=torch.uint8, device=bench.device)
    # the first round makes connections
    for number in range(rounds + 1):
        if kind == "all-gather":
            mine = sent_by(rank, 0, number).contiguous()
            work = lambda mine=mine: _all_gather(received, mine)  # noqa: E731
        else:
            mine = torch.cat([sent_by(rank, to, number) for to in range(world)])
            work = lambda mine=mine: dist.all_to_all_single(received, mine)  # noqa: E731
        dist.barrier()
        took = bench.timed(work)
        if number:
            seconds.append(took)
        for sender in range(world):
            expected = sent_by(sender, 0 if kind == "all-gather" else rank, number)
            if count := int((received[sender * part : (sender + 1) * part] != expected).sum()):
                wrong[sender] = wrong.get(sender, 0) + count
        # all or none go on; a slow link is to be told by its rate, and not because it was late
        if groups.all_agree(bench, time.monotonic() + 2 * took - bench.deadline) > 0 and seconds:
            break
    names = sorted({_name(nodes, world, sender) for sender in wrong})
    segments, resent = _tcp()
    others = world - bench.ranks if kind == "all-gather" else world - 1
    because = f"data of {', '.join(names)} came with other content ({sum(wrong.values())} bytes)" if wrong else ""
    rate = others * part * len(seconds) / sum(seconds) if seconds else 0.0
    bench.say(
        kind, rate, "bytes/s", ok=not wrong, because=because, mismatches=names, wrong_bytes=sum(wrong.values()),
        nodes=list(nodes), rounds=len(seconds), received_bytes=others * part, slowest_s=max(seconds, default=0.0),
        segments=segments, resent=resent,
    )  # fmt: skip
    dist.barrier()


def _tcp() -> tuple[int, int]:
    """Segments with data that TCP has sent over this process's connections, and how many of them again."""
    segments = resent = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(entry))) as one:
                if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        except OSError:  # it is no socket, or closed by now
            continue
        if len(info) >= _INFO_BYTES:
            resent += _U32.unpack_from(info, _TOTAL_RETRANS)[0]
            segments += _U32.unpack_from(info, _DATA_SEGS_OUT)[0]
    return segments, resent


def _name(nodes: Sequence[str], world: int, sender: int) -> str:
    if len(nodes) == 1:
        return f"rank {sender}"
    return nodes[sender // (world // len(nodes))]
