"""What a rank saved is what it gets back, bit for bit, after any death."""

from __future__ import annotations

import pytest

from evertrain.checkpoint import disk, slots
from evertrain.decide import resume
from evertrain.worker import slots as layout

from .gang import Gang

TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

def build(kind):
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (torch.nn.Linear(128, 128), torch.nn.GELU(), torch.nn.Dropout(0.1))]
    net = torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(128)) if kind == "ddp" else torch.nn.Sequential(*layers)
    if kind == "ddp":
        return DDP(net)
    sizes = (WORLD,) if kind == "fsdp" else (2, WORLD // 2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes):])
    for layer in net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)

def train(kind, steps, *, settle=True, leave_at=None, **save):
    join()
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    seen = torch.zeros(3)
    torch.manual_seed(100 + RANK)
    random.seed(RANK)
    checkpointer = evertrain.Checkpointer(
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": seen}, **save
    )
    start = checkpointer.load() or 0
    if settle:
        evertrain.settle(model, torch.zeros(16, 128))
    for step in range(start + 1, steps + 1):
        x = torch.randn(16, 128) + random.random()
        loss = (model(x) - x).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        seen += 1
        evertrain.report(step=step, loss=loss)
        checkpointer.save(step)
        if step == leave_at:
            checkpointer.wait()
            os._exit(7)
    say({"bits": bits(*model.state_dict().values(), seen), "start": start, "seen": seen.tolist(),
         "draws": [random.random(), torch.rand(1).item()]})
    dist.barrier()
    dist.destroy_process_group()
"""


def chosen(gang: Gang, world: int = 2) -> resume.Resume | None:
    copies = [*slots.list(gang.slots_dir), *disk.list(gang.disk_dir)]
    return resume.choose({"node": copies}, dict.fromkeys(range(world), "node"))


def undisturbed(gang: Gang, kind: str, world: int = 2) -> list[object]:
    results = gang.run(TRAIN + f"train({kind!r}, 12)", world=world)
    assert [one.status for one in results] == [0] * world, results[0].err
    for copy in slots.list(gang.slots_dir):  # the next run begins from nothing
        (gang.slots_dir / f"r{copy.rank}" / copy.path[-1]).unlink()
    return [one.said["bits"] for one in results]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_killed_and_restored_equals_undisturbed(gang: Gang, kind: str) -> None:
    # with two ranks a sum has one order only, and nothing would be shown
    wanted = undisturbed(gang, kind, world=4)
    script = TRAIN + f"train({kind!r}, 12)"
    first = gang.run(script, world=4, faults=["kill:rank=1@step=7"])
    assert first[1].status == -9
    choice = chosen(gang, world=4)
    assert choice is not None and choice.step == 6

    second = gang.run(script, world=4, attempt=2, resume=choice.step, reached=6)
    assert [one.status for one in second] == [0] * 4, second[0].err
    assert [one.said["bits"] for one in second] == wanted
    assert not any("is not kept" in one.err for one in second), "nobody takes training for a change by others"
    assert second[0].said["start"] == 6 and second[0].said["seen"] == [12.0] * 3
    view = second[0].page
    assert view is not None
    assert (view.resumed_step, view.abs_step, view.rel_step, view.phase) == (6, 12, 6, "exit")
    assert 0 < view.resumed_time < view.passed_time


def test_without_settle_the_bits_differ(gang: Gang) -> None:
    """The check can fail: DDP's first pass after a restart adds up in another order."""
    script = TRAIN + "train('ddp', 12, settle=False)"
    wanted = [one.said["bits"] for one in gang.run(script, world=4)]
    again = [one.said["bits"] for one in gang.run(script, world=4)]
    assert again == wanted, "the same run twice is the same"
    gang.run(TRAIN + "train('ddp', 12, settle=False, leave_at=6)", world=4, attempt=2)
    resumed = gang.run(script, world=4, attempt=3, resume=6)
    assert [one.said["start"] for one in resumed] == [6] * 4
    assert [one.said["bits"] for one in resumed] != wanted


