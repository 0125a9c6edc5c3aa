"""The store is in PyTorch's own format; each content lies there once; the work is divided without waiting."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from evertrain.checkpoint import slots
from evertrain.worker import directory, snapshot, store_files, store_writer
from evertrain.worker import slots as layout
from evertrain.worker.store_files import Folder, Manifest, StoreError
from evertrain.worker.store_reader import StoredStep
from evertrain.worker.store_writer import RankState
from support import stores

from .gang import Gang

TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
join()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Linear(30, 7))
wrapped = DDP(model) if KIND == "ddp" else model
if KIND != "ddp":
    sizes = (2, 2) if KIND == "hsdp" else (4,)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes):])
    for layer in (*model, model): fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-2)
own = torch.full((3,), float(RANK))
wrapped(torch.randn(16, 10)).pow(2).mean().backward()
optimizer.step()
evertrain.Checkpointer({"model": model, "optimizer": optimizer, "own": own}).save(1)
whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in model.state_dict().items()}
first = next(iter(optimizer.state.values()))["exp_avg"]
say({"model": {k: v.tolist() for k, v in whole.items()},
     "exp_avg": (first.full_tensor() if hasattr(first, "full_tensor") else first).tolist()})
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.filterwarnings("ignore")  # torch's own
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "hsdp"])
def test_pytorch_reads_it_without_us(gang: Gang, tmp_path: Path, kind: str) -> None:
    results = gang.run(f"KIND = {kind!r}\n{TRAIN}", world=4)
    assert results[0].status == 0, results[0].err
    folder = stores.upload(str(tmp_path / "store"), slots.list(gang.slots_dir), nodes=2)
    model = torch.nn.Sequential(torch.nn.Linear(10, 30), torch.nn.Linear(30, 7))
    exp_avg = torch.zeros(30, 10)
    state: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": {"state": {"model.0.weight": {"exp_avg": exp_avg}}},
        "own": torch.zeros(3),
        "own@rank2": torch.zeros(3),
    }
    dcp.load(state, checkpoint_id=folder.url, no_dist=True)
    assert {key: value.tolist() for key, value in model.state_dict().items()} == results[0].said["model"]
    assert exp_avg.tolist() == results[0].said["exp_avg"]
    # what differs between ranks is there for each, the first one's under the plain name
    assert state["own"].tolist() == [0.0] * 3 and state["own@rank2"].tolist() == [2.0] * 3

    manifest = store_files.read_manifest(folder)
    assert manifest is not None and manifest.world_size == 4 and manifest.made_by["torch"] == str(torch.__version__)
    assert {path.name for path in Path(folder.url).iterdir()} == {*manifest.files, "manifest.json"}
    assert store_files.verify(folder) == []
    # each node has written its part, and nothing twice
    assert {name.split("_")[2] for name in manifest.files if name.endswith(".distcp")} >= {"0", "2"}
    data = torch.nn.utils.parameters_to_vector(model.parameters()).numel() * 4 * 3
    assert sum(path.stat().st_size for path in gang.slots_dir.glob("r0/*")) > data
    tensors = [key for key in _described(folder).state_dict_metadata if key.startswith("model.")]
    assert len(tensors) == 4


def _described(folder: Folder) -> Any:
    return dcp.FileSystemReader(folder.url).read_metadata()


# -- states made by hand -----------------------------------------------------------------------------------------------


def state(rank: int, world_size: int, entries: Mapping[str, Any]) -> RankState:
    taken = snapshot.take(entries)
    places, parts = snapshot.lay_out(taken, layout.HEADER_BYTES)
    said = json.loads(directory.of_snapshot(taken, places, parts, directory.names(entries, {})))
    return RankState(rank, world_size, taken.entries, taken.tensors, said)


def commit(root: Path, step: int, world_size: int, upload: str = "u") -> StoredStep:
    place = Folder(str(root))
    folder = store_files.step_folder(place, 1, step)
    store_writer.finish(folder, upload, world_size)
    manifest = Manifest("job", 1, step, world_size, 100.0 + step, 1.0, {})
    _, problems = store_files.commit(place, manifest, keep=3)
    assert problems == []
    return StoredStep(folder)


def test_odd_states_come_back_as_they_were(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    entries = {
        "tensors": {
            "bf16": torch.arange(7).to(torch.bfloat16),
            "bool": torch.tensor([True, False]),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(3.5, dtype=torch.float64),
            "channels": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
            "slice": torch.arange(20.0)[::2],
            "complex": torch.ones(2) * 1j,
            "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
            1: torch.ones(2),
            "1": torch.zeros(2),
            "twice": [shared, shared],
        },
        "alone": torch.ones(5, dtype=torch.int8),
        "nothing": {},
        "text": {"n": 3, "set": {1, 2}},
    }
    folder = store_files.step_folder(Folder(str(tmp_path)), 1, 5)
    store_writer.write(folder, "u", [state(0, 1, entries)])
    stored = commit(tmp_path, 5, 1)
    pickled, tensors = stored.of_rank(0)
    back = {name: snapshot.rebuild(entry, tensors, {}) for name, entry in pickled.items()}
    assert back["text"] == entries["text"] and back["nothing"] == {} and back["alone"].tolist() == [1] * 5
    for name, tensor in entries["tensors"].items():  # type: ignore[attr-defined]
        found = back["tensors"][name]
        if name == "twice":
            assert [one.tolist() for one in found] == [[0.0, 1.0, 2.0, 3.0]] * 2
            continue
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.contiguous().reshape(-1).view(torch.uint8).tolist() == (
            tensor.contiguous().reshape(-1).view(torch.uint8).tolist()
        )
    assert back["tensors"]["channels"].is_contiguous(memory_format=torch.channels_last)


@given(st.data())
def test_whoever_sees_whom_everything_is_written(data: st.DataObject) -> None:
    """Writers that never wait leave no gap, whichever of the others each of them knows of."""
    names = [str(number) for number in range(data.draw(st.integers(1, 6)))]
    contents = [f"content-{number}" for number in range(20)]
    has = {name: data.draw(st.sets(st.sampled_from(contents))) for name in names}
    written = set()
    for name in names:
        known = data.draw(st.sets(st.sampled_from(names))) - {name}
        mine = store_writer.share(has[name], name, {other: has[other] for other in known})
        assert set(mine) <= has[name]
        written |= set(mine)
    assert written == set().union(*has.values())
    everybody = [
        store_writer.share(has[name], name, {other: has[other] for other in names if other != name}) for name in names
    ]
    assert sorted(content for mine in everybody for content in mine) == sorted(written), "and nothing twice"


def test_ranks_may_come_one_after_the_other(tmp_path: Path) -> None:
    folder = store_files.step_folder(Folder(str(tmp_path)), 1, 1)
    entries = {"model": {str(number): torch.full((3,), float(number)) for number in range(9)}}
    for rank in (2, 0, 1):
        store_writer.write(folder, "u", [state(rank, 3, entries)])
        assert store_writer.is_written(folder, "u", 3) == (rank == 1)
    stored = commit(tmp_path, 1, 3)
    for rank in range(3):
        assert [one.tolist() for one in stored.of_rank(rank)[1]] == [[float(number)] * 3 for number in range(9)]


def test_writers_that_see_each_other_write_nothing_twice(tmp_path: Path) -> None:
    folder = store_files.step_folder(Folder(str(tmp_path)), 1, 1)
    entries = {"model": {str(number): torch.full((500,), float(number)) for number in range(40)}}
    states = [state(rank, 4, entries) for rank in range(4)]
    threads = [
        threading.Thread(target=store_writer.write, args=(folder, "u", [one]), kwargs={"writers": 4, "wait_s": 20.0})
        for one in states
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wrote = [json.loads(file.read_bytes())["wrote"] for file in Path(folder.url).glob("plans-u/done-*.json")]
    contents = [content for one in wrote for content in one]
    assert len(contents) == len(set(contents)) == 41, "40 tensors and an entry that all have"
    assert all(len(one) >= 3 for one in wrote), "everybody does a part of it"


def test_a_state_that_nobody_wrote_is_not_finished(tmp_path: Path) -> None:
    folder = store_files.step_folder(Folder(str(tmp_path)), 1, 1)
    store_writer.write(folder, "u", [state(0, 2, {"x": torch.ones(3)})])
    with pytest.raises(StoreError, match="the state of rank 1 was not written"):
        store_writer.finish(folder, "u", 2)
    # another upload's parts are not this one's
    store_writer.write(folder, "v", [state(1, 2, {"x": torch.ones(3)})])
    with pytest.raises(StoreError, match="the state of rank 1 was not written"):
        store_writer.finish(folder, "u", 2)


def test_a_slot_that_is_damaged_is_not_stored(gang: Gang, tmp_path: Path) -> None:
    gang.run("evertrain.Checkpointer({'x': torch.ones(2000)}).save(1)", world=1)
    (copy,) = slots.list(gang.slots_dir)
    raw = bytearray(Path(copy.path).read_bytes())
    raw[layout.HEADER_BYTES + 100] ^= 1
    Path(copy.path).write_bytes(raw)
    with pytest.raises(StoreError, match="data do not match their checksum"):
        store_writer.read_slot(copy.path)
