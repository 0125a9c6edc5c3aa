"""Hangs of real ranks are named and ended; what merely takes its time is left alone. Most limits here are 2 s."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
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
WAITED_IN = {"skip": ("allreduce", "barrier"), "mismatch": ("allreduce", "barrier"), "deadlock": ("group 1", "group 2")}
"""Operations and groups that the evidence names."""
TWENTY = [0, *(pytest.param(run, marks=pytest.mark.matrix) for run in range(1, 20))]
"""What has to be left alone twenty times out of twenty; the ordinary suite looks once."""


@pytest.fixture
def fast(tmp_path: Path) -> list[str]:
    config = tmp_path / "fast.yaml"
    config.write_text(FAST)
    return ["--config", str(config)]


@pytest.fixture
def busy() -> Iterator[None]:
    """Two busy loops beside the job, at its own priority."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for loop in loops:
        loop.kill()
        loop.wait()


def hung(start_job: StartJob, how: str, flags: list[str], *more: str, ranks: int = RANKS) -> list[dict[str, Any]]:
    """Run the script to its end; the incidents that ended an attempt."""
    job = start_job("hanging.py", nproc=ranks, flags=flags, args=["--how", how, *more])
    assert job.wait() == 0
    return [incident for incident in job.incidents() if incident["action"] != "tolerate"]


def cells(*ordinary: tuple[str, int]) -> list[Any]:
    """Every kind of hang on 4 and on 8 ranks; the ordinary suite looks at some."""
    kinds = ["stop", "sleep", "skip", "mismatch", "deadlock"]
    return [
        pytest.param(how, ranks, marks=[] if (how, ranks) in ordinary else pytest.mark.matrix)
        for ranks in (4, 8)
        for how in kinds
    ]


@pytest.mark.parametrize(
    ("how", "ranks"),
    cells(("stop", 4), ("sleep", 4), ("skip", 4), ("mismatch", 4), ("deadlock", 4)),
)
def test_every_hang_is_named_and_training_comes_back(
    start_job: StartJob, fast: list[str], how: str, ranks: int
) -> None:
    (incident,) = hung(start_job, how, fast, ranks=ranks)
    # what never meets has a word of its own where stacks could be read in time
    kinds = {"stop": ["stopped"], "sleep": ["still"], "deadlock": ["mismatch", "deadlock"]}
    assert incident["cause"] in [f"hang ({kind})" for kind in kinds.get(how, ["mismatch", "order", "skipped"])]
    assert incident["ranks"] == [2] or how == "deadlock"
    assert incident["nodes"] == ["node-0" for _ in incident["ranks"][:1]]
    assert all(word in str(incident["evidence"]) for word in WAITED_IN.get(how, ()))
    assert incident["action"] == "restart"
    assert incident["seconds"]["detect"] < 6
    assert incident["first_new_step"] is None, "its steps have no names"
    assert incident["seconds"]["recompute"] is not None, "all ranks have done a step since"


@pytest.mark.parametrize(
    "how", ["evaluate", "save", *(pytest.param(how, marks=pytest.mark.matrix) for how in ("refill", "compile"))]
)
def test_what_takes_its_time_is_left_alone(start_job: StartJob, fast: list[str], how: str) -> None:
    assert hung(start_job, how, fast, "--rank", "0", "--seconds", "8") == []


@pytest.mark.matrix
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", range(20))
@pytest.mark.parametrize(("how", "seconds"), [("evaluate", 45), ("save", 45), ("refill", 30), ("compile", 60)])
def test_nothing_healthy_is_ended_by_the_default_limits(start_job: StartJob, how: str, seconds: int, run: int) -> None:
    job = start_job("hanging.py", nproc=RANKS, args=["--how", how, "--rank", "0", "--seconds", str(seconds)])
    assert job.wait(180) == 0
    assert [incident for incident in job.incidents() if incident["action"] != "tolerate"] == []
    assert job.status()["attempt"] == 1


@pytest.mark.matrix
@pytest.mark.parametrize("run", TWENTY)
def test_an_agent_that_was_paused_accuses_nobody(start_job: StartJob, fast: list[str], run: int) -> None:
    job = start_job("hanging.py", nproc=RANKS, flags=fast, args=["--steps", "200"])
    job.wait_for_step(5)
    job.kill("agent-node-0", signal.SIGSTOP)
    time.sleep(5)  # more than twice the limit
    job.kill("agent-node-0", signal.SIGCONT)
    assert job.wait() == 0
    assert job.incidents() == []


@pytest.mark.parametrize("run", TWENTY)
def test_a_loaded_machine_accuses_nobody(start_job: StartJob, fast: list[str], busy: None, run: int) -> None:
    job = start_job("hanging.py", nproc=RANKS, flags=fast, args=["--steps", "150"])
    assert job.wait() == 0
    assert [incident for incident in job.incidents() if incident["action"] != "tolerate"] == []
    assert job.status()["attempt"] == 1


@pytest.mark.matrix
def test_an_endless_loop_is_named_by_the_default_limits_and_left_alone(start_job: StartJob) -> None:
    job = start_job("hanging.py", nproc=RANKS, args=["--how", "loop", "--rank", "1"])
    job.wait_until(lambda _: job.incidents() != [], "it is named", within_s=40)
    (incident,) = job.incidents()
    assert (incident["cause"], incident["ranks"], incident["action"]) == ("hang (busy)", [1], "tolerate")
    assert 10 <= incident["seconds"]["detect"] <= 15
    assert "declare it" in str(incident["evidence"])
    assert job.status()["attempt"] == 1
    assert len(job.rank_pids()) == RANKS


@pytest.mark.matrix
def test_an_endless_loop_is_ended_at_the_busy_limit_and_not_before(start_job: StartJob, fast: list[str]) -> None:
    Path(fast[1]).write_text(FAST.replace("busy_limit_s: 60", "busy_limit_s: 12"))
    job = start_job("hanging.py", nproc=RANKS, flags=fast, args=["--how", "loop"])
    assert job.wait() == 0
    named, ended = job.incidents()
    assert (named["cause"], named["ranks"], named["action"]) == ("hang (busy)", [2], "tolerate")
    assert (ended["cause"], ended["ranks"], ended["action"]) == ("hang (busy)", [2], "restart")
    assert named["seconds"]["detect"] < 6
    assert 12 <= ended["seconds"]["detect"] < 16


def test_default_limits(start_job: StartJob) -> None:
    (incident,) = hung(start_job, "sleep", [])
    assert incident["ranks"] == [2]
    assert 10 <= incident["seconds"]["detect"] <= 13
