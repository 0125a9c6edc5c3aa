"""The helpers of the system tests must themselves be able to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations, product
from pathlib import Path

import pytest

from support import leftovers, processes
from support.jobs import user_environment
from support.pairwise import pairwise
from support.waiting import eventually

SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(SLEEPER, env={**os.environ, "MARK": f"{tmp_path}/somewhere"})
    yield process
    process.kill()
    process.wait()


def test_waiting_returns_what_was_seen() -> None:
    answers = iter([None, "", "there"])
    assert eventually(lambda: next(answers), "an answer", every_s=0) == "there"


def test_waiting_in_vain_says_what_was_missing_and_what_happened_instead() -> None:
    with pytest.raises(AssertionError, match=r"not within 0 s: a step\nrank 2 fell over"):
        eventually(lambda: False, "a step", within_s=0, every_s=0.001, story=lambda: "rank 2 fell over")


def test_a_process_is_known_by_its_pid_and_start(sleeper: subprocess.Popen[bytes]) -> None:
    process = processes.identify(sleeper.pid)
    assert process is not None and processes.is_alive(process)
    earlier = process._replace(start_ticks=process.start_ticks - 1)
    assert not processes.is_alive(earlier)
    assert not processes.send(earlier), "a process that took over the pid must not be hit"
    assert processes.send(process)
    assert sleeper.wait(10) == -signal.SIGKILL


def test_a_zombie_does_not_count(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert processes.identify(sleeper.pid) is None


@pytest.mark.usefixtures("sleeper")
def test_what_a_test_left_running_is_found_by_its_folder_and_cleared_away(tmp_path: Path) -> None:
    eventually(lambda: leftovers.after_a_while(tmp_path, [], within_s=0), "the sleeper is seen", within_s=5)
    leftovers.clear_away(tmp_path, [])
    assert leftovers.after_a_while(tmp_path, [], within_s=5) == []


def test_the_environment_of_a_job_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PET_NNODES", "EVERTRAIN_TOKEN", "RANK", "OMP_NUM_THREADS", "PYTHONPATH", "KEPT"):
        monkeypatch.setenv(name, "1")
    environment = user_environment(tmp_path, {"EXTRA": "2"}, without=("PYTHON", "OMP_"))
    assert environment["KEPT"] == "1" and environment["EXTRA"] == "2"
    assert not {"PET_NNODES", "EVERTRAIN_TOKEN", "RANK", "OMP_NUM_THREADS", "PYTHONPATH"} & environment.keys()


def test_in_a_pairwise_sample_every_two_values_meet() -> None:
    factors = ["abc", (0, 1, 2), ("x", "y")]
    sample = pairwise(*factors)
    assert len(sample) < 3 * 3 * 2
    for (i, first), (j, second) in combinations(enumerate(factors), 2):
        assert {(cell[i], cell[j]) for cell in sample} == set(product(first, second))
