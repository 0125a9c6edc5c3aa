"""What went to the store comes back: the same bits on as many ranks, the same tensors on any number."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.checkpoint import slots
from evertrain.worker import store_files
from evertrain.worker.store_files import Folder
from support import stores

from .gang import Gang

TRAIN = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

def build(kind, width=20):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(10, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 7))
    if kind == "ddp":
        return DDP(net)
    if kind == "plain":
        return net
    for layer in (net[0], net[2]):
        fully_shard(layer)
    return fully_shard(net)

class Loader:
    def __init__(self): self.at = torch.tensor([RANK])
    def state_dict(self): return {"at": self.at, "rank": RANK}
    def load_state_dict(self, state): self.at, self.rank = state["at"], state["rank"]

def full(value):
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone() if isinstance(value, torch.Tensor) else value

def contents(model, optimizer):
    names = {id(p): name.removeprefix("module.") for name, p in model.named_parameters()}
    whole = {name.removeprefix("module."): full(value) for name, value in model.state_dict().items()}
    for p, state in optimizer.state.items():
        whole |= {f"{names[id(p)]}/{key}": full(value) for key, value in state.items()}
    return {name: bits(value) for name, value in sorted(whole.items()) if "running" not in name}

def go(kind, steps, width=20, join_first=True, **store):
    if join_first: join()
    model = build(kind, width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    loader = Loader()
    torch.manual_seed(100 + RANK)
    c = evertrain.Checkpointer({"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader,
                                "ema": (ema := torch.zeros(3))}, **store)
    start = c.load() or 0
    loaded = contents(model, optimizer)
    evertrain.settle(model, torch.zeros(16, 10))
    for step in range(start + 1, steps + 1):
        x = torch.randn(16, 10)
        loss = model(x).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step(); scheduler.step()
        ema += 1
        evertrain.report(step=step, loss=loss)
        c.save(step)
    say({"start": start, "loaded": loaded, "now": contents(model, optimizer),
         "lr": scheduler.get_last_lr(),
         "end": bits(*model.state_dict().values(), ema), "loader": [loader.at.item(), getattr(loader, "rank", None)],
         "ema": ema.tolist(), "draw": torch.rand(1).item()})
    if join_first:
        dist.barrier()
        dist.destroy_process_group()
"""


def saved(gang: Gang, tmp_path: Path, *, world: int, step: int, nodes: int = 2) -> Folder:
    """Bring a step that these many ranks have saved to the store."""
    copies = [copy for copy in slots.list(gang.slots_dir) if copy.step == step and copy.world_size == world]
    return stores.upload(f"{tmp_path}/store/test", copies, nodes=nodes)


