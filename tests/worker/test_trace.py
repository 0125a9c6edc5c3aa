"""Every collective is in the trace once: with its size, its group, and how its end was seen.

What truly happened is told by torch's flight recorder, which counts collectives in C++, and for point-to-point, which
it does not record on gloo, by the script.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from evertrain.trace import layout
from evertrain.trace.reading import Reader, Records

from .gang import Gang, Result

RECORDED = """
def recorded():
    import pickle
    from torch._C._distributed_c10d import _dump_fr_trace
    sizes = {"Float": 4, "Byte": 1, "Long": 8, "Double": 8, "Int": 4}
    def of(shapes, kinds):
        return sum(sizes[kind] * torch.Size(shape).numel() for shape, kind in zip(shapes, kinds))
    found = []
    for one in pickle.loads(_dump_fr_trace(True, False, False))["entries"]:
        found.append([one["process_group"][0], one["profiling_name"],
                      of(one["input_sizes"], one["input_dtypes"]), of(one["output_sizes"], one["output_dtypes"])])
    return found
"""

OPERATIONS = """
import warnings
from torch.distributed.distributed_c10d import _coalescing_manager
import torch.distributed._functional_collectives as funcol
warnings.simplefilter("ignore")
join()
half = dist.new_group([0, 1])
x, y, z = torch.ones(4), torch.ones(8), torch.zeros(8)
parts = lambda: [torch.ones(4), torch.ones(4)]
dist.all_reduce(x); dist.broadcast(x, 0); dist.reduce(x, 0); dist.barrier()
dist.all_gather(parts(), x); dist.all_gather_into_tensor(y, x)
dist.reduce_scatter(x, parts()); dist.reduce_scatter_tensor(x, y); dist.all_to_all_single(z, y)
dist.gather(x, parts() if RANK == 0 else None); dist.scatter(x, parts() if RANK == 0 else None)
dist.all_gather_object([None, None], 1); dist.broadcast_object_list([1, 2])
with _coalescing_manager(): dist.all_reduce(x); dist.all_reduce(y)
with _coalescing_manager(async_ops=True) as block: dist.all_gather_into_tensor(y, x)
block.wait()
dist.monitored_barrier()
dist.all_reduce(x, group=half, async_op=True).wait()
kept = dist.all_reduce(y, group=half, async_op=True)    # nobody waits
funcol.all_reduce(x, "sum", dist.group.WORLD) + 1       # C++ waits
funcol.reduce_scatter_tensor(y, "sum", 0, dist.group.WORLD) + 1
if RANK == 0:
    dist.send(x, 1); dist.isend(y, 1).wait(); dist.send(x, 1, group=half)
else:
    dist.recv(x, 0); dist.recv(y); dist.recv(x, 0, group=half)
for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - RANK), dist.P2POp(dist.irecv, z[:4], 1 - RANK)]):
    work.wait()
