"""One run a job; a run that was killed is waited for while its processes end the job properly."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.plans import plan
from evertrain.cli import lock, places, processes, registry
from evertrain.cli.places import Places
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError


@pytest.fixture
def here(tmp_path: Path) -> Places:
    made = places.of(plan(tmp_path), "job-123abc")
    places.make_run_dir(made)
    return made


@pytest.fixture
def survivor(here: Places) -> Iterator[subprocess.Popen[bytes]]:
    """A keeper of the run before."""
    process = subprocess.Popen(["sleep", "60"])
    known = processes.identify(process.pid)
    assert known is not None
    places.write_json(here.processes / "keeper-node-0.json", known._asdict())
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_told_who_is_first_and_what_to_do(here: Places) -> None:
    held = lock.take(here)
    lock.sign(held, here.run_id)
    with pytest.raises(TroubleError) as refused:
        lock.take(here)
    assert str(refused.value) == (
        f"job job is already running (pid {os.getpid()}); `evertrain status --job job` shows it, "
        "`evertrain stop --job job` ends it, --job NAME starts another"
    )
    os.close(held)
    os.close(lock.take(here))


@pytest.fixture
def known(here: Places) -> KnownJob:
    """The same job, as other commands know it."""
    places.write_job(here, plan(here.run_dir.parent), "http://127.0.0.1:1")
    (job,) = registry.below(here.run_dir, {})
    return job


def test_a_job_of_which_nothing_lives_is_kept_from_running(here: Places, known: KnownJob) -> None:
    with lock.kept_from_running(known):
        with pytest.raises(TroubleError, match=f"already running \\(pid {os.getpid()}\\)"):
            lock.take(here)
    os.close(lock.take(here))


def test_nobody_takes_the_place_of_a_controller_that_may_live(
    here: Places, known: KnownJob, survivor: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(TroubleError, match=f"still lives \\(keeper-node-0, pid {survivor.pid}\\)"):
        with lock.kept_from_running(known):
            raise AssertionError("it was not refused")
    os.close(lock.take(here))


def test_the_end_of_the_run_before_is_waited_for(here: Places, survivor: subprocess.Popen[bytes]) -> None:
    said: list[str] = []

    def sleep(seconds: float) -> None:
        survivor.kill()
        survivor.wait()

    lock.wait_for_previous(here, said.append, sleep)
    assert said == [f"waiting for the earlier run of job to end (keeper-node-0, pid {survivor.pid})"]


def test_a_detached_job_that_lost_its_run_goes_on_and_is_not_waited_for(
    here: Places, survivor: subprocess.Popen[bytes]
) -> None:
    (here.run_dir / "job.json").write_text(json.dumps({"detached": True, "grace_s": 25.0}))
    with pytest.raises(TroubleError, match=r"still lives \(keeper-node-0, pid \d+\); `evertrain stop --job job` ends"):
        lock.wait_for_previous(here, print, lambda seconds: None)
