"""Steps that only the shared memory of a dead run has are on disk before it is taken away."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

import pytest

from evertrain.checkpoint import disk
from evertrain.cli import clean, places
from evertrain.controller.store import EventStore
from evertrain.model import records as r
from evertrain.model.errors import TroubleError
from evertrain.model.report import Identity
from evertrain.worker import slots


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path)
    places.user_folder().mkdir()
    return places.user_folder()


def slot(folder: Path, rank: int, step: int, attempt: int) -> None:
    data, metadata = b"tensors", b"metadata"
    header = slots.SlotHeader(
        slots.COMPLETE, "job", 1, attempt, rank, 2, step, 1.0, len(data), len(metadata), crc32(metadata)
    )  # fmt: skip
    path = folder / "node-0" / "slots" / f"r{rank}" / str(step % 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(slots.pack(header).ljust(slots.HEADER_BYTES, b"\0") + data + metadata)


def attempt_started(number: int, resume: int | None) -> r.AttemptStarted:
    return r.AttemptStarted(
        time=2.0,
        attempt=number,
        restart_count=number - 1,
        placement={0: "node-0", 1: "node-0"},
        keepers={"node-0": Identity(1, 1)},
        master_addr="127.0.0.1",
        master_port=1,
        resume=resume,
        tiers={},
        reached=None,
    )


async def killed_run(runs: Path, run_dir: Path, *later: r.AnyRecord) -> Path:
    """A run of two ranks that ended without a word, in its second attempt, which had gone back to step 5."""
    folder = runs / "job-1"
    folder.mkdir()
    owner = {"pid": 1, "start_ticks": 1, "boot_id": "past", "run_dir": str(run_dir), "member": "", "processes": {}}
    (folder / "owner.json").write_text(json.dumps(owner))
    run_dir.mkdir()
    (run_dir / "job.json").write_text(json.dumps({"job": "job", "database": str(run_dir / "events.db")}))
    run = r.RunStarted(
        time=1.0,
        run_id="job-1",
        nodes=("node-0",),
        standby=0,
        nproc_per_node=2,
        fresh=False,
        start="zygote",
        command="train.py",
    )
    store = EventStore(run_dir / "events.db")
    await store.append([run, attempt_started(1, None), attempt_started(2, 5), *later])
    store.close()
    for rank in (0, 1):
        slot(folder, rank, step=6, attempt=2)
        slot(folder, rank, step=8, attempt=1)  # on the way that was given up
    slot(folder, 0, step=7, attempt=2)  # rank 1 has not saved it yet
    return folder


def on_disk(run_dir: Path) -> set[tuple[int, int]]:
    return {(copy.rank, copy.step) for copy in disk.list(run_dir / "checkpoints" / "node-0")}


async def test_the_newest_common_step_of_a_killed_run_is_kept(runs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "job"
    folder = await killed_run(runs, run_dir)
    said: list[str] = []
    assert [removed for removed, _ in clean.remove_dead_runs(said.append)] == [folder]
    assert on_disk(run_dir) == {(0, 6), (1, 6)}
    assert said == ["step 6 of job job, whose processes were killed, is on disk now"]


async def test_a_run_that_came_to_its_end_has_nothing_to_rescue(runs: Path, tmp_path: Path) -> None:
    ended = r.JobEnded(time=3.0, state="done", exit_code=0, message="")
    folder = await killed_run(runs, tmp_path / "job", ended)
    said: list[str] = []
    assert [removed for removed, _ in clean.remove_dead_runs(said.append)] == [folder]
    assert on_disk(tmp_path / "job") == set() and said == []


async def test_what_cannot_go_to_disk_stays_until_it_is_given_up(runs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "job"
    folder = await killed_run(runs, run_dir)
    (run_dir / "checkpoints").write_text("in the way")
    said: list[str] = []
    assert clean.remove_dead_runs(said.append) == []
    assert "step 6 of job job" in said[0] and folder.exists()
    with pytest.raises(TroubleError, match="--fresh gives it up"):
        clean.remove_dead_runs(said.append, run_dir)
    assert folder.exists()
    assert [removed for removed, _ in clean.remove_dead_runs(said.append, run_dir, fresh=True)] == [folder]
