"""The wall clock is set while a job runs, an hour forwards and then back behind its start: nothing follows from it."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import StartJob
from evertrain.controller.store import read_log
from support import jobs
from support.waiting import eventually

HOUR_S = 3600.0
SOURCE = Path(jobs.__file__).with_name("clock.c")


class WallClock:
    """The wall clock of all processes that are started in `environment`."""

    def __init__(self, folder: Path) -> None:
        library, self._shift = folder / "clock.so", folder / "clock.shift"
        command = ["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", library, SOURCE, "-ldl"]
        subprocess.run(command, check=True, timeout=60)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(self._shift)}
        self._shift.write_bytes(struct.pack("d", 0.0))

    def set(self, ahead_s: float) -> None:
        """To so many seconds before the true time."""
        with self._shift.open("r+b") as file:  # in place: the file is mapped everywhere
            file.write(struct.pack("d", ahead_s))


@pytest.fixture
def clock(tmp_path: Path) -> WallClock:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the library that shifts the wall clock")
    return WallClock(tmp_path)


def test_the_library_shifts_pythons_clock_and_leaves_the_monotonic_one(clock: WallClock) -> None:
    script = "import time; input(); print(time.time(), time.monotonic())"
    environment = {**os.environ, **clock.environment}
    with subprocess.Popen(
        [jobs.EVERTRAIN.with_name("python"), "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        clock.set(HOUR_S)
        out, _ = process.communicate("\n", timeout=60)
    wall, monotonic = map(float, out.split())
    assert wall - time.time() == pytest.approx(HOUR_S, abs=30)
    assert monotonic == pytest.approx(time.monotonic(), abs=30)


def kill_and_wait(job: jobs.Job, name: str) -> None:
    """Until it is back, everybody can be heard, and training has gone on meanwhile."""
    before, step = job.kill(name), (job.peek() or {"step": 0})["step"] or 0
    eventually(lambda: (job.processes().get(name) or before) != before, f"{name} is back", story=job.story)
    job.wait_until(
        lambda status: (status["step"] or 0) > step and not any("cannot be heard" in line for line in status["blind"]),
        f"a step with the new {name}",
    )


def check_report(report: dict[str, Any], lasted_s: float) -> None:
    whole = report["all"]
    parts = whole["productive_s"] + whole["lost_s"] + whole["not_running_s"]
    assert parts == pytest.approx(whole["wall_s"], rel=0.01)
    assert whole["wall_s"] == pytest.approx(lasted_s, abs=10)
    assert whole["productive_s"] > 0.3 * whole["wall_s"]


@pytest.mark.timeout(240)
def test_a_wall_clock_that_is_set_changes_nothing(start_job: StartJob, clock: WallClock) -> None:
    began = time.monotonic()
    job = start_job(
        "train.py",
        nproc=1,
        flags=["--local-nodes", "2"],
        args=["--steps", "10000", "--until", "enough"],
        environment=clock.environment,
    )
    job.wait_for_step(4)
    pids = job.rank_pids()

    clock.set(HOUR_S)
    kill_and_wait(job, "controller")
    kill_and_wait(job, "agent-node-1")  # from here on the agents' clocks differ by an hour
    clock.set(-HOUR_S)
    kill_and_wait(job, "controller")
    kill_and_wait(job, "agent-node-0")
    assert job.rank_pids() == pids
    assert job.incidents() == []
    assert job.status()["attempt"] == 1
    check_report(job.report(), time.monotonic() - began)

    job.kill_rank(1)
    job.wait_until(lambda status: status["attempt"] == 2 and status["state"] == "running", "training is back")
    (job.folder / "enough").touch()
    assert job.wait() == 0
    lasted_s = time.monotonic() - began
    (incident,) = job.incidents()
    assert (incident["cause"], incident["ranks"], incident["nodes"]) == ("killed (SIGKILL)", [1], ["node-1"])
    assert all(spent >= 0 for spent in incident["seconds"].values())
    assert sum(incident["seconds"].values()) < 30
    assert job.status()["state"] == "done"
    check_report(job.report(), lasted_s)

    described = json.loads((job.job_dir / "job.json").read_bytes())
    times = [record.time for record in read_log(Path(described["database"]))]
    assert times == sorted(times)
    assert times[-1] - times[0] < lasted_s


@pytest.mark.parametrize("run", [pytest.param(run, marks=pytest.mark.matrix) for run in range(20)])
def test_a_job_is_left_alone_by_a_clock_that_jumps(start_job: StartJob, clock: WallClock, run: int) -> None:
    job = start_job("train.py", args=["--steps", "10000", "--until", "enough"], environment=clock.environment)
    for jump_s in (HOUR_S, -HOUR_S):
        step = job.wait_for_step(4)["step"]
        clock.set(jump_s)
        job.wait_for_step(step + 30)
    (job.folder / "enough").touch()
    assert job.wait() == 0
    assert job.incidents() == []
    assert job.status()["attempt"] == 1
