"""Whole nodes are lost with all they have, and training goes on from what the others keep of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import InPeace, StartJob
from evertrain.worker import slots as layout
from support import jobs, machines, training
from support.jobs import Job
from support.waiting import eventually

RANKS, STEPS = 4, 100
CONFIG = "checkpoint: {round_s: 0.3 s, disk_every_s: 2 s}\n"


@pytest.fixture(scope="module")
def calm(in_peace: InPeace) -> str:
    """What train.py ends with on four ranks, wherever they are, if nobody disturbs it."""
    return training.digest(in_peace("train.py", "--steps", str(STEPS), "--sleep", "0", nproc=RANKS))


@pytest.fixture
def start(start_job: StartJob, tmp_path: Path) -> Any:
    """A job of four ranks on so many nodes, with state of each rank's own."""

    def begin(nodes: int, *flags: str, config: str = CONFIG, own: int = 256, sleep: float = 0.08) -> Job:
        file = tmp_path / "config.yaml"
        file.write_text(config)
        return start_job(
            "train.py",
            nproc=RANKS // nodes,
            flags=[f"--local-nodes={nodes}", f"--config={file}", *flags],
            args=["--steps", str(STEPS), "--sleep", str(sleep), "--own", str(own)],
            # a node with one rank would give it all cores, and bits depend on the number of threads
            environment={"OMP_NUM_THREADS": "1"},
        )

    return begin


class Promise:
    """What status said would not be lost with a node."""

    def __init__(self) -> None:
        self.safe = 0
        self.most_at_risk = 0

    def look(self, status: dict[str, Any]) -> bool:
        """Whether the next attempt runs."""
        if status["attempt"] == 1 and status["steps_at_risk"] is not None:
            self.safe = max(self.safe, status["step"] - status["steps_at_risk"])
        return bool(status["attempt"] > 1)


def kept_its_promise(job: Job, promise: Promise) -> int:
    """Wait for the next attempt, and see that it goes on from what was safe, or later; returns where."""
    status = job.wait_until(promise.look, "attempt 2", within_s=90)
    assert promise.safe > 0, "nothing was ever safe"
    assert status["resume"] is not None and status["resume"] >= promise.safe
    return int(status["resume"])


def is_backed_up(status: dict[str, Any]) -> bool:
    return status["steps_at_risk"] is not None and 0 < status["steps_at_risk"] < status["step"]


@pytest.mark.matrix
def test_a_wiped_node_costs_no_more_than_was_said(start: Any, calm: str) -> None:
    job = start(2, "--inject", "wipe:node=1@step=60")
    kept_its_promise(job, Promise())
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert job.incidents()[0]["nodes"] == ["node-1"]


@pytest.mark.matrix
def test_a_whole_pipeline_group_is_wiped_at_once(start: Any, calm: str) -> None:
    wipes = ["--inject", "wipe:node=0@step=60", "--inject", "wipe:node=2@step=60"]
    job = start(4, "--mesh", "pp=2,dp=2", *wipes)
    kept_its_promise(job, Promise())
    assert job.wait() == 0
    assert training.digest(job.folder) == calm


@pytest.mark.matrix
def test_slow_copies_hold_nothing_up_and_are_good_for_a_restart(start: Any, calm: str) -> None:
    # a round takes seconds at this rate
    slow = "checkpoint: {round_s: 0.3 s, peer_bytes_per_s: 300000}\n"
    job = start(2, "--inject", "wipe:node=0@step=75", config=slow)
    kept_its_promise(job, Promise())
    assert job.wait() == 0
    assert training.digest(job.folder) == calm


@pytest.mark.matrix
def test_an_agent_that_is_killed_while_it_copies_begins_again(start: Any, calm: str) -> None:
    slow = "checkpoint: {round_s: 0.3 s, peer_bytes_per_s: 300000}\n"
    job = start(2, config=slow, sleep=0.1)
    job.wait_for_step(5)
    copies = node_dir(job, "node-1") / "backups"
    eventually(lambda: list(copies.glob("*/*.partial")), "a copy on its way", story=job.story)
    job.kill("agent-node-1")
    job.wait_until(is_backed_up, "a save that is safe")
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert job.status()["attempt"] == 1, "nothing was restarted"


@pytest.mark.matrix
def test_without_a_peer_training_goes_on_with_more_at_risk(start: Any, calm: str) -> None:
    job = start(2)
    safe = job.wait_until(is_backed_up, "a save that is safe")
    risk = safe["steps_at_risk"]
    job.kill("agent-node-1", signal.SIGSTOP)
    grown = job.wait_until(lambda status: status["steps_at_risk"] > risk + 20, "more steps at risk")
    assert grown["attempt"] == 1 and grown["state"] == "running"
    job.wait_until(
        lambda status: any("node-1: its agent cannot be heard" in line for line in status["blind"]), "word of it"
    )
    job.kill("agent-node-1", signal.SIGCONT)
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert job.incidents() == []


@pytest.mark.matrix
def test_a_damaged_backup_is_found_and_told(start: Any, calm: str) -> None:
    """Of each rank's own state there is one backup only, so nothing is left to go on from; and that is no secret."""
    job = start(2, "--inject", "wipe:node=1@step=70", config="checkpoint: {round_s: 600 s}\n")
    job.wait_until(is_backed_up, "a save that is safe")
    parts = list((node_dir(job, "node-0") / "backups").glob("*/part-*"))
    assert len(parts) == 2
    for file in parts:
        flip(file)
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    incident = job.incidents()[0]
    evidence = " | ".join(incident["evidence"])
    assert "could not be fetched" in evidence and "does not match its checksums" in evidence
    assert "started again from nothing" in evidence