def test_killed_while_saving_leaves_the_step_before(gang: Gang) -> None:
    wanted = undisturbed(gang, "ddp")
    script = TRAIN + "train('ddp', 12)"
    first = gang.run(script, faults=["kill:rank=0@save=9"])
    assert first[0].status == -9
    choice = chosen(gang)
    assert choice is not None and choice.step == 8
    second = gang.run(script, attempt=2, resume=8)
    assert [one.said["bits"] for one in second] == wanted


def test_what_all_have_is_kept_while_one_rank_saves_nothing(gang: Gang) -> None:
    script = """
join()
state = torch.zeros(4)
checkpointer = evertrain.Checkpointer({"state": state})
checkpointer.load()
for step in range(1, 12):
    dist.barrier()
    broken = RANK == 0 and step > 3
    evertrain.report(step=step, loss=float("nan") if broken else 1.0)
    checkpointer.save(step)
"""
    results = gang.run(script)
    assert [one.status for one in results] == [0, 0], results[0].err
    choice = chosen(gang)
    assert choice is not None and choice.step == 3


def test_goes_on_from_disk_when_memory_is_gone(gang: Gang) -> None:
    wanted = undisturbed(gang, "fsdp")
    script = TRAIN + "train('fsdp', 12)"
    gang.run(script, faults=["kill:rank=1@step=10"])
    step = chosen(gang)
    assert step is not None
    paths = [copy.path for copy in slots.list(gang.slots_dir) if copy.step == step.step]
    assert disk.flush(paths, gang.disk_dir) == ()
    for copy in slots.list(gang.slots_dir):
        (gang.slots_dir / f"r{copy.rank}" / copy.path[-1]).unlink()
    again = chosen(gang)
    assert again is not None and again.step == step.step and set(again.tiers.values()) == {"disk"}
    second = gang.run(script, attempt=2, resume=again.step, tier="disk")
    assert [one.said["bits"] for one in second] == wanted


def test_a_damaged_disk_copy_is_refused_and_named(gang: Gang) -> None:
    script = TRAIN + "train('ddp', 4)"
    gang.run(script)
    assert disk.flush([copy.path for copy in slots.list(gang.slots_dir) if copy.step == 4], gang.disk_dir) == ()
    for copy in slots.list(gang.slots_dir):
        (gang.slots_dir / f"r{copy.rank}" / copy.path[-1]).unlink()
    victim = gang.disk_dir / "step-000000000004" / "r1"
    raw = bytearray(victim.read_bytes())
    raw[layout.HEADER_BYTES + 1000] ^= 1
    victim.write_bytes(raw)
    results = gang.run(script, attempt=2, resume=4)
    assert results[1].status == 1
    assert "CheckpointDamaged: rank 1 on node-0: training should go on from step 4" in results[1].err
    assert "data do not match their checksum" in results[1].err


def test_a_missing_step_is_an_error_and_never_a_silent_start_from_zero(gang: Gang) -> None:
    results = gang.run(TRAIN + "train('ddp', 2)", attempt=2, resume=40)
    assert all(one.status == 1 and "no whole copy of it" in one.err for one in results)


def test_nothing_to_resume_begins_from_the_start(gang: Gang) -> None:
    gang.run(TRAIN + "train('ddp', 5)")
    results = gang.run(TRAIN + "train('ddp', 2)", attempt=2, resume=None)
    assert results[0].said["start"] == 0
    assert {copy.step for copy in slots.list(gang.slots_dir)} == {1, 2}, "the old steps did not happen"


SMALL = """
state = {"x": torch.arange(6.0)}
"""


def test_a_step_with_a_loss_that_is_not_finite_is_not_kept(gang: Gang) -> None:
    script = SMALL + (
        "c = evertrain.Checkpointer(state); c.load()\n"
        "for step in range(1, 6):\n"
        "    evertrain.report(step=step, loss=float('nan') if step in (3, 5) else 1.0)\n"
        "    c.save(step)\n"
    )
    (result,) = gang.run(script, world=1)
    assert {copy.step for copy in slots.list(gang.slots_dir)} == {1, 2, 4}
    assert "rank 0 on node-0: the loss reported at step 3 is not finite" in result.err