never = dist.irecv(x, 1 - RANK)                         # nor here, and nothing comes
deadline = time.monotonic() + 30
while not kept.is_completed() and time.monotonic() < deadline: time.sleep(0.01)
time.sleep(0.1)
say(recorded())
"""

ANY, WAIT, POLL = "any", layout.SEEN["wait"], layout.SEEN["poll"]
EXPECTED: list[tuple[Any, ...]] = [  # group, operation, bytes, how its end is seen
    ("0", "all_reduce", 16, WAIT), ("0", "broadcast", 16, WAIT), ("0", "reduce", 16, WAIT), ("0", "barrier", 0, WAIT),
    ("0", "all_gather", 32, WAIT), ("0", "all_gather_into_tensor", 32, WAIT), ("0", "reduce_scatter", 32, WAIT),
    ("0", "reduce_scatter_tensor", 32, WAIT), ("0", "all_to_all_single", 32, WAIT), ("0", "gather", ANY, WAIT),
    ("0", "scatter", ANY, WAIT), ("0", "all_gather", 16, WAIT), ("0", "all_gather", ANY, WAIT),
    ("0", "broadcast", 16, WAIT), ("0", "broadcast", ANY, WAIT), ("0", "all_reduce_coalesced", 48, WAIT),
    ("0", "all_gather_into_tensor_coalesced", 32, WAIT), ("0", "monitored_barrier", 0, WAIT),
    ("1", "all_reduce", 16, WAIT), ("1", "all_reduce", 32, POLL), ("0", "all_reduce", 16, POLL),
    ("0", "reduce_scatter_tensor_coalesced", 32, 0),
]  # fmt: skip
MESSAGES = {
    0: [("0", "send", 16, 1, 1), ("0", "send", 32, 1, 2), ("1", "send", 16, 1, 1), ("0", "send", 16, 1, 3),
        ("0", "recv", 16, 1, 1)],
    1: [("0", "recv", 16, 0, 1), ("0", "recv_any_source", 32, 0, 2), ("1", "recv", 16, 0, 1), ("0", "recv", 16, 0, 3),
        ("0", "send", 16, 0, 1)],
}  # fmt: skip
"""Group, operation, bytes, peer and number between the two."""


def read(result: Result) -> Records:
    with Reader(result.ring) as reader:
        assert reader.lost() == 0
        return reader.since(0)


def said(result: Result, key: str) -> list[dict[str, Any]]:
    """Lines beside the page that have this key."""
    path = Path(str(result.ring).replace("ring-", "page-") + ".groups")
    return [line for line in map(json.loads, path.read_text().splitlines()) if key in line]


def in_order(result: Result) -> list[Any]:
    """Records by when they were posted; ones that follow each other in their groups."""
    records = sorted(read(result).operations, key=lambda one: int(one["t_posted"]))
    for comm in {int(one["comm"]) for one in records}:
        orders = [int(one["order"]) for one in records if one["comm"] == comm]
        assert orders == sorted(orders) and len(set(orders)) == len(orders), "each once"
    return records


def names(result: Result) -> dict[int, str]:
    return {int(line["id"], 16): line["name"] for line in said(result, "id")}


def test_each_operation_is_recorded_once_with_its_size_group_and_end(gang: Gang) -> None:
    results = gang.run(RECORDED + OPERATIONS)
    for rank, result in enumerate(results):
        assert result.status == 0, result.err
        group = names(result)
        collectives, messages = [], []
        for one in in_order(result):
            op, seen, flags = layout.OPS[one["op"]], int(one["seen"]), int(one["flags"])
            assert one["rank"] == rank and one["device"] == -1 and one["kind"] == layout.KINDS["done"]
            if seen:
                assert one["t_posted"] <= one["t_done"] and not flags & layout.POSTED_ONLY
                assert (one["t_posted"] <= one["t_wait"] <= one["t_done"]) == (seen == WAIT)
            else:
                assert one["t_done"] == 0 and flags & layout.POSTED_ONLY
            assert bool(flags & layout.COALESCED) == op.endswith("_coalesced")
            said_of_it = group[int(one["comm"])], op, int(one["bytes"])
            if flags & layout.POINT_TO_POINT:
                assert seen == WAIT
                messages.append((*said_of_it, int(one["peer"]), int(one["seq"])))
            else:
                assert one["peer"] == layout.NOBODY
                collectives.append((*said_of_it, seen))
        assert len(collectives) == len(EXPECTED)
        for one, expected in zip(collectives, EXPECTED, strict=True):
            assert all(b in (ANY, a) for a, b in zip(one, expected, strict=True)), (one, expected)
        assert sorted(messages) == sorted(MESSAGES[rank])

        with Reader(result.ring) as reader:
            at, (flying,) = reader.places()
            assert at[0] > 0, "blocked in nothing"
            assert (layout.OPS[flying["op"]], flying["flags"]) == ("recv", layout.POINT_TO_POINT | layout.POSTED_ONLY)
            # three have come to rank 1 before, one to rank 0
            assert (flying["peer"], flying["seq"], flying["t_wait"]) == (1 - rank, 2 + 2 * rank, 0)
        # each group was made with connections of its own
        sockets = [set(line["sockets"]) for line in said(result, "sockets")]
        assert len(sockets) == 2 and all(sockets) and not sockets[0] & sockets[1]
    assert names(results[0]) == names(results[1]), "ids agree"


MODELS = """
import warnings
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
warnings.simplefilter("ignore")
join()
def net(): return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward(); optimizer.step(); optimizer.zero_grad()
train(torch.nn.parallel.DistributedDataParallel(net()))
model = net()
for layer in model: fully_shard(layer)
train(fully_shard(model))
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
train(fully_shard(net(), mesh=mesh))                                                    # HSDP
train(parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}))
distribute_tensor(torch.ones(8, 8), mesh["tp"], [Shard(0)]).redistribute(mesh["tp"], [Replicate()]).full_tensor()
pipeline = mesh["dp"].get_group()
stage = PipelineStage(torch.nn.Linear(8, 8), dist.get_rank(pipeline), 2, torch.device("cpu"), group=pipeline)
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda a, b: (a - b).pow(2).mean())
for _ in range(2):
    if dist.get_rank(pipeline) == 0: schedule.step(torch.ones(8, 8))
    else: schedule.step(target=torch.ones(8, 8))
