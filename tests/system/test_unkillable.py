"""A rank that sleeps in the kernel and that not even SIGKILL ends: named, its node told apart, and nothing lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import StartJob
from support import dead_disk, processes, training
from support.dead_disk import DeadDisk
from support.jobs import SESSION, Job
from support.waiting import eventually

NAME = f"reading-{SESSION}"
"""The same command resumes the same job; other test sessions have theirs."""
CONFIG = """
hang:
  still_limit_s: 2
  suspect_s: 1
restart:
  node_return_s: {}
"""


@pytest.fixture
def disk(start_job: StartJob, tmp_path: Path) -> Iterator[DeadDisk]:
    folder = tmp_path / "dead"
    folder.mkdir()
    try:
        # free again before the job is closed: what sleeps in the kernel cannot be cleaned up
        with dead_disk.mounted(folder) as disk:
            yield disk
    except OSError as error:
        pytest.skip(f"no file system of our own can be mounted here: {error}")


def reading(start_job: StartJob, disk: DeadDisk, patience_s: float, *flags: str) -> tuple[Job, int]:
    """A job whose rank 1 reads in step 6 what never comes, its node found to be unusable; and the pid of that rank."""
    config = disk.file.parents[1] / "config.yaml"
    config.write_text(CONFIG.format(patience_s))
    job = start_job(
        "train.py", nproc=training.RANKS, flags=["--config", str(config), *flags], job=NAME,
        args=["--hold", "step:1:6", "--read", disk.file],
    )  # fmt: skip
    job.wait_until(lambda status: status["nodes"][0]["state"] == "unusable", "its node is unusable")
    return job, int(job.wait_for_file("held").read_text())


def test_it_is_named_and_training_goes_on_when_the_kernel_lets_it_go(
    start_job: StartJob, disk: DeadDisk, undisturbed: str
) -> None:
    job, pid = reading(start_job, disk, 300)
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    (incident,) = job.incidents()
    assert incident["cause"] in ("hang (still)", "hang (uninterruptible)", "hang (storage)")
    assert incident["ranks"] == [1]
    assert "sleeps in the kernel and heeds no signal (state D)" in incident["evidence"][0]
    why = f"node-0 is unusable: rank 1 (pid {pid}) is still there after SIGKILL"
    assert why in job.status()["message"]
    eventually(lambda: why in job.errors, "the user reads it", story=job.story)
    disk.free()
    assert job.wait() == 0
    assert "node-0 is active again" in job.errors
    assert job.status()["nodes"][0]["state"] == "active"
    (incident,) = job.incidents()
    assert (incident["action"], incident["first_new_step"]) == ("restart", 6)
    assert training.digest(job.folder) == undisturbed


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_the_job_ends_in_time_with_its_newest_step_on_disk(start_job: StartJob, disk: DeadDisk, stopped: bool) -> None:
    job, pid = reading(start_job, disk, 300 if stopped else 8)
    if stopped:
        job.interrupt(signal.SIGTERM)
    assert job.wait(60) == (143 if stopped else 1)
    message = job.result()["message"]
    assert f"rank 1 (pid {pid}) is still there after SIGKILL" in message
    assert "step 5 is on disk, the same command resumes there" in message
    left = processes.identify(pid)
    assert left is not None, "nobody can end it"

    again = start_job("train.py", nproc=training.RANKS, job=NAME)
    assert again.wait() == 0
    assert training.steps_done(again.folder, 1) == list(range(1, 13))

    disk.free()
    eventually(lambda: not processes.is_alive(left), "it has ended")
