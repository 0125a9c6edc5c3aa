"""How long does a verdict over 10,000 ranks take, and how much do their nodes send for it?

    python benchmarks/stacks_scale.py [--quick] [--json FILE]

1,250 nodes of 8 ranks (`pp=10,dp=125,tp=8`), six processes a rank: the rank itself, four workers of its data loader and
a writer of checkpoints, with stacks as deep as those of real frameworks. One rank waits for its data loader; its
tensor parallel peers wait for it, their replicas for them, and the other stages in their pipeline transfers. Grouped as
an agent does it, and captured twice, as a verdict uses it. `megabytes` is the MessagePack of one capture of all nodes;
`merge_and_verdict_s` is processor time of one thread, from decoded captures to the verdict. The figures that begin with
`recorded_` are the same with a flight recorder of every rank, ten operations each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from evertrain.locate import culprit, grouping
from evertrain.locate.grouping import Seen
from evertrain.locate.parallel import coordinates, line
from evertrain.model import recording
from evertrain.model.activity import Operation, RankActivity
from evertrain.model.stacks import Dump, Frame, NodeCapture, ProcessKind, Thread
from harness import medians, parser, print_table, write_report

PER_NODE = 8
MESH = {"pp": 10, "dp": 125, "tp": 8}
CULPRIT = 4711
WORKERS = 4
SITE = "/opt/venv/lib/python3.11/site-packages"


def frames(*innermost: str, depth: int) -> tuple[Frame, ...]:
    """The frames that matter, and as many of a framework around them as real jobs have."""
    around = tuple(
        Frame(f"_call_impl_{at}", f"{SITE}/megatron/core/pipeline_parallel/schedules_{at % 5}.py", 100 + at)
        for at in range(depth - len(innermost))
    )
    own = []
    for one in innermost:
        function, _, place = one.partition(" ")
        file, _, number = place.partition(":")
        own.append(Frame(function, file if file.startswith("train") else f"{SITE}/{file}", int(number)))
    return (*own, *around)


C10D = "torch/distributed/distributed_c10d.py"
DATA = "torch/utils/data"
STACKS = {
    "loader": frames(
        "wait multiprocessing/connection.py:947", "get multiprocessing/queues.py:113",
        f"_try_get_data {DATA}/dataloader.py:1132", f"_next_data {DATA}/dataloader.py:1300", depth=22,
    ),
    "tp": frames(f"all_reduce {C10D}:2501", "forward megatron/core/tensor_parallel/mappings.py:30", depth=38),
    "dp": frames(f"reduce_scatter_tensor {C10D}:4100", "start_grad_sync megatron/core/ddp.py:150", depth=30),
    "pp": frames(f"recv {C10D}:2140", "recv_forward megatron/core/p2p_communication.py:90", depth=28),
    "worker": frames("get multiprocessing/queues.py:103", f"_worker_loop {DATA}/_utils/worker.py:340", depth=14),
    "stuck": frames("__getitem__ train_data.py:12", f"_worker_loop {DATA}/_utils/worker.py:349", depth=18),
    "writer": frames("recv multiprocessing/connection.py:250", "run torch/distributed/checkpoint/async.py:9", depth=12),
}  # fmt: skip


def processes(rank: int, scale: dict[str, int]) -> Iterator[Seen]:
    def seen(kind: ProcessKind, pid: int, stack: str, waits_in: str) -> Seen:
        dump = Dump((Thread(STACKS[stack], "MainThread", True, "idle"),), pid, "python train.py")
        return Seen(rank=rank, pid=pid, kind=kind, waits_in=waits_in, dump=dump)

    pid = 100_000 + 10 * rank
    yield seen("trainer", pid, where(rank, scale)[0], "futex_wait_queue")
    for worker in range(1, WORKERS + 1):
        stack, waits_in = ("stuck", "hrtimer_nanosleep") if rank == CULPRIT else ("worker", "do_poll")
        yield seen("loader", pid + worker, stack, waits_in)
    yield seen("checkpoint", pid + 9, "writer", "unix_stream_read_generic")


def where(rank: int, mesh: dict[str, int]) -> tuple[str, str]:
    """The stack of a rank and its operation: it waits where it is not at the culprit's coordinate, tp first."""
    if rank == CULPRIT:
        return "loader", "allreduce"
    here, there = coordinates(mesh, rank), coordinates(mesh, CULPRIT)
    dim = next(dim for dim in ("tp", "dp", "pp") if here[dim] != there[dim])
    if dim == "pp":
        mine = here["pp"]
        return "pp", f"recv {mine}<-{mine + (1 if there['pp'] > mine else -1)}"
    return dim, {"tp": "allreduce", "dp": "_reduce_scatter_base"}[dim]


