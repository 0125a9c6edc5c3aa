"""A script without a line of ours still tells its steps, phase and collectives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from evertrain.observe import pages
from evertrain.worker import page

from .gang import Gang

LOOK = """
from evertrain.observe import pages
from evertrain.worker import session
def look():
    group, seq, op, state = session.current.page.collective
    return [group.decode(), seq, op.decode(), ["none", "entered", "done"][state]]
"""


def test_ddp_without_a_line_of_ours(gang: Gang) -> None:
    script = """
join()
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(5):
    net(torch.ones(2, 8)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""
    for result in gang.run(script):
        view = result.page
        assert result.status == 0 and view is not None, result.err
        assert (view.rel_step, view.abs_step, view.phase) == (5, -1, "exit")
        assert view.step_s > 0 and view.resumed_time > 0 and view.resumed_step == -1
        assert (view.collective.group, view.collective.op, view.collective.state) == ("0", "allreduce", "done")
        assert view.collective.seq >= 5 and not view.env_changed


def test_every_kind_of_collective_is_seen(gang: Gang) -> None:
    script = (
        LOOK
        + """
import torch.distributed._functional_collectives as funcol
seen = {}
join()
half = dist.new_group([0, 1])
x = torch.ones(4)
def do(name, call):
    call(); seen[name] = look()
do("all_reduce", lambda: dist.all_reduce(x))
do("sub", lambda: dist.all_reduce(x, group=half))
do("all_gather", lambda: dist.all_gather([torch.ones(4), torch.ones(4)], x))
do("barrier", dist.barrier)
do("object", lambda: dist.all_gather_object([None, None], {"a": 1}))
do("functional", lambda: funcol.all_reduce(x, "sum", dist.group.WORLD) + 1)
do("p2p", lambda: dist.send(x, 1) if RANK == 0 else dist.recv(x, 0))
if RANK == 1: time.sleep(0.5)
first = dist.all_reduce(x, async_op=True)
seen["first"] = look()
other = dist.all_reduce(x, group=half, async_op=True)
seen["other"] = look()
def look_later():
    time.sleep(0.1); seen["waiting"] = look()
import threading
thread = threading.Thread(target=look_later); thread.start()
first.wait(); seen["waited"] = look()
thread.join(); other.wait(); seen["end"] = look()
say(seen)
"""
    )
    zero, one = gang.run(script)
    assert zero.status == one.status == 0, zero.err + one.err
    seen = zero.said
    world, half = seen["all_reduce"][0], seen["sub"][0]
    assert world != half
    assert seen["all_reduce"][2:] == ["allreduce", "done"]
    assert seen["sub"][1:] == [1, "allreduce", "done"], "groups count on their own"
    assert seen["all_gather"] == [world, seen["all_reduce"][1] + 1, "allgather", "done"]
    assert seen["barrier"][2:] == ["barrier", "done"]
    assert seen["functional"][0] == world
    assert seen["p2p"][1:] == [1, "send 0->1", "done"] and one.said["p2p"][1:] == [1, "recv 1<-0", "done"]
    sequence = seen["first"][1]
    assert seen["first"] == [world, sequence, "allreduce", "entered"]
    assert seen["other"] == [half, 2, "allreduce", "entered"]
    assert seen["waiting"] == [world, sequence, "allreduce", "entered"], "the page shows what the rank waits for"
    assert seen["waited"] == [world, sequence, "allreduce", "done"]


def test_fsdp_is_seen(gang: Gang) -> None:
    script = (
        LOOK
        + """
from torch.distributed.fsdp import fully_shard
join()
net = fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    net(torch.ones(2, 8)).sum().backward()
    optimizer.step(); optimizer.zero_grad()
say(look())
"""
    )
    results = gang.run(script)
    assert [result.status for result in results] == [0, 0], results[0].err
    assert results[0].said[2:] == ["_reduce_scatter_base", "done"]
    assert results[0].page is not None and results[0].page.rel_step == 3


def test_a_rank_that_waits_in_vain_shows_the_collective_it_is_in(gang: Gang) -> None:
    script = "join()\ndist.all_reduce(torch.ones(1))\nif RANK == 1: time.sleep(60)\ndist.all_reduce(torch.ones(1))\n"
    zero, one = gang.run(script, timeout_s=1.5)
    assert zero.page is not None and one.page is not None
    assert zero.page.collective.state == "entered" and one.page.collective.state == "done"
    assert zero.page.collective.seq == one.page.collective.seq + 1


def test_children_do_not_write_their_parents_page(gang: Gang) -> None:
    script = """
import evertrain.worker.session as s
before = s.current.page.sequence
pid = os.fork()
if pid == 0:
    evertrain.report(step=99)
    with evertrain.phase("other"): pass
    os._exit(0 if evertrain.init() is None else 1)
status = os.waitpid(pid, 0)[1]
say([status, s.current.page.sequence - before])
"""
    (result,) = gang.run(script, world=1)
    assert result.said == [0, 0] and result.page is not None and result.page.abs_step == -1


def test_data_loader_workers_by_fork(gang: Gang) -> None:
    script = """
loader = torch.utils.data.DataLoader(list(range(8)), batch_size=2, num_workers=2, multiprocessing_context="fork")
say(sum(int(batch.sum()) for batch in loader))
"""
    (result,) = gang.run(script, world=1)
    assert result.said == 28 and result.status == 0, result.err


def test_environment_set_before_torch_would_be_imported_is_noticed(gang: Gang) -> None:
    script = "os.environ['MKL_NUM_THREADS'] = '2'\njoin()\n"
    assert all(result.page and result.page.env_changed for result in gang.run(script))
    script = "os.environ['NCCL_DEBUG'] = 'INFO'\njoin()\n"
    assert not any(result.page and result.page.env_changed for result in gang.run(script))


def test_a_group_can_be_made_again(gang: Gang) -> None:
    script = """
join(); dist.all_reduce(torch.ones(1)); dist.destroy_process_group()
dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"] + "-2", rank=RANK, world_size=WORLD)
x = torch.ones(1); dist.all_reduce(x); say(x.item())
"""
    assert [result.said for result in gang.run(script)] == [2.0, 2.0]


SPAWNED = """
import sys, json
sys.path.insert(0, {source!r})
from evertrain.worker import hooks, session
hooks.install_on_import()
session.begin(json.loads(sys.argv[1]))
assert "torch" not in sys.modules
finders = len(sys.meta_path)
import torch
assert len(sys.meta_path) == finders - 1 and type(torch.__loader__).__name__ == "SourceFileLoader"
assert torch.__spec__.loader is torch.__loader__
net = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    net(torch.ones(2)).sum().backward()
    optimizer.step()
"""


def test_a_spawned_rank_is_hooked_when_its_script_imports_torch(tmp_path: Path) -> None:
    path = str(tmp_path / "page")
    page.create(path, job="job", term=1, attempt=1, rank=0)
    session = {
        "job": "job", "term": 1, "attempt": 1, "node": "node-0", "rank": 0, "local_rank": 0, "world_size": 1,
        "page": path, "slots_dir": str(tmp_path), "disk_dir": str(tmp_path), "resume": None, "resume_tier": None,
        "reached": None, "restart": False, "faults": [], "fired_dir": str(tmp_path),
    }  # fmt: skip
    source = str(Path(page.__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", SPAWNED.format(source=source), json.dumps(session)],
        check=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    view, _ = pages.read(path)
    assert view is not None and view.rel_step == 3 and view.phase == "exit"