@pytest.mark.matrix
def test_a_rank_whose_memory_is_damaged_goes_on_from_disk(start: Any, calm: str) -> None:
    job = start(1, config="checkpoint: {disk_every_s: 1 s}\n")
    job.wait_until(is_backed_up, "a step on disk")
    damage(job, 1, "node-0")
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    is_told(job)
    assert job.status()["resume"] > 0


@pytest.mark.matrix
def test_a_rank_whose_memory_and_disk_are_damaged_goes_on_from_a_peer(start: Any, calm: str) -> None:
    job = start(2)
    job.wait_until(is_backed_up, "a save that is safe")
    damage(job, 2, "node-1", disk=True)
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    is_told(job)
    assert job.status()["resume"] > 0


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["fsdp", "hsdp", "vision"])
def test_every_kind_of_training_survives_the_loss_of_a_node(start_job: StartJob, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    args = [f"--kind={kind}", "--steps=80"]
    calm = start_job("kinds.py", folder="calm", nproc=RANKS, args=[*args, "--sleep=0"])
    assert calm.wait() == 0
    flags = ["--local-nodes=2", f"--config={file}", "--inject", "wipe:node=1@step=60"]
    job = start_job("kinds.py", folder="hit", nproc=RANKS // 2, flags=flags, args=[*args, "--sleep=0.1"])
    kept_its_promise(job, Promise())
    assert job.wait() == 0
    for rank in range(RANKS):
        # BatchNorm's statistics are each rank's own
        assert training.digest(job.folder, rank) == training.digest(calm.folder, rank)


@pytest.mark.matrix
def test_a_pipeline_group_of_three_dimensions_is_wiped_at_once(start_job: StartJob, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    script, args, one_thread = jobs.EXAMPLES / "train_3d.py", ["--steps=90", "--out=sum"], {"OMP_NUM_THREADS": "1"}
    calm = start_job(script, folder="calm", nproc=RANKS, args=args, environment=one_thread)
    assert calm.wait() == 0
    flags = ["--local-nodes=4", "--mesh=pp=2,dp=2", f"--config={file}"]
    flags += ["--inject", "wipe:node=0@step=60", "--inject", "wipe:node=2@step=60"]
    job = start_job(script, folder="hit", nproc=1, flags=flags, args=args, environment=one_thread)
    kept_its_promise(job, Promise())
    assert job.wait() == 0
    assert (job.folder / "sum").read_text() == (calm.folder / "sum").read_text()


@pytest.mark.matrix
@pytest.mark.skipif(bool(machines.why_not()), reason=machines.why_not())
def test_a_link_at_a_twentieth_of_its_speed(tmp_path: Path, calm: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    with machines.pair(tmp_path, shared=False) as both, both[1].slowed(megabits_per_s=500):
        flags = ["--nnodes=2", f"--rdzv-endpoint={both[0].name}:29431", f"--config={file}"]
        flags += ["--inject", "wipe:node=1@step=60"]
        args = ["--steps", str(STEPS), "--sleep", "0.08", "--own", "8192"]
        environment = {"EVERTRAIN_TOKEN": "as both know"}
        first, second = (
            one.start("train.py", nproc=2, flags=flags, args=args, job="slow-link", environment=environment)
            for one in both
        )
        promise = Promise()
        first.wait_until(promise.look, "attempt 2", within_s=90)
        assert promise.safe > 0
        assert (first.wait(120), second.wait(30)) == (0, 0)
        assert {training.digest(one.folder) for one in both} == {calm}


def node_dir(job: Job, node: str) -> Path:
    """In shared memory."""
    return Path(json.loads((job.job_dir / "job.json").read_bytes())["run_folder"]) / node


def flip(file: Path, at: int = 1000) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte[0] ^ 1]))


def damage(job: Job, rank: int, node: str, *, disk: bool = False) -> None:
    """Flip a bit in every copy of a rank's state, all ranks standing still, and kill it."""
    memory = node_dir(job, node) / "slots" / f"r{rank}"
    with standing(job):
        paths = [path for path in memory.iterdir() if _whole(path)]
        if disk:
            paths += (job.job_dir / "checkpoints" / node).glob(f"step-*/r{rank}")
        for path in paths:
            flip(path, layout.HEADER_BYTES + 1000)
        job.kill_rank(rank)


@contextmanager
def standing(job: Job) -> Iterator[None]:
    """Every rank is stopped, at a moment at which all whole slots have their checksums."""

    def stop() -> bool:
        pids = job.rank_pids().values()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        slots = [path for node in ("node-0", "node-1") for path in (node_dir(job, node) / "slots").glob("r*/*")]
        if all(header.sums_crc is not None for path in slots if (header := _whole(path)) is not None):
            return True
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        return False

    eventually(stop, "checksums in every slot", every_s=0.2, story=job.story)
    yield


def _whole(path: Path) -> layout.SlotHeader | None:
    header = layout.read(str(path))
    return header if header is not None and header.state == layout.COMPLETE else None


def is_told(job: Job) -> None:
    storage = [incident for incident in job.incidents() if incident["category"] == "storage"]
    assert storage and all("CheckpointDamaged" in incident["cause"] for incident in storage)
    assert all(incident["action"] == "restart" for incident in storage)
