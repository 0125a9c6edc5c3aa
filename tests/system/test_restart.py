"""`evertrain restart` of real jobs: where training goes on, with what, and whether it comes out the same."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from conftest import StartJob
from support import jobs
from support.training import RANKS, digest
from support.waiting import eventually

Done = subprocess.CompletedProcess[str]


def restart(job: jobs.Job, *words: str) -> Done:
    return jobs.evertrain(job.folder, "restart", job.name, *words, environment=job.environment, timeout_s=60)


def starts(job: jobs.Job, rank: int = 0) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (job.folder / f"starts-r{rank}.jsonl").read_text().splitlines()]


def lost(job: jobs.Job) -> dict[str, float]:
    answer = jobs.evertrain(job.folder, "report", job.name, "--json", environment=job.environment)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, float] = json.loads(answer.stdout)["run"]["by_category"]
    return found


def steady(start_job: StartJob, **options: Any) -> jobs.Job:
    job: jobs.Job = start_job("steady.py", nproc=4, **options)
    job.wait_for_step(4, within_s=60)
    return job


def end(job: jobs.Job) -> None:
    (job.folder / "over").touch()
    assert job.wait() == 0


def test_the_bits_are_those_of_an_undisturbed_run(start_job: StartJob, undisturbed: str) -> None:
    job = start_job("train.py", nproc=RANKS, args=["--sleep", "0.3"], flags=["--max-restarts", "0"])
    job.wait_for_step(3)
    done = restart(job)
    assert (done.returncode, done.stderr) == (0, "")
    said = re.fullmatch(rf"job {job.name} restarted: attempt 2 resumed from step (\d+) in (\d+\.\d) s\n", done.stdout)
    assert said is not None and int(said[1]) >= 2, done.stdout
    assert job.wait() == 0
    assert job.incidents() == []
    assert digest(job.folder) == undisturbed
    assert job.status()["attempt"] == 2
    assert "restart asked for: from the newest step" in job.errors
    assert f"attempt 2 runs, resumed from step {said[1]}" in job.errors
    assert set(lost(job)) == {"start_up", "planned_restart"}
    done = restart(job)
    assert (done.returncode, done.stderr) == (
        1, f"evertrain: job {job.name} does not run; `evertrain run` resumes it\n",
    )  # fmt: skip


def test_from_a_step(start_job: StartJob) -> None:
    job = steady(start_job)
    (job.folder / "pause").touch()  # so that no step is overwritten between the question and the answer
    job.wait_for_phase(0, "pause")
    pids = job.rank_pids()
    held = eventually(lambda: held_steps(job), "the list of steps is the last one", within_s=10)
    assert job.rank_pids() == pids, "nothing has been ended"

    step = held[0]
    done = restart(job, "--from-step", str(step))
    assert done.returncode == 0, done.stderr
    assert f"attempt 2 resumed from step {step} in " in done.stdout
    assert [start["resumed"] for start in starts(job)] == [None, step]
    (job.folder / "pause").unlink()
    job.wait_for_step(step + 5)
    assert set(lost(job)) == {"start_up", "planned_restart"}
    assert job.incidents() == []
    end(job)


def held_steps(job: jobs.Job) -> list[int]:
    """What is said of the steps that there are, when that has come to rest."""
    found = []
    for _ in range(2):
        done = restart(job, "--from-step", "1000")
        assert (done.returncode, done.stdout) == (2, "")
        said = re.search(
            r"step 1000 cannot be resumed; the steps that all ranks hold are ([\d, ]+)$", done.stderr.strip()
        )
        assert said is not None, done.stderr
        found.append([int(number) for number in said[1].split(", ")])
    return found[0] if found[0] == found[1] and found[0][-1] == job.status()["step"] else []


def test_other_arguments_and_environment_outlive_controllers_and_ranks(start_job: StartJob) -> None:
    job = steady(start_job)
    for name in ("WORLD_SIZE", "EVERTRAIN_TOKEN"):
        done = restart(job, "--env", f"{name}=1")
        assert done.returncode == 2 and done.stderr.startswith(f"evertrain: --env {name}=1: {name}"), done.stderr

    wish = ["--env", "ADDED=a b", "--env", "OMP_NUM_THREADS=2", "--args", "--sleep", "0.1"]
    waiting = subprocess.Popen(
        [jobs.EVERTRAIN, "restart", job.name, *wish],
        cwd=job.folder,
        env=job.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # asked for, but the processes with the new environment still import
        job.wait_until(lambda status: status["restart"] and not status["restart"]["back"], "the restart is under way")
        job.kill("controller")
        out, err = waiting.communicate(timeout=60)
    finally:
        waiting.kill()
    assert waiting.returncode == 0, err
    assert "restarted: attempt 2 resumed from step" in out
    assert "stay as they are now until the job is run again by its command line" in out
    changed = {"argv": ["--sleep", "0.1"], "added": "a b", "threads": 2}
    for rank in range(4):
        assert starts(job, rank)[1].items() >= changed.items(), "torch was imported with it, too"

    job.kill_rank(3)
    job.wait_for_attempt(3)
    job.wait_until(lambda status: status["state"] == "running", "training again")
    for rank in range(4):
        assert starts(job, rank)[2].items() >= changed.items(), "the recovery keeps them"
    assert len(job.incidents()) == 1
    assert job.status()["start"] == {"wanted": "zygote", "mode": "zygote", "reason": ""}
    end(job)


def test_steps_are_repeated_and_compared(start_job: StartJob) -> None:
    job = steady(start_job)
    done = restart(job, "--verify", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"steps (\d+) to (\d+) repeated: the losses of 4 ranks are the same bits\n", done.stdout)
    assert said is not None and int(said[1]) < int(said[2]), done.stdout
    assert job.incidents() == []
    assert lost(job)["verification"] > 0
    assert "planned_restart" not in lost(job)

    (job.folder / "noisy").touch()
    job.wait_for_step(job.status()["step"] + 4)
    done = restart(job, "--verify", "1")
    assert (done.returncode, done.stderr) == (1, "")
    number = r"(-?\d+\.\d{6,}(?:e-\d+)?)"
    said = re.search(
        rf"step (\d+) did not come out the same: rank 1 on node-0 reported the loss {number}, and then {number}\n",
        done.stdout,
    )
    assert said is not None and said[2] != said[3], done.stdout
    (incident,) = job.incidents()
    assert (incident["cause"], incident["ranks"], incident["nodes"]) == ("not reproducible", [1], ["node-0"])
    assert (incident["action"], incident["step"], incident["open"]) == ("tolerate", int(said[1]), False)

    (job.folder / "silent").touch()
    job.wait_for_step(job.status()["step"] + 4)
    done = restart(job, "--verify", "1")
    assert done.returncode == 1
    assert "nothing could be compared: no loss was reported" in done.stdout
    assert "did not come out the same" in job.errors
    end(job)


def test_a_script_without_steps(start_job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "idle.py").write_text("import time; time.sleep(600)")
    job = start_job("idle.py", nproc=2, flags=["--start=spawn"])
    job.wait_until(lambda status: len([one for one in status["workers"] if one["pid"]]) == 2, "its ranks run")
    done = restart(job, "--verify", "1")
    assert done.returncode == 2
    assert "there is no step that all ranks hold: its script saves none" in done.stderr
    pids = job.rank_pids()
    done = restart(job)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"job {job.name} restarted: attempt 2 began anew; its steps cannot be seen yet\n"
    eventually(lambda: set(job.rank_pids().values()).isdisjoint(pids.values()), "other processes run", within_s=10)
