"""Whatever shards the model, and whatever else is part of the state: after any death the bits are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import InPeace, StartJob
from support import jobs, training

RANKS = {"ddp": 3, "fsdp": 3, "hsdp": 4, "vision": 3}
STEPS = 20


@pytest.fixture(scope="module")
def calm(in_peace: InPeace) -> InPeace:
    """Folder of an undisturbed run of a kind."""
    return lambda kind, *args: in_peace("kinds.py", f"--kind={kind}", f"--steps={STEPS}", *args, nproc=RANKS[kind])


def hit(start_job: StartJob, kind: str, faults: list[str], *args: str, flags: tuple[str, ...] = ()) -> jobs.Job:
    injected = [word for fault in faults for word in ("--inject", fault)]
    nodes = 2 if "--local-nodes=2" in flags else 1
    words = [f"--kind={kind}", f"--steps={STEPS}", *args]
    job = start_job("kinds.py", nproc=RANKS[kind] // nodes, flags=[*flags, *injected], args=words)
    assert job.wait() == 0
    assert len(job.incidents()) == len(faults)
    return job


def same(one: Path, other: Path, kind: str) -> None:
    for rank in range(RANKS[kind]):
        assert training.losses(one, rank) == training.losses(other, rank)
        # BatchNorm's statistics are each rank's own
        assert training.digest(one, rank) == training.digest(other, rank)


KILLS = ["kill:rank=1@step=5", "kill:rank=2@save=9", "kill:rank=0@save=14"]


@pytest.mark.parametrize(
    "kind", ["vision", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in ("ddp", "fsdp", "hsdp"))]
)
def test_kills_in_a_step_and_while_saving(start_job: StartJob, calm: InPeace, kind: str) -> None:
    same(hit(start_job, kind, KILLS).folder, calm(kind), kind)


def test_saving_before_the_scheduler_has_stepped(start_job: StartJob, calm: InPeace) -> None:
    job = hit(start_job, "vision", KILLS, "--save-first")
    # the same training, whenever it saves
    same(job.folder, calm("vision"), "vision")