def test_a_loss_that_stays_not_finite_is_said_ever_more_rarely(gang: Gang) -> None:
    script = SMALL + (
        "c = evertrain.Checkpointer(state); c.load()\n"
        "for step in range(1, 101):\n"
        "    evertrain.report(step=step, loss=float('nan'))\n"
        "    c.save(step)\n"
    )
    (result,) = gang.run(script, world=1)
    said = [line for line in result.err.splitlines() if "is not finite" in line]
    assert len(said) == 7 and said[-1].endswith("step 64 is not finite; its state is not kept (64 in a row)")


def test_a_failed_save_never_ends_training(gang: Gang) -> None:
    script = (
        "class Odd:\n"
        "    def state_dict(self): return {'f': (lambda: 0)} if bad else {}\n"
        "    def load_state_dict(self, state): pass\n"
        "bad = False\n"
        "c = evertrain.Checkpointer({'x': torch.zeros(2), 'odd': Odd()})\n"
        "c.save(1); bad = True; c.save(2); bad = False; c.save(3); say('done')\n"
    )
    (result,) = gang.run(script, world=1)
    assert result.status == 0 and result.said == "done"
    warnings = [line for line in result.err.splitlines() if line]
    assert len(warnings) == 1 and "rank 0 on node-0 could not save step 2" in warnings[0]
    assert {copy.step for copy in slots.list(gang.slots_dir)} == {1, 3}


def test_slots_go_to_disk_where_memory_is_too_small(gang: Gang) -> None:
    script = (
        "from evertrain.worker import room\n"
        "room.free_bytes = lambda folder: 1000\n"
        "x = torch.zeros(4)\n"
        "c = evertrain.Checkpointer({'x': x}); start = c.load()\n"
        "say([start, x.tolist()])\n"
        "for step in (1, 2, 3, 4): x += 1; c.save(step)\n"
    )
    (first,) = gang.run(script, world=1)
    assert first.err.count("evertrain:") == 1 and "checkpoints go to" in first.err
    assert slots.list(gang.slots_dir) == ()
    assert sorted(copy.step for copy in disk.list(gang.disk_dir)) == [2, 3, 4]
    (second,) = gang.run(script, world=1, attempt=2, resume=4, tier="disk")
    assert second.said == [4, [4.0] * 4]


def test_slots_go_to_disk_when_memory_turns_out_to_be_full(gang: Gang) -> None:
    """Others may take the memory between the look at it and the allocation."""
    script = (
        "import errno\n"
        "from evertrain.worker import mapping\n"
        "real = mapping.allocate\n"
        "def full(path, size):\n"
        "    if not path.endswith('r0/0') and 'disk' not in path: raise OSError(errno.ENOSPC, 'full')\n"
        "    real(path, size)\n"
        "mapping.allocate = full\n"
        "c = evertrain.Checkpointer({'x': torch.zeros(4)})\n"
        "for step in (1, 2, 3): c.save(step)\n"
    )
    (result,) = gang.run(script, world=1)
    assert result.err.count("evertrain:") == 1 and "full; checkpoints go to" in result.err
    assert [copy.step for copy in slots.list(gang.slots_dir)] == [1]
    assert [copy.step for copy in disk.list(gang.disk_dir)] == [2, 3]


def test_a_model_that_has_changed_is_named(gang: Gang) -> None:
    gang.run("evertrain.Checkpointer({'ema': torch.zeros(4)}).save(1)", world=1)
    (shape,) = gang.run("evertrain.Checkpointer({'ema': torch.zeros(5)}).load()", world=1, attempt=2, resume=1)
    assert "the checkpoint of step 1 does not fit: ema was float32 (4,) when it was saved and is float32 (5,) now" in (
        shape.err
    )
    (gone,) = gang.run("evertrain.Checkpointer({'other': torch.zeros(4)}).load()", world=1, attempt=3, resume=1)
    assert "CheckpointError: the checkpoint of step 1 does not fit: it has no 'other'" in gone.err


def test_what_it_cannot_save_is_said_at_once(gang: Gang) -> None:
    (result,) = gang.run("evertrain.Checkpointer({'step': 3})", world=1)
    assert "TypeError: state['step'] is int" in result.err


