"""What was saved comes back bit for bit, from whichever copy is whole; what does not fit is named before it hurts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evertrain.checkpoint import disk, slots
from evertrain.worker import slots as layout

from .gang import Gang
from .test_checkpointer import chosen

NET = """
from torchdata.stateful_dataloader import StatefulDataLoader
from torch.utils.data import DataLoader, RandomSampler

def everything(width=8):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, width, 3), torch.nn.BatchNorm2d(width), torch.nn.Flatten(),
                              torch.nn.Dropout(0.2), torch.nn.Linear(width * 36, 4))
    optimizer = torch.optim.AdamW([{"params": net[0].parameters(), "lr": 1e-2}, {"params": net[4].parameters()}],
                                  amsgrad=True)
    data = list(range(64))
    return {
        "model": net, "optimizer": optimizer,
        "ema": torch.optim.swa_utils.AveragedModel(net, use_buffers=True),
        "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
        "scaler": torch.amp.GradScaler("cpu"),
        # with a generator of its own: else its iterator draws from the script's random numbers once more
        "stateful": StatefulDataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)),
        "loader": evertrain.ResumableLoader(DataLoader(data, batch_size=4, shuffle=True)),
        "seen": torch.zeros(2, dtype=torch.float64),
    }

def flat(value, path=""):
    if isinstance(value, torch.Tensor):
        yield path, [bits(value), str(value.dtype), list(value.stride())]
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from flat(inner, f"{path}/{index}")
    else:
        yield path, repr(value)

def state_of(objects):
    return [[name, *pair] for name, value in objects.items()
            for pair in flat(value if isinstance(value, torch.Tensor) else value.state_dict())]

def step(objects, batch, other):
    x = torch.tensor(batch, dtype=torch.float32).view(-1, 1, 1, 1) * torch.randn(4, 1, 8, 8)
    net, optimizer, scaler = objects["model"], objects["optimizer"], objects["scaler"]
    optimizer.zero_grad()
    loss = net(x).pow(2).mean() + float(sum(other))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    objects["scheduler"].step()
    objects["ema"].update_parameters(net)
    objects["seen"] += 1
    return loss.item()
"""


def test_all_kinds_of_state_come_back_exactly(gang: Gang) -> None:
    script = NET + (
        "objects = everything()\n"
        "c = evertrain.Checkpointer(objects)\n"
        "start = c.load() or 0\n"
        "at_start = state_of(objects)\n"
        "losses, at_six = [], None\n"
        "pairs = zip(objects['loader'], objects['stateful'])\n"
        "for number, (batch, other) in zip(range(start + 1, 13), pairs):\n"
        "    losses.append(step(objects, batch.tolist(), other.tolist()))\n"
        "    c.save(number)\n"
        "    if number == 6:\n"
        "        at_six = state_of(objects)\n"
        "        if os.environ.get('LEAVE'): c.wait(); say(at_six); os._exit(7)\n"
        "say([at_start, losses, bits(*objects['model'].state_dict().values(), objects['seen'])])\n"
    )
    (whole,) = gang.run(script, world=1)
    assert whole.status == 0, whole.err
    for copy in slots.list(gang.slots_dir):
        os.unlink(copy.path)
    (left,) = gang.run(script, world=1, attempt=2, env={"LEAVE": "1"})
    (again,) = gang.run(script, world=1, attempt=3, resume=6)
    assert again.status == 0, again.err
    restored, losses, digest = again.said
    assert restored == left.said
    assert losses == whole.said[1][6:] and digest == whole.said[2]


PLAIN = """
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
c = evertrain.Checkpointer({"model": model, "optimizer": optimizer})
start = c.load()
say([start, bits(*model.state_dict().values())])
for number in range((start or 0) + 1, 5):
    model(torch.ones(2, 300)).sum().backward(); optimizer.step(); c.save(number)
