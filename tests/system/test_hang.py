"""Hangs of real ranks are named and ended; what merely takes its time is left alone. Most limits here are 2 s."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import StartJob

FAST = """
hang:
  still_limit_s: 2
  suspect_s: 1
  busy_limit_s: 60
  start_limit_s: 60
"""
RANKS = 4


@pytest.fixture
def fast(tmp_path: Path) -> list[str]:
    config = tmp_path / "fast.yaml"
    config.write_text(FAST)
    return ["--config", str(config)]


def hung(start_job: StartJob, how: str, flags: list[str], *more: str) -> list[dict[str, Any]]:
    """Run the script to its end; the incidents that ended an attempt."""
    job = start_job("hanging.py", nproc=RANKS, flags=flags, args=["--how", how, *more])
    assert job.wait() == 0
    incidents: list[dict[str, Any]] = job.incidents()
    return [incident for incident in incidents if incident["action"] != "tolerate"]


@pytest.mark.parametrize(("how", "cause"), [("stop", "hang (stopped)"), ("sleep", "hang (still)")])
def test_a_rank_that_stands_still_is_named_and_training_restarts(
    start_job: StartJob, fast: list[str], how: str, cause: str
) -> None:
    (incident,) = hung(start_job, how, fast)
    assert (incident["cause"], incident["ranks"], incident["nodes"]) == (cause, [2], ["node-0"])
    assert incident["action"] == "restart"
    assert incident["first_new_step"] is None, "its steps have no names"
    assert incident["seconds"]["detect"] < 6


def test_operations_that_never_meet_are_named(start_job: StartJob, fast: list[str]) -> None:
    (incident,) = hung(start_job, "skip", fast)
    assert "allreduce" in str(incident["evidence"]) and "barrier" in str(incident["evidence"])
    assert incident["ranks"] == [2]


def test_a_deadlock_of_groups_names_the_groups_and_nobody(start_job: StartJob, fast: list[str]) -> None:
    (incident,) = hung(start_job, "deadlock", fast)
    assert incident["ranks"] == []
    assert len(incident["evidence"]) == 2


@pytest.mark.parametrize("how", ["compute", "save", "refill", "compile"])
def test_what_takes_its_time_is_left_alone(start_job: StartJob, fast: list[str], how: str) -> None:
    assert hung(start_job, how, fast, "--rank", "0", "--seconds", "8") == []


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", range(20))
@pytest.mark.parametrize(("how", "seconds"), [("compute", 45), ("save", 45), ("refill", 30), ("compile", 60)])
def test_nothing_healthy_is_ended_by_the_default_limits(start_job: StartJob, how: str, seconds: int, run: int) -> None:
    job = start_job("hanging.py", nproc=RANKS, args=["--how", how, "--rank", "0", "--seconds", str(seconds)])
    assert job.wait(180) == 0
    assert [incident for incident in job.incidents() if incident["action"] != "tolerate"] == []
    assert job.status()["attempt"] == 1


def test_an_agent_that_was_paused_accuses_nobody(start_job: StartJob, fast: list[str]) -> None:
    job = start_job("hanging.py", nproc=RANKS, flags=fast, args=["--steps", "200"])
    job.wait_for_step(5)
    job.kill("agent-node-0", signal.SIGSTOP)
    time.sleep(5)  # more than twice the limit
    job.kill("agent-node-0", signal.SIGCONT)
    assert job.wait() == 0
    assert job.incidents() == []


def test_an_endless_loop_is_named_and_not_ended_before_its_limit(start_job: StartJob, fast: list[str]) -> None:
    job = start_job("hanging.py", nproc=RANKS, flags=fast, args=["--how", "loop", "--rank", "1"])
    job.wait_until(lambda _: job.incidents() != [], "it is named", within_s=40)
    (incident,) = job.incidents()
    assert (incident["cause"], incident["ranks"], incident["action"]) == ("hang (busy)", [1], "tolerate")
    assert job.status()["attempt"] == 1


def test_default_limits(start_job: StartJob) -> None:
    (incident,) = hung(start_job, "sleep", [])
    assert incident["ranks"] == [2]
    assert 10 <= incident["seconds"]["detect"] <= 13
