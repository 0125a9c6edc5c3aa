"""How a job ends: done, failed for a reason that is named, or stopped and resumed without losing a step."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from conftest import StartJob
from support import processes, training
from support.training import RANKS
from support.waiting import eventually


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_an_exit_code_is_reported_as_what_it_was(start_job: StartJob, undisturbed: str) -> None:
    job = start_job("train.py", nproc=RANKS, flags=["--inject", "exit:rank=1,code=3@step=5"])
    assert job.wait() == 0
    (incident,) = job.incidents()
    assert incident["ranks"] == [1]
    assert "3" in incident["cause"]
    assert training.digest(job.folder) == undisturbed


def test_a_single_exception_restarts(start_job: StartJob, undisturbed: str) -> None:
    job = start_job("train.py", nproc=RANKS, flags=["--inject", "raise:rank=2@step=5"])
    assert job.wait() == 0
    (incident,) = job.incidents()
    assert incident["ranks"] == [2]
    assert "InjectedFault" in incident["cause"]
    assert "InjectedFault" in incident["traceback"]
    assert training.digest(job.folder) == undisturbed


def test_the_same_exception_twice_at_the_same_step_ends_the_job_with_its_traceback(start_job: StartJob) -> None:
    job = start_job("train.py", nproc=RANKS, args=["--fail", "1:5"])
    assert job.wait() == 1
    assert [incident["ranks"] for incident in job.incidents()] == [[1], [1]]
    assert job.status()["state"] == "failed"
    assert job.status()["attempt"] == 2
    failure = job.result()["first_failure"]
    assert (failure["rank"], failure["node"]) == (1, "node-0")
    assert "ValueError: no good number at step 5" in failure["traceback"]
    assert "rank 1" in job.errors and "ValueError: no good number at step 5" in job.errors


def test_a_script_that_fails_in_its_first_line(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(script(tmp_path, "import nothing_of_this_name\n"))
    assert job.wait() == 1
    assert job.status()["attempt"] == 2
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in job.errors


def test_three_attempts_in_a_row_without_progress_end_the_job(start_job: StartJob) -> None:
    job = start_job("train.py", flags=["--inject", "kill:rank=0@start"] * 3)
    assert job.wait() == 1
    assert job.status()["attempt"] == 3
    assert "no progress" in job.errors
    attempts = job.result()["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["failed"] * 3


def test_with_no_restarts_allowed_the_first_death_is_the_end(start_job: StartJob) -> None:
    job = start_job("train.py", flags=["--max-restarts=0", "--inject", "kill:rank=1@step=5"])
    assert job.wait() == 1
    assert job.status()["attempt"] == 1
    assert "rank 1" in job.errors and "SIGKILL" in job.errors


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_job_resumes_with_the_same_command(
    start_job: StartJob, undisturbed: str, sent: signal.Signals, code: int
) -> None:
    command = {"nproc": RANKS, "args": ["--sleep", "0.1"]}
    first = start_job("train.py", **command)
    first.wait_for_step(5)
    first.interrupt(sent)
    assert first.wait(40) == code
    assert first.status()["state"] == "stopped"
    done = max(training.steps_done(first.folder, 0))

    second = start_job("train.py", job=first.name, **command)
    assert second.wait() == 0
    assert "resum" in second.errors
    steps = training.steps_done(first.folder, 0)
    assert 12 <= len(steps) <= 13 and steps[-1] == 12, f"at most the step that was interrupted ({done}) is done again"
    assert training.digest(first.folder) == undisturbed


def test_fresh_forgets_what_was_done(start_job: StartJob) -> None:
    first = start_job("train.py")
    assert first.wait() == 0
    second = start_job("train.py", job=first.name, flags=["--fresh"])
    assert second.wait() == 0
    assert training.steps_done(first.folder, 0) == 2 * list(range(1, 13))


IGNORES_SIGTERM = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(f"there-{os.environ['RANK']}", "w").close()
time.sleep(300)
"""


def test_a_worker_that_ignores_sigterm_is_ended_within_the_grace_period(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(script(tmp_path, IGNORES_SIGTERM), flags=["--grace=2"])
    for rank in (0, 1):
        job.wait_for_file(f"there-{rank}")
    began = time.monotonic()
    job.interrupt(signal.SIGTERM)
    assert job.wait(30) == 143
    assert 1.5 < time.monotonic() - began < 12


LEAVES_EARLY = """
import os, sys, time
if os.environ["RANK"] == "1":
    sys.exit(0)
time.sleep(300)
"""


def test_a_rank_that_leaves_early_is_named_and_the_others_get_a_deadline(start_job: StartJob, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("restart:\n  exit_deadline_s: 2\n  no_progress_attempts: 1\n")
    job = start_job(script(tmp_path, LEAVES_EARLY), flags=["--config", str(config)])
    assert job.wait(60) == 1
    (incident,) = job.incidents()
    assert incident["ranks"] == [1]


HAS_A_CHILD = """
import os, subprocess, time
child = subprocess.Popen(["sleep", "300"])
with open(f"child-{os.environ['RANK']}.new", "w") as file:
    file.write(str(child.pid))
os.replace(file.name, file.name.removesuffix(".new"))
time.sleep(300 if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else 0.1)
child.kill()
"""


def test_children_of_dead_ranks_are_ended(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(script(tmp_path, HAS_A_CHILD))
    children = []
    for rank in (0, 1):
        child = processes.identify(int(job.wait_for_file(f"child-{rank}").read_text()))
        assert child is not None
        children.append(child)
    job.kill_rank(0)
    eventually(lambda: not any(map(processes.is_alive, children)), "the children are gone", within_s=10)
    assert job.wait() == 0


PRINTS_BYTES = r"""
import os, sys
if os.environ["RANK"] == "0":
    sys.stdout.buffer.write(b"caf\xe9 without end")
    sys.stdout.flush()
    sys.stderr.write("and this\n")
"""


def test_output_is_passed_on_as_it_is(start_job: StartJob, tmp_path: Path) -> None:
    job = start_job(script(tmp_path, PRINTS_BYTES), nproc=1)
    assert job.wait() == 0
    assert job.stdout.read_bytes().rstrip(b"\n") == b"caf\xe9 without end"
    assert "and this\n" in job.errors