def activity(rank: int, mesh: dict[str, int]) -> RankActivity:
    dim, op = where(rank, mesh)
    is_culprit = rank == CULPRIT
    name = group_name(mesh, rank, "tp" if is_culprit else dim)
    last = Operation(name, op, 81_234 - is_culprit)
    return RankActivity(
        rank=rank, node=f"gpu-node-{rank // PER_NODE:04d}", still_s=7.25, inside=None if is_culprit else last,
        last=last, started=True, step=4_321, step_s=11.834, cpu_fraction=0.0312, io_bytes_per_s=812.5, faults_per_s=3.2,
    )  # fmt: skip


def group_name(mesh: dict[str, int], rank: int, dim: str) -> str:
    return f"{list(mesh).index(dim) + 1}{line(mesh, rank, dim)[0]:05d}"


def recorded(rank: int, mesh: dict[str, int]) -> recording.Recording:
    """The last of each kind in each group, and what is pending."""
    kinds = ("_reduce_scatter_base", "_allgather_base", "all_reduce")
    told = [
        recording.Operation(group_name(mesh, rank, dim), f"{kind}{at}", 81_233, False, False)
        for dim in mesh
        for at, kind in enumerate(kinds)
    ]
    dim, _ = where(rank, mesh)
    if rank != CULPRIT and dim != "pp":
        shape = (((4096, 8192),), ((4096, 8192),), ("BFloat16",), ("BFloat16",))
        told.append(recording.Operation(group_name(mesh, rank, dim), "all_reduce", 81_234, False, True, shape))
    return recording.Recording(rank, 2000, tuple(told), time=1.7e9)


def capture(node: int, number: int, mesh: dict[str, int], size: int, *, records: bool) -> NodeCapture:
    here = range(node * PER_NODE, (node + 1) * PER_NODE)
    groups = [recording.Group("0", "default_pg", tuple(range(size)))]
    for rank in here:
        groups += [recording.Group(group_name(mesh, rank, dim), f"mesh_{dim}", line(mesh, rank, dim)) for dim in mesh]
    return NodeCapture(
        number=number,
        attempt=3,
        node=f"gpu-node-{node:04d}",
        time=1.7e9,
        positions=grouping.group(one for rank in here for one in processes(rank, mesh)),
        activities=tuple(activity(rank, mesh) for rank in here),
        groups=grouping.slim(groups, here, size),
        recordings=tuple(recorded(rank, mesh) for rank in here) if records else (),
    )


def measure(mesh: dict[str, int], size: int, *, records: bool) -> dict[str, float]:
    nodes = size // PER_NODE
    began = time.process_time()
    taken = [[capture(node, number, mesh, size, records=records) for node in range(nodes)] for number in (1, 2)]
    grouped_s = (time.process_time() - began) / nodes / 2
    sent = [[msgspec.msgpack.encode(one) for one in captures] for captures in taken]
    began = time.process_time()
    first, second = ([msgspec.msgpack.decode(data, type=NodeCapture) for data in one] for one in sent)
    decode_s = (time.process_time() - began) / 2
    expected = {rank: f"gpu-node-{rank // PER_NODE:04d}" for rank in range(size)}
    # the earlier capture has been merged when it came
    earlier = grouping.merge(first, expected)
    began = time.process_time()
    found = culprit.locate(grouping.merge(second, expected), earlier, mesh=mesh)
    verdict_s = time.process_time() - began
    if (found.kind, found.ranks) != ("loader", (CULPRIT,)):
        raise SystemExit(f"the verdict is wrong: {found}")
    return {
        "merge_and_verdict_s": verdict_s,
        "megabytes": sum(map(len, sent[1])) / 1e6,
        "decode_s": decode_s,
        "group_on_node_ms": grouped_s * 1000,
    }


def main() -> None:
    flags = parser(__doc__).parse_args()
    runs = 2 if flags.quick else 7
    samples: dict[str, list[float]] = {}
    size = MESH["pp"] * MESH["dp"] * MESH["tp"]
    for _ in range(runs):
        for name, value in measure(MESH, size, records=False).items():
            samples.setdefault(name, []).append(value)
        for name, value in measure(MESH, size, records=True).items():
            samples.setdefault(f"recorded_{name}", []).append(value)
    found = medians(samples)
    print_table(("figure", f"{size} ranks x {WORKERS + 2}"), [(name, f"{value:.3f}") for name, value in found.items()])
    write_report(flags.json, found, {name: len(values) for name, values in samples.items()})


if __name__ == "__main__":
    main()