def test_another_number_of_ranks_is_refused(gang: Gang) -> None:
    gang.run("evertrain.Checkpointer({'x': torch.zeros(4)}).save(1)", world=1)
    results = gang.run("evertrain.Checkpointer({'x': torch.zeros(4)}).load()", attempt=2, resume=1)
    assert "was saved by 1 ranks, now there are 2" in results[0].err


def test_odd_tensors_come_back_as_they_were(gang: Gang) -> None:
    script = """
def state():
    return {
        "bf16": torch.arange(7).to(torch.bfloat16), "bool": torch.tensor([True, False]), "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64), "channels": torch.arange(48.0).reshape(1, 3, 4, 4).to(
            memory_format=torch.channels_last), "slice": torch.arange(20.0)[::2], "complex": torch.ones(2) * 1j,
        "expanded": torch.ones(1, 3).expand(4, 3), "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }
class Holder:
    def __init__(self, value): self.value = value
    def state_dict(self): return self.value
    def load_state_dict(self, value): self.value = value
tensors = state()
nested = Holder({"a": [tensors, {"n": 3, "text": "x"}], "set": {1, 2}})
c = evertrain.Checkpointer({"nested": nested})
if evertrain.init().resume_step is None:
    c.save(1)
else:
    nested.value = None
    c.load()
    back = nested.value["a"][0]
    c.save(2), c.save(3), c.save(4)  # overwrites the slot that it came from
    say([all(torch.equal(back[k], v) and back[k].dtype == v.dtype for k, v in tensors.items()),
         back["channels"].is_contiguous(memory_format=torch.channels_last), back["transposed"].stride(),
         nested.value["a"][1], sorted(nested.value["set"])])
"""
    gang.run(script, world=1)
    (result,) = gang.run(script, world=1, attempt=2, resume=1)
    assert result.said == [True, True, [1, 3], {"n": 3, "text": "x"}, [1, 2]], result.err


def test_sparse_tensors_of_a_module_come_back(gang: Gang) -> None:
    script = """
net = torch.nn.Linear(2, 2)
net.register_buffer("sparse", torch.eye(4).to_sparse())
checkpointer = evertrain.Checkpointer({"net": net, "optimizer": torch.optim.SGD(net.parameters())})
if not checkpointer.load():
    net.sparse.mul_(3)
    checkpointer.save(1)
say(net.sparse.to_dense().sum().item())
"""
    gang.run(script, world=1)
    (result,) = gang.run(script, world=1, attempt=2, resume=1)
    assert result.said == 12, result.err


def test_a_forked_child_leaves_its_parents_checkpoint_alone(gang: Gang) -> None:
    script = """
import signal
x = torch.zeros(2)
checkpointer = evertrain.Checkpointer({"x": x})
checkpointer.save(1)
checkpointer.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    checkpointer.save(9)
    checkpointer.wait()
    os._exit(0)
say(os.waitpid(child, 0)[1])
"""
    (result,) = gang.run(script, world=1)
    assert result.said == 0 and result.page is not None and result.page.abs_step == 1
    assert [copy.step for copy in slots.list(gang.slots_dir)] == [1]


def test_outside_a_job_it_writes_to_the_store_only(gang: Gang) -> None:
    store = gang.folder / "store"
    script = TRAIN + f"train('ddp', 12, store={str(store)!r})"
    wanted = [one.said["bits"] for one in gang.run(script, inside=False)]
    assert sorted(path.name for path in store.glob("*/*")) == ["step-10", "step-11", "step-12"]
    assert not gang.slots_dir.exists()
    for path in store.glob("*/*"):
        if path.name != "step-10":
            (path / "manifest.json").unlink()
    again = gang.run(script, inside=False)
    assert [one.said["start"] for one in again] == [10, 10], again[0].err
    assert [one.said["bits"] for one in again] == wanted
    assert sorted(str(path.relative_to(store)) for path in store.glob("*/*")) == [
        "attempt-1/step-10", "attempt-2/step-11", "attempt-2/step-12",
    ]  # fmt: skip


def test_outside_a_job_without_a_store_it_does_nothing(gang: Gang) -> None:
    script = "c = evertrain.Checkpointer({'x': torch.zeros(2)}); c.save(1); c.wait(); say([c.load()])"
    (result,) = gang.run(script, world=1, inside=False)
    assert result.said == [None] and result.err == ""
