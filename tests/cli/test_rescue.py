"""Steps that only the shared memory of a dead run has are on disk before it is taken away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from evertrain.checkpoint import disk
from evertrain.cli import clean, places
from evertrain.controller.store import EventStore
from evertrain.model import records as r
from evertrain.model.errors import TroubleError
from evertrain.model.report import Identity
from evertrain.model.spec import Seats
from support.slots import slot


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path)
    places.user_folder().mkdir()
    return places.user_folder()


def attempt_started(number: int, resume: int | None, *nodes: str) -> r.AttemptStarted:
    first, second = nodes or ("node-0", "node-0")
    return r.AttemptStarted(
        time=2.0,
        attempt=number,
        restart_count=number - 1,
        placement={0: first, 1: second},
        keepers={node: Identity(1, 1) for node in (first, second)},
        master_addr="127.0.0.1",
        master_port=1,
        resume=resume,
        tiers={},
        reached=None,
    )


def run_started(**different: Any) -> r.RunStarted:
    usual: dict[str, Any] = {
        "time": 1.0, "run_id": "job-1", "nodes": ("node-0",), "standby": 0, "nproc_per_node": 2, "fresh": False,
        "start": "zygote", "command": "train.py",
    }  # fmt: skip
    return r.RunStarted(**{**usual, **different})


def owned(folder: Path, run_dir: Path, member: str = "") -> Path:
    """The folder of a run whose processes lived before this boot."""
    folder.mkdir()
    owner = {"pid": 1, "start_ticks": 1, "boot_id": "past", "run_dir": str(run_dir), "member": member, "processes": {}}
    (folder / "owner.json").write_text(json.dumps(owner))
    run_dir.mkdir()
    (run_dir / "job.json").write_text(json.dumps({"job": "job", "database": str(run_dir / "events.db")}))
    return folder


async def logged(run_dir: Path, *log: r.AnyRecord) -> None:
    store = EventStore(run_dir / "events.db")
    await store.append(list(log))
    store.close()


async def killed_run(runs: Path, run_dir: Path, *later: r.AnyRecord) -> Path:
    """A run of two ranks that ended without a word, in its second attempt, which had gone back to step 5."""
    folder = owned(runs / "job-1", run_dir)
    await logged(run_dir, run_started(), attempt_started(1, None), attempt_started(2, 5), *later)
    memory = folder / "node-0" / "slots"
    for rank in (0, 1):
        slot(memory, rank, step=6, attempt=2)
        slot(memory, rank, step=8, attempt=1)  # on the way that was given up
    slot(memory, 0, step=7, attempt=2)  # rank 1 has not saved it yet
    return folder


def on_disk(run_dir: Path, node: str = "node-0") -> set[tuple[int, int]]:
    return {(copy.rank, copy.step) for copy in disk.list(run_dir / "checkpoints" / node)}


async def test_the_newest_common_step_of_a_killed_run_is_kept(runs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "job"
    folder = await killed_run(runs, run_dir)
    said: list[str] = []
    assert [removed for removed, _ in clean.remove_dead_runs(said.append)] == [folder]
    assert on_disk(run_dir) == {(0, 6), (1, 6)}
    assert said == ["step 6 of job job is on disk now; the processes of the job had been killed"]


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


# --- of a job on several machines nobody knows which step all its nodes have


def killed_member(runs: Path, run_dir: Path) -> Path:
    """A node that did not serve the job, and so has no log of it."""
    folder = owned(runs / "job-1.gpu02", run_dir, member="gpu02")
    for rank, held in ((2, (5, 6, 7)), (3, (5, 6))):
        for step in held:
            slot(folder / "gpu02" / "slots", rank, step)
    return folder


def test_all_that_a_node_without_the_log_held_is_kept(runs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "job"
    folder = killed_member(runs, run_dir)
    said: list[str] = []
    assert [removed for removed, _ in clean.remove_dead_runs(said.append)] == [folder]
    assert on_disk(run_dir, "gpu02") == {(2, 5), (3, 5), (2, 6), (3, 6), (2, 7)}
    assert said == ["steps 5, 6, 7 of job job are on disk now; the processes of the job had been killed"]


def test_steps_of_a_member_that_cannot_go_to_disk_are_all_named(runs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "job"
    folder = killed_member(runs, run_dir)
    (run_dir / "checkpoints").write_text("in the way")
    with pytest.raises(TroubleError, match=r"^steps 5, 6, 7 of job job lie in .* only and cannot be brought to disk"):
        clean.remove_dead_runs(print, run_dir)
    assert folder.exists()


async def killed_first_node(runs: Path, run_dir: Path, *later: r.AnyRecord) -> Path:
    """The node that served a job of two machines with a rank each."""
    folder = owned(runs / "job-1", run_dir)
    seats = run_started(nodes=("gpu01",), nproc_per_node=1, seats=Seats(2, 2))
    settled = r.NodesSettled(time=2.0, nodes=("gpu01", "gpu02"), standby=0)
    await logged(run_dir, seats, settled, attempt_started(1, None, "gpu01", "gpu02"), *later)
    for step in (5, 6, 7):
        slot(folder / "gpu01" / "slots", 0, step)
    return folder


async def test_the_first_node_of_two_keeps_all_its_steps(runs: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "job"
    folder = await killed_first_node(runs, run_dir)
    said: list[str] = []
    assert [removed for removed, _ in clean.remove_dead_runs(said.append)] == [folder]
    assert on_disk(run_dir, "gpu01") == {(0, 5), (0, 6), (0, 7)}
    assert said == ["steps 5, 6, 7 of job job are on disk now; the processes of the job had been killed"]


async def test_the_first_node_of_a_job_that_came_to_its_end_has_nothing_to_rescue(runs: Path, tmp_path: Path) -> None:
    ended = r.JobEnded(time=3.0, state="stopped", exit_code=143, message="")
    folder = await killed_first_node(runs, tmp_path / "job", ended)
    assert [removed for removed, _ in clean.remove_dead_runs(print)] == [folder]
    assert on_disk(tmp_path / "job", "gpu01") == set()