dist.barrier()
say(recorded())
"""
_AS_RECORDED = {
    "all_gather_into_tensor": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "all_reduce",
}  # fmt: skip
"""gloo builds them of others, and the flight recorder names those."""


def test_what_ddp_fsdp_tensor_and_pipeline_parallel_models_do_is_all_there(gang: Gang) -> None:
    sent: Counter[tuple[int, int, int, int]] = Counter()
    got: Counter[tuple[int, int, int, int]] = Counter()
    for rank, result in enumerate(gang.run(RECORDED + MODELS, world=4, timeout_s=100)):
        assert result.status == 0, result.err
        group = names(result)
        ours: Counter[tuple[str, str, int]] = Counter()
        for one in in_order(result):
            op, size = layout.OPS[one["op"]], int(one["bytes"])
            assert one["seen"] in (WAIT, POLL) and one["t_done"] >= one["t_posted"]
            if one["flags"] & layout.POINT_TO_POINT:
                pair = (rank, int(one["peer"])) if op == "send" else (int(one["peer"]), rank)
                (sent if op == "send" else got)[(*pair, int(one["seq"]), size)] += 1
            else:
                # the recorder counts one part of each of a coalesced block
                ours[group[int(one["comm"])], _AS_RECORDED.get(op, op), 0 if "coalesced" in op else size] += 1
        truth: Counter[tuple[str, str, int]] = Counter()
        for name, op, size_in, size_out in result.said:
            truth[name, op.removeprefix("gloo:"), max(size_in, size_out)] += 1
        (coalesced,) = truth - ours
        assert ours - truth == Counter({(*coalesced[:2], 0): 1}) and (truth - ours).total() == 1
        assert {op for _, op, _ in ours} >= {"all_reduce", "all_gather", "broadcast", "scatter", "barrier"}
        with Reader(result.ring) as reader:
            assert len(reader.table()) == 0, "nothing is in flight"
    # what one has sent the other has received, by the same numbers; both pipelines, both directions
    assert sent == got and {pair[:2] for pair in sent} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert all(count == 1 for count in sent.values())


def test_a_thousand_groups(gang: Gang) -> None:
    script = """
join()
began = time.monotonic()
made = [dist.new_group([0]) for _ in range(1000)]
took = time.monotonic() - began
for group in made: dist.all_reduce(torch.ones(2), group=group)
say(took)
"""
    (result,) = gang.run(script, world=1, timeout_s=100)
    assert result.status == 0, result.err
    records = read(result).operations
    assert len(records) == 1000 == len(set(records["comm"].tolist())) and set(records["seq"]) == {1}
    assert len(names(result)) == 1001


def test_nothing_lives_longer_for_it(gang: Gang) -> None:
    """Neither what the script drops without waiting, nor what ended while nobody looked."""
    script = """
