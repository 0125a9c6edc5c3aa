"""A checkpoint becomes a file that torch or safetensors loads, with shards put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from evertrain.checkpoint import slots
from evertrain.worker import export

from .gang import Gang

SHARDED = """
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
join()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Linear(33, 5))
mesh = init_device_mesh("cpu", (WORLD,))
for layer in net:
    fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
torch.manual_seed(RANK)
checkpointer = evertrain.Checkpointer({"model": net, "optimizer": optimizer})
net(torch.ones(3, 7)).sum().backward()
optimizer.step()
checkpointer.save(1)
checkpointer.wait()
if RANK == 0:
    torch.save({name: p.full_tensor() for name, p in net.named_parameters()}, "FILE")
else:
    [p.full_tensor() for p in net.parameters()]
"""

STAGES = """
torch.manual_seed(RANK)
layer = torch.nn.Linear(4, 4)
net = torch.nn.ModuleDict({f"layer{RANK}": layer})
optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
layer(torch.ones(4)).sum().backward()
optimizer.step()
checkpointer = evertrain.Checkpointer({"model": net, "optimizer": optimizer})
checkpointer.save(1)
checkpointer.wait()
"""


def exported(gang: Gang, to: Path, form: str = "torch", only: tuple[str, ...] = ()) -> str:
    files = [slot.path for slot in slots.list(gang.slots_dir)]
    return export.write({"files": files, "to": str(to), "format": form, "only": only, "shards": False})


def test_shards_are_put_together(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(SHARDED.replace("FILE", str(tmp_path / "whole.pt")))
    assert [result.status for result in results] == [0, 0], results
    said = exported(gang, tmp_path / "out.pt")
    assert said.startswith("model, optimizer; by rank: random number generators of 2 ranks")
    whole = torch.load(tmp_path / "whole.pt")
    found: dict[str, Any] = torch.load(tmp_path / "out.pt", weights_only=False)
    assert found["model"].keys() == whole.keys()
    assert all(torch.equal(found["model"][name], whole[name]) for name in whole)
    # numbers, as an optimizer of one process takes them
    fresh = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Linear(33, 5))
    fresh.load_state_dict(found["model"])
    optimizer = torch.optim.AdamW(fresh.parameters(), 1e-2)
    optimizer.load_state_dict(found["optimizer"])
    assert optimizer.state[fresh[1].bias]["exp_avg"].shape == (5,)
    # one rank's alone stays what it is: put together, the rest of each tensor would be zeros
    for form, name in (("torch", "one.pt"), ("safetensors", "one.safetensors")):
        files = [slot.path for slot in slots.list(gang.slots_dir) if slot.rank == 1]
        to = str(tmp_path / name)
        export.write({"files": files, "to": to, "format": form, "only": ["model"], "shards": True})
        one = torch.load(to)["model"] if form == "torch" else load_file(to)
        assert torch.equal(one["0.weight"], whole["0.weight"][17:])
    assert set(found["by_rank"]["random number generators"]) == {0, 1}


def test_tensors_by_name(gang: Gang, tmp_path: Path) -> None:
    gang.run(SHARDED.replace("FILE", str(tmp_path / "whole.pt")))
    exported(gang, tmp_path / "model.safetensors", "safetensors", only=("model",))
    whole, found = torch.load(tmp_path / "whole.pt"), load_file(tmp_path / "model.safetensors")
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def test_stages_are_joined_by_name(gang: Gang, tmp_path: Path) -> None:
    results = gang.run(STAGES)
    assert [result.status for result in results] == [0, 0], results
    exported(gang, tmp_path / "out.pt")
    found: dict[str, Any] = torch.load(tmp_path / "out.pt", weights_only=False)
    names = ["layer0.weight", "layer0.bias", "layer1.weight", "layer1.bias"]
    assert list(found["model"]) == names
    assert list(found["optimizer"]["state"]) == [f"model.{name}" for name in names]
    (group,) = found["optimizer"]["param_groups"]
    assert group["params"] == [f"model.{name}" for name in names] and group["lr"] == 1e-2


def test_a_damaged_copy_is_refused(gang: Gang, tmp_path: Path) -> None:
    gang.run(STAGES)
    path = Path(slots.list(gang.slots_dir)[0].path)
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(export.ExportError, match="do not match their checksum"):
        exported(gang, tmp_path / "out.pt")
    assert not (tmp_path / "out.pt").exists()