c.wait()
"""


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def flushed(gang: Gang) -> Path:
    newest = [copy.path for copy in slots.list(gang.slots_dir) if copy.step == 4]
    assert disk.flush(newest, gang.disk_dir) == ()
    return gang.disk_dir / "step-000000000004" / "r0"


@pytest.mark.parametrize("where", ["data", "metadata", "directory", "sums"])
def test_a_bad_copy_in_memory_is_marked_and_the_one_on_disk_is_taken(gang: Gang, where: str) -> None:
    (first,) = gang.run(PLAIN + "say(bits(*model.state_dict().values()))", world=1)
    flushed(gang)
    (path,) = [Path(copy.path) for copy in slots.list(gang.slots_dir) if copy.step == 4]
    header = layout.read(str(path))
    assert header is not None and header.sums_crc is not None
    places = {
        "data": layout.HEADER_BYTES + 70_000, "metadata": header.metadata_at + 9,
        "directory": header.directory_at + 9, "sums": header.sums_at + 3,
    }  # fmt: skip
    flip(path, places[where])
    (second,) = gang.run(PLAIN, world=1, attempt=2, resume=4)
    assert second.said == [4, first.said], second.err
    assert f"rank 0 on node-0: the copy of step 4 in {path} is damaged" in second.err
    marked = layout.read(str(path))
    assert marked is not None and marked.state == layout.DAMAGED
    assert 4 not in {copy.step for copy in slots.list(gang.slots_dir)}


def test_a_truncated_copy_is_none(gang: Gang) -> None:
    (first,) = gang.run(PLAIN + "say(bits(*model.state_dict().values()))", world=1)
    path = flushed(gang)
    (slot,) = [copy.path for copy in slots.list(gang.slots_dir) if copy.step == 4]
    os.truncate(slot, 50_000)
    (second,) = gang.run(PLAIN, world=1, attempt=2, resume=4)
    assert second.said == [4, first.said]
    os.truncate(path, 50_000)
    (third,) = gang.run(PLAIN, world=1, attempt=3, resume=4)
    assert third.status == 1 and "CheckpointDamaged: rank 0 on node-0" in third.err


def test_with_no_whole_copy_left_all_are_named(gang: Gang) -> None:
    gang.run(PLAIN, world=1)
    on_disk = flushed(gang)
    (slot,) = [Path(copy.path) for copy in slots.list(gang.slots_dir) if copy.step == 4]
    for path in (on_disk, slot):
        flip(path, layout.HEADER_BYTES + 5)
    (result,) = gang.run(PLAIN, world=1, attempt=2, resume=4)
    last = result.err.splitlines()[-1]
    assert last.startswith("evertrain.worker.checkpointer.CheckpointDamaged: rank 0 on node-0: training should go on")
    assert str(on_disk) in last and str(slot) in last


MODELS = """
class Model(torch.nn.Module):
    def __init__(self, width, extra):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, width)])
        self.register_parameter("extra" if extra else "other", torch.nn.Parameter(torch.ones(2)))
width, extra, groups = json.loads(os.environ["MODEL"])
model = Model(width, extra)
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters[:groups], 0.1)
c = evertrain.Checkpointer({"model": model, "optimizer": optimizer})
before = bits(*parameters)
try:
    c.load()
except RuntimeError as error:
    say([type(error).__name__, str(error), bits(*parameters) == before])
c.save(1)
"""


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ("[6, true, 3]", "model.blocks.0.weight was float32 (4, 8) when it was saved and is float32 (6, 8) now"),
        ("[4, false, 3]", "model.other is not in the checkpoint; model.extra is in the checkpoint and no longer in"),
        ("[4, true, 2]", "optimizer had groups of [3] parameters when it was saved and has [2] now"),
    ],
)
def test_a_changed_model_is_named_before_anything_is_overwritten(gang: Gang, changed: str, complaint: str) -> None:
    gang.run(MODELS, world=1, env={"MODEL": "[4, true, 3]"})
    (result,) = gang.run(MODELS, world=1, attempt=2, resume=1, env={"MODEL": changed})
    kind, text, untouched = result.said
    assert kind == "CheckpointError" and complaint in text
    assert untouched is True


def test_a_directory_names_tensors_of_two_dimensional_meshes(gang: Gang) -> None:
    """Tensor parallel inside FSDP2: shards of both, saved and restored where they were."""
    script = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
join()
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
fully_shard(net, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
c = evertrain.Checkpointer({"model": net, "optimizer": optimizer})
start = c.load() or 0
torch.manual_seed(start)
for number in range(start + 1, 9):
    torch.manual_seed(number * 2 + RANK // 2)
    x = torch.randn(4, 16)
    optimizer.zero_grad(); net(x).pow(2).mean().backward(); optimizer.step(); c.save(number)
held = [v for s in optimizer.state.values() for v in s.values()]
say([start, bits(*net.state_dict().values(), *held)])
dist.barrier()
"""
    wanted = [one.said for one in gang.run(script, world=4)]
    assert len({tuple(said) for said in wanted}) == 4, "each rank has a shard of its own"
    for copy in slots.list(gang.slots_dir):
        os.unlink(copy.path)
    killed = gang.run(script, world=4, attempt=2, faults=["kill:rank=3@step=6"])
    assert killed[3].status == -9
    choice = chosen(gang, world=4)
    assert choice is not None and choice.step == 5
    again = gang.run(script, world=4, attempt=3, resume=5)
    assert [one.said for one in again] == [[5, said[1]] for said in wanted], again[0].err
