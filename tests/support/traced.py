"""The trace rings of a small job, as its ranks and its agent would have left them, without running one.

Four ranks in one group, `default_pg`. All have ended operations 1 to `done`; those of `inside` wait in the next one,
and rank `behind` has not begun it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from evertrain.trace import flows, layout, rings

WORLD = 4
COMM = layout.communicator_id(1, "0", range(WORLD))
OP = layout.OPS.index("all_reduce")
_UNSEEN = [layout.UNSEEN] * 6


def operation(
    kind: str,
    rank: int,
    seq: int,
    posted_ns: int,
    *,
    wait_ns: int = 0,
    done_ns: int = 0,
    flags: int = 0,
    comm: int = COMM,
) -> bytes:
    """All of a record but its tail."""
    return layout.OPERATION_STRUCT.pack(
        seq, layout.KINDS[kind], layout.SEEN["wait"] if done_ns else 0, OP, flags, 0, -1, rank, layout.NOBODY,
        comm, seq, seq, 4096, posted_ns, wait_ns, done_ns, done_ns or posted_ns, 0, *_UNSEEN, 0, 0, 0,
    )  # fmt: skip


def flow(rank: int, peer: int, now_ns: int, sent: int, *, inode: int = 1) -> bytes:
    return layout.FLOW_STRUCT.pack(
        0, layout.KINDS["flow"], 0, 0, 0, 0, -1, rank, peer, 0, 0, now_ns, 100_000, inode, sent, sent,
        *[0] * 12, 1, 0,
    )  # fmt: skip


def host(rank: int, now_ns: int, letter: str = "S") -> bytes:
    return layout.HOST_STRUCT.pack(
        0, layout.KINDS["host"], 0, 0, 0, 0, -1, rank, layout.NOBODY, 0, 0, now_ns, 100_000, 12, ord(letter), 0,
        5000, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip


def job(
    node_dir: Path,
    *,
    ranks: Sequence[int] = tuple(range(WORLD)),
    node: str = "node-0",
    attempt: int = 1,
    done: int = 5,
    behind: int | None = 2,
    held_s: float = 8.0,
    read_ahead: int = 0,
) -> None:
    """`held_s`: so long the others have waited in what comes next."""
    folder = node_dir / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    (node_dir / "pages").mkdir(exist_ok=True)
    now = time.monotonic_ns()
    held_ns = now - int(held_s * 1e9)
    for rank in ranks:
        stem = f"a{attempt}-r{rank}"
        about = {"job": "job", "node": node}
        for writer, table in (("hook", 16), ("agent", 0)):
            path = str(folder / f"{stem}-{writer}.ring")
            rings.create(path, writer=writer, capacity=1000, table=table, rank=rank, attempt=attempt, **about)
        hook = rings.open_writer(str(folder / f"{stem}-hook.ring"))
        for seq in range(1, done + 1):
            began = held_ns - (done + 1 - seq) * 10_000_000
            hook.append(operation("done", rank, seq, began, wait_ns=began, done_ns=began + 4_000_000)[8:])
        if rank != behind:
            hook.set_place(0, operation("blocked", rank, done + 1, held_ns, wait_ns=held_ns))
            hook.set_place(1, operation("state", rank, done + 1, held_ns, wait_ns=held_ns))
        for at in range(read_ahead):
            flags = layout.POINT_TO_POINT | layout.POSTED_ONLY
            hook.set_place(2 + at, operation("state", rank, 100 + at, held_ns, flags=flags))
        agent = rings.open_writer(str(folder / f"{stem}-agent.ring"))
        agent.append(host(rank, now - 10_000_000)[8:])
        agent.append(flow(rank, layout.NOBODY, now, 1000 + rank, inode=50 + rank)[8:])
        following = (rank + 1) % WORLD
        flows.append_pairs(
            folder / f"{stem}-agent.flows",
            [
                flows.Pair(rank, 50 + rank, f"10.0.0.{rank}:1{rank}", f"10.0.0.{following}:2{following}"),
                flows.Pair(
                    rank, 60 + rank, f"10.0.0.{rank}:2{rank}", f"10.0.0.{(rank - 1) % WORLD}:1{(rank - 1) % WORLD}"
                ),
            ],
        )
        said = {"name": "0", "desc": "default_pg", "ranks": list(range(WORLD)), "id": f"{COMM:x}"}
        (node_dir / "pages" / f"{stem}.groups").write_text(json.dumps(said) + "\n")
