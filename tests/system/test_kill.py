"""`kill -9` of any rank in any phase: training goes on by itself, and ends with the very bits of an undisturbed run."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import StartJob
from support.pairwise import cells
from support.training import RANKS, digest

PHASES = ("start", "init", "step", "save", "evaluate", "exit")
WAYS = ("drill", "outside")
"""By `--inject`, or by a real `kill -9` while the script is held in the phase."""
OTHER_STARTS_SAMPLE = [("parked", "step", 1, "outside")]
IN_STEP = {"step": 6, "save": 6}
"""Steps at which these phases are hit; the others come once, or are hit the first time."""


def culprits(incidents: list[dict[str, Any]]) -> list[list[int]]:
    return [incident["ranks"] for incident in incidents]


# each phase once, ranks and ways in turn, and the most usual one by the other way too
SAMPLE = [*((phase, at % RANKS, WAYS[at % 2]) for at, phase in enumerate(PHASES)), ("step", 0, "outside")]


@pytest.mark.parametrize(("phase", "rank", "way"), cells(PHASES, range(RANKS), WAYS, sample=SAMPLE))
def test_kill(start_job: StartJob, undisturbed: str, phase: str, rank: int, way: str) -> None:
    assert digest_after_kill(start_job, "zygote", phase, rank, way) == undisturbed


@pytest.mark.parametrize(
    ("mode", "phase", "rank", "way"),
    # each imports torch in every rank and again after the kill, so few of them run each time
    cells(("parked", "spawn"), PHASES, range(RANKS), WAYS, sample=OTHER_STARTS_SAMPLE),
)
def test_kill_where_there_is_no_zygote(
    start_job: StartJob, undisturbed: str, mode: str, phase: str, rank: int, way: str
) -> None:
    assert digest_after_kill(start_job, mode, phase, rank, way) == undisturbed


def digest_after_kill(start_job: StartJob, mode: str, phase: str, rank: int, way: str) -> str:
    """Run the job, kill one rank on the way, and see that it was noticed, named and mended."""
    at_step = f"{IN_STEP[phase]}" if phase in IN_STEP else ""
    if way == "drill":
        point = f"{phase}={at_step}" if at_step else phase
        job = start_job("train.py", nproc=RANKS, flags=[f"--start={mode}", "--inject", f"kill:rank={rank}@{point}"])
    else:
        job = start_job(
            "train.py", nproc=RANKS, flags=[f"--start={mode}"], args=["--hold", f"{phase}:{rank}:{at_step}"]
        )
        pid = int(job.wait_for_file("held").read_text())
        assert job.kill_rank(rank) == pid

    assert job.wait() == 0
    (incident,) = job.incidents()
    assert incident["ranks"] == [rank]
    assert incident["nodes"] == ["node-0"]
    assert incident["action"] == "restart"
    assert "SIGKILL" in incident["cause"]
    status = job.status()
    assert status["state"] == "done"
    assert status["attempt"] == 2
    assert status["start"] == {"wanted": mode, "mode": mode, "reason": ""}
    return digest(job.folder)


def test_one_job_survives_many_kills(start_job: StartJob, undisturbed: str) -> None:
    # the same rank at start and init: another one could reach init before the first is gone, and share its incident
    points = [("start", 0), ("init", 0), ("step=3", 2), ("evaluate", 1), ("save=6", 0), ("step=10", 2)]
    injected = [word for point, rank in points for word in ("--inject", f"kill:rank={rank}@{point}")]
    job = start_job("train.py", nproc=RANKS, flags=injected)
    assert job.wait() == 0
    assert culprits(job.incidents()) == [[rank] for _, rank in points]
    assert digest(job.folder) == undisturbed


def test_output_that_cannot_be_kept_holds_nothing_up(start_job: StartJob, undisturbed: str) -> None:
    """As where the disk is full: the ranks' output goes nowhere, training goes on."""
    job = start_job("train.py", nproc=RANKS, args=["--sleep", "0.2"])
    job.wait_for_step(3)
    (job.job_dir / "logs" / "attempt_2").write_text("no folder can be made here")
    job.kill_rank(1)
    assert job.wait() == 0
    assert digest(job.folder) == undisturbed
    assert "prints is not kept" in job.errors