def from_store(folder: Folder) -> dict[str, object]:
    return {"resume_tier": "store", "resume_folder": folder.url}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_as_many_ranks_go_on_with_the_same_bits(gang: Gang, tmp_path: Path, kind: str) -> None:
    store = f"store={str(tmp_path / 'store')!r}"
    wanted = gang.run(TRAIN + f"go({kind!r}, 6, {store})", world=4)
    assert [one.status for one in wanted] == [0] * 4, wanted[0].err
    folder = saved(gang, tmp_path, world=4, step=4)
    again = gang.run(TRAIN + f"go({kind!r}, 6, {store})", world=4, attempt=2, resume=4, told=from_store(folder))
    assert [one.status for one in again] == [0] * 4, again[0].err
    assert [one.said["start"] for one in again] == [4] * 4
    for before, after in zip(wanted, again, strict=True):
        assert {**after.said, "start": 0, "loaded": 0, "loader": 0} == {
            **before.said, "loaded": 0, "loader": 0,
        }  # fmt: skip
    assert [one.said["loader"] for one in again] == [[rank, rank] for rank in range(4)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_another_number_of_ranks_and_back(gang: Gang, tmp_path: Path, kind: str) -> None:
    store = f"store={str(tmp_path / 'store')!r}"
    first = gang.run(TRAIN + f"go({kind!r}, 3, {store})", world=4)
    folder = saved(gang, tmp_path, world=4, step=3)
    # two ranks go on: each tensor as a whole is what it was
    half = TRAIN + f"go({kind!r}, 5, {store})"
    two = gang.run(half, world=2, attempt=2, resume=3, told=from_store(folder))
    assert [one.status for one in two] == [0, 0], two[0].err
    assert all(one.said["loaded"] == first[0].said["now"] for one in two)
    assert [one.said["loader"] for one in two] == [[0, 0], [1, 1]]
    assert two[0].said["ema"] == [5.0] * 3 and two[0].said["lr"] != first[0].said["lr"]
    assert "step 3 was saved by 4 ranks, now there are 2" in two[0].err and "saved by" not in two[1].err

    folder = saved(gang, tmp_path, world=2, step=5)
    # and four again, which do no step
    four = gang.run(TRAIN + f"go({kind!r}, 5, {store})", world=4, attempt=3, resume=5, told=from_store(folder))
    assert [one.status for one in four] == [0] * 4, four[0].err
    assert all(one.said["loaded"] == two[0].said["now"] for one in four)
    assert [one.said["draw"] for one in four] == [one.said["draw"] for one in (*two, *two)]
    assert (four[0].said["lr"], four[0].said["ema"]) == (two[0].said["lr"], [5.0] * 3)
    assert [one.said["loader"] for one in four] == [[0, 0], [1, 1], [0, 0], [1, 1]]


def test_from_shards_to_one_process_and_back(gang: Gang, tmp_path: Path) -> None:
    store = f"store={str(tmp_path / 'store')!r}"
    first = gang.run(TRAIN + f"go('fsdp', 3, {store})", world=4)
    folder = saved(gang, tmp_path, world=4, step=3)
    plain = TRAIN + f"go('plain', 4, join_first=False, {store})"
    (one,) = gang.run(plain, world=1, attempt=2, resume=3, told=from_store(folder))
    assert one.status == 0, one.err
    assert one.said["loaded"] == first[0].said["now"]
    folder = saved(gang, tmp_path, world=1, step=4, nodes=1)
    shards = gang.run(TRAIN + f"go('fsdp', 4, {store})", world=4, attempt=3, resume=4, told=from_store(folder))
    assert [one.status for one in shards] == [0] * 4, shards[0].err
    assert all(rank.said["loaded"] == one.said["now"] for rank in shards)


def test_a_changed_model_is_named_with_both_shapes(gang: Gang, tmp_path: Path) -> None:
    store = f"store={str(tmp_path / 'store')!r}"
    gang.run(TRAIN + f"go('ddp', 2, {store})", world=2)
    folder = saved(gang, tmp_path, world=2, step=2)
    script = TRAIN + f"go('ddp', 3, width=24, {store})"
    other = gang.run(script, world=3, attempt=2, resume=2, told=from_store(folder))
    assert "model.module.0.weight has the shape (24, 10) and had (20, 10) when it was saved" in other[0].err
    same = gang.run(script, world=2, attempt=2, resume=2, told=from_store(folder))
    assert "CheckpointError" in same[0].err and "0.weight" in same[0].err


def test_damage_is_found_and_named(gang: Gang, tmp_path: Path) -> None:
    store = f"store={str(tmp_path / 'store')!r}"
    gang.run(TRAIN + f"go('ddp', 2, {store})", world=2)
    folder = saved(gang, tmp_path, world=2, step=2)
    script = TRAIN + f"go('ddp', 2, {store})"
    victim = max(Path(folder.url).glob("*.distcp"), key=lambda path: path.stat().st_size)
    whole = victim.read_bytes()
    at = len(whole) // 2
    victim.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    flipped = gang.run(script, world=2, attempt=2, resume=2, told=from_store(folder))
    # that kind of error says that the script is not to blame, so the job goes on from an older step
    assert f"CheckpointDamaged: store {folder.url}: {victim.name} is damaged" in flipped[0].err
    victim.write_bytes(whole[:at])
    cut = gang.run(script, world=2, attempt=3, resume=2, told=from_store(folder))
    assert f"{victim.name} is damaged" in cut[0].err
    victim.unlink()
    missing = gang.run(script, world=2, attempt=3, resume=2, told=from_store(folder))
    assert f"CheckpointDamaged: store {folder.url}: cannot read {victim.name}" in missing[0].err
    victim.write_bytes(whole)
    (Path(folder.url) / ".metadata").write_bytes(b"nonsense")
    described = gang.run(script, world=2, attempt=4, resume=2, told=from_store(folder))
    assert ".metadata does not match its checksum" in described[0].err
    (Path(folder.url) / "manifest.json").unlink()
    gone = gang.run(script, world=2, attempt=5, resume=2, told=from_store(folder))
    assert "there is no manifest.json, so the step does not exist" in gone[0].err


def test_where_nobody_knows_of_a_step_the_store_may(gang: Gang, tmp_path: Path) -> None:
    store = f"store={str(tmp_path / 'store')!r}"
    script = TRAIN + f"go('ddp', 2, {store})"
    gang.run(script, world=2)
    saved(gang, tmp_path, world=2, step=2)
    found = gang.run(script, world=2, told={"store_since": 0.0})
    assert [one.said["start"] for one in found] == [2, 2], found[0].err
    assert f"going on from step 2, the newest one in {tmp_path}/store/test/attempt-1/step-2" in found[0].err
    for told in ({"store_since": 2.0}, {}):  # an earlier life's; begun anew
        anew = gang.run(script, world=2, told=told)
        assert [one.said["start"] for one in anew] == [0, 0]


def test_a_store_that_cannot_be_reached_is_no_reason_to_begin_anew(gang: Gang) -> None:
    script = "evertrain.Checkpointer({'x': torch.zeros(2)}, store='s3://bucket/x').load()"
    environment = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    (result,) = gang.run(script, world=1, told={"store_since": 0.0}, env=environment)
    why = "whether there is a step to go on from cannot be said: store s3://bucket/x/test: cannot list it"
    assert result.status == 1 and f"CheckpointError: {why}" in result.err


def test_outside_a_job_behind_s3_with_other_ranks(gang: Gang) -> None:
    with stores.s3() as environment:
        script = TRAIN + "go('ddp', 4, store='s3://bucket/a/b', store_every_steps=2)"
        two = gang.run(script, world=2, inside=False, env=environment)
        assert [one.status for one in two] == [0, 0], two[0].err
        root = Folder("s3://bucket/a/b")
        assert [one.step for one in store_files.committed(root)] == [2, 4]
        (one,) = gang.run(script, world=1, inside=False, env=environment)
        assert one.status == 0, one.err
        assert one.said["start"] == 4 and one.said["loaded"] == two[0].said["now"]
        # the newest one that is whole, when somebody has taken away the newest
        root.at("attempt-1", "step-4").remove("manifest.json")
        again = gang.run(script, world=2, inside=False, env=environment)
        assert [one.said["start"] for one in again] == [2, 2], again[0].err
        assert [one.said["now"] for one in again] == [one.said["now"] for one in two]
        assert [(one.attempt, one.step) for one in store_files.committed(root)] == [(1, 2), (2, 4)]


def test_a_save_that_the_store_refuses_is_said_and_never_ends_training(gang: Gang) -> None:
    script = "c = evertrain.Checkpointer({'x': torch.zeros(2)}, store='/sys/nowhere')\nc.save(1); c.save(2); say('on')"
    (result,) = gang.run(script, world=1, inside=False)
    assert result.said == "on" and result.status == 0
    assert "evertrain: rank 0 could not save step 1: store /sys/nowhere" in result.err