import threading, weakref, gc
join()
threads = lambda: [open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task")]
def gone(reference, within=20):
    deadline = time.monotonic() + within
    while reference() is not None and time.monotonic() < deadline: time.sleep(0.005)
    return reference() is None
def storage_of(make):
    tensor = torch.ones(1000)
    work = make(tensor)
    return weakref.ref(tensor.untyped_storage()), work
seen = {"before": threads().count("evertrain-trace")}
x = torch.ones(4)
for _ in range(5): dist.all_reduce(x)
seen["synchronous"] = threads().count("evertrain-trace")

# on their way in gloo; dropped at once; gloo lets go of them when they are over, and so do we
tensor = torch.ones(1000)
dist.all_reduce(tensor, async_op=True)
from evertrain.worker import collectives
deadline = time.monotonic() + 20
while collectives._pending and time.monotonic() < deadline: time.sleep(0.005)
seen["held"] = len(collectives._pending)
seen["asynchronous"] = threads().count("evertrain-trace")
seen["python"] = threading.active_count()
reference = weakref.ref(tensor); del tensor
seen["reduced"] = gone(reference)

# asked of somebody who sends nothing; only the newest may still be on its way to the script
works = [dist.irecv(torch.ones(10), 1 - RANK, tag=7) for _ in range(3)]
seen["quiet"] = len(collectives._quiet)
del works
dist.all_reduce(x)
seen["quiet after"] = len(collectives._quiet)

pid = os.fork()
if pid == 0:
    w = collectives.session.current
    os._exit(0 if w is None and len(threads()) == 1 else 1)
seen["child"] = os.waitpid(pid, 0)[1]
deadline = time.monotonic() + 20
while "evertrain-trace" in threads() and time.monotonic() < deadline: time.sleep(0.05)
seen["idle"] = threads().count("evertrain-trace")
say(seen)
"""
    for result in gang.run(script):
        assert result.status == 0, result.err
        assert result.said == {
            "before": 0, "synchronous": 0, "held": 0, "asynchronous": 1, "python": 1, "reduced": True, "quiet": 3,
            "quiet after": 0, "child": 0, "idle": 0,
        }  # fmt: skip
        last = read(result).operations[-4:]
        given_up = [one for one in last if layout.OPS[one["op"]] == "recv"]
        assert len(given_up) == 3 and all(one["flags"] & layout.POSTED_ONLY and not one["t_done"] for one in given_up)


def test_what_a_rank_is_blocked_in_is_there_after_its_death(gang: Gang) -> None:
    script = """
join()
other = dist.new_group([0, 1])
x = torch.ones(1)
dist.all_reduce(x)
if RANK == 1: time.sleep(60)
early = dist.all_reduce(x, async_op=True)
dist.all_reduce(x, group=other)
"""
    zero, one = gang.run(script, timeout_s=6)
    group = names(zero)
    with Reader(zero.ring) as reader:
        at, flying = reader.places()
        blocked, first, second = flying
        assert at[0] == 0 and blocked["kind"] == layout.KINDS["blocked"]
        assert (group[int(blocked["comm"])], blocked["seq"]) == ("1", 1) and blocked["t_wait"] >= blocked["t_posted"]
        posted = {group[int(one["comm"])]: (int(one["seq"]), bool(one["t_wait"])) for one in (first, second)}
        assert posted == {"0": (2, False), "1": (1, True)}, "in flight is not waiting"
    with Reader(one.ring) as reader:
        assert len(reader.table()) == 0 and reader.since(0).operations["seq"].tolist() == [1]


def test_an_operation_that_fails_has_not_ended(gang: Gang) -> None:
    script = """
join()
x = torch.ones(1)
dist.all_reduce(x)
if RANK == 1: os._exit(0)
try:
    dist.all_reduce(x)
except RuntimeError:
    say("failed")
"""
    zero, _ = gang.run(script)
    assert zero.said == "failed"
    _, failed = read(zero).operations
    assert (failed["seen"], failed["t_done"], failed["flags"]) == (0, 0, layout.POSTED_ONLY)
    with Reader(zero.ring) as reader:
        assert len(reader.table()) == 0


def test_a_rank_trains_without_its_trace(gang: Gang) -> None:
    script = "join(); x = torch.ones(1); dist.all_reduce(x, async_op=True).wait(); dist.all_reduce(x); say(x.item())"
    for path, why in (("/nowhere/ring", "No such file"), (__file__, "begins with other bytes")):
        (result,) = gang.run(script, world=1, told={"trace": path})
        assert result.said == 1.0 and result.page is not None and result.page.collective.state == "done", result.err
        assert any(why in line["blind"] for line in said(result, "blind"))
    (result,) = gang.run(script, world=1, told={"trace": ""})
    assert result.said == 1.0 and not said(result, "blind")
