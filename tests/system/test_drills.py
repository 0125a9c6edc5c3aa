"""Drills: what `--inject` breaks, the job mends; faults of ranks and of whole nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import InPeace, StartJob
from support import jobs, processes, training
from support.jobs import EXAMPLES
from support.training import RANKS, digest

TWO_NODES = ["--local-nodes=2"]


def test_slow_steps_are_no_incident(start_job: StartJob, undisturbed: str) -> None:
    job = start_job("train.py", nproc=RANKS, flags=["--inject", "slow:rank=1,factor=3,steps=4@step=4"])
    assert job.wait() == 0
    assert job.incidents() == []
    assert digest(job.folder) == undisturbed


def test_memory_that_runs_out(start_job: StartJob, undisturbed: str) -> None:
    job = start_job("train.py", nproc=RANKS, flags=["--inject", "oom:rank=1@step=5"])
    assert job.wait() == 0
    (incident,) = job.incidents()
    assert incident["ranks"] == [1]
    assert "MemoryError" in incident["cause"]
    assert digest(job.folder) == undisturbed


def test_numbers_that_are_none_are_gone_back_behind(start_job: StartJob, undisturbed: str) -> None:
    # gradients of step 5 are NaN, so from step 6 on the loss is; what was saved after step 5 brings it back
    job = start_job("train.py", nproc=RANKS, flags=["--inject", "nan:rank=1@step=5"], args=["--sleep", "0.3"])
    assert job.wait() == 0
    assert {one["cause"] for one in job.incidents()} == {"loss not finite"}
    assert all(one["nodes"] == [] for one in job.incidents()), "no machine is accused"
    assert digest(job.folder) == undisturbed


@pytest.fixture(scope="module")
def calm(in_peace: InPeace) -> Path:
    """Folder of an undisturbed run on two nodes."""
    return in_peace("train.py", nproc=2, flags=TWO_NODES)


@pytest.mark.parametrize(
    "fault", [pytest.param("wipe:node=1@step=6", marks=pytest.mark.matrix), "node-loss:node=node-1,for=1@step=6"]
)
def test_a_node_that_is_lost_comes_back_and_training_ends_with_the_same_bits(
    start_job: StartJob, calm: Path, fault: str
) -> None:
    # steps slow enough for `run`, which does this from outside, to hit the sixth
    hit = start_job("train.py", nproc=2, flags=[*TWO_NODES, "--inject", fault], args=["--sleep", "0.15"])
    assert hit.wait() == 0
    incident = hit.incidents()[0]
    assert incident["nodes"] == ["node-1"]
    assert hit.status()["attempt"] >= 2
    assert [node["id"] for node in hit.status()["nodes"]] == ["node-0", "node-1"]
    assert digest(hit.folder) == digest(calm)
    for rank in range(4):
        assert training.losses(hit.folder, rank) == training.losses(calm, rank)


def test_a_job_is_stopped_properly_while_one_of_its_nodes_is_gone(start_job: StartJob) -> None:
    flags = [*TWO_NODES, "--grace", "4", "--inject", "node-loss:node=1@step=6"]
    job = start_job("train.py", nproc=2, flags=flags, args=["--sleep", "0.15"])
    lost = {name: process for name, process in started(job).items() if name.endswith("node-1")}
    assert len(lost) == 2
    job.wait_until(lambda status: status["state"] == "recovering", "the loss is noticed")
    assert not any(processes.is_alive(process) for process in lost.values())
    job.interrupt()
    assert job.wait(30) == 130
    status = job.status()
    assert (status["state"], status["attempt"]) == ("stopped", 1)
    assert "started again" not in job.errors
    assert job.processes() == {}


def started(job: jobs.Job) -> dict[str, processes.ProcessId]:
    job.wait_for_step(2)
    return job.processes()


def test_a_script_that_knows_nothing_of_us_is_restarted(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(EXAMPLES / "plain.py", args=["--checkpoints", tmp_path / "saved", "--steps", "1500"])
    job.wait_for_file("saved/newest.pt")
    job.kill_rank(1)
    assert job.wait() == 0
    (incident,) = job.incidents()
    assert (incident["ranks"], incident["action"]) == ([1], "restart")
    starts = [int(line.split()[-1]) for line in job.output.splitlines() if line.startswith("starting after step")]
    assert starts[0] == 0 and starts[1] >= 10
