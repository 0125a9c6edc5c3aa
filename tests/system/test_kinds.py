"""Whatever shards the model, and whatever else is part of the state: after any death the bits are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import StartJob
from support import jobs, training

RANKS = {"ddp": 3, "fsdp": 3, "hsdp": 4, "vision": 3}
STEPS = 20

Calm = Callable[..., Path]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calm]:
    """Folder of an undisturbed run of a kind, run once."""
    done: dict[tuple[str, ...], Path] = {}
    started: list[tuple[Path, jobs.Job]] = []

    def run(kind: str, *args: str) -> Path:
        key = (kind, *args)
        if key not in done:
            done[key] = folder = tmp_path_factory.mktemp("-".join(("calm", *key)))
            job = jobs.start(folder, "kinds.py", nproc=RANKS[kind], args=[f"--kind={kind}", f"--steps={STEPS}", *args])
            started.append((folder, job))
            assert job.wait() == 0
        return done[key]

    yield run
    for folder, job in started:
        jobs.close(folder, [job])


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
def test_kills_in_a_step_and_while_saving(start_job: StartJob, calm: Calm, kind: str) -> None:
    same(hit(start_job, kind, KILLS).folder, calm(kind), kind)


def test_saving_before_the_scheduler_has_stepped(start_job: StartJob, calm: Calm) -> None:
    job = hit(start_job, "vision", KILLS, "--save-first")
    # the same training, whenever it saves
    same(job.folder, calm("vision"), "vision")
