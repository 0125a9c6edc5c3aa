"""Real hangs of 8 ranks in pipeline, data and tensor groups: the right rank is named, as what it is, and why.

Limits are 2 s, of one node with all ranks, unless a test says otherwise; benchmarks/hang.py measures the default ones.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from conftest import StartJob
from support import dead_disk, faults, jobs
from support.faults import FAULTS, Fault
from support.jobs import Job
from support.waiting import eventually

FAST = """
hang:
  still_limit_s: 2
  suspect_s: 1
  steps: 1
  busy_limit_s: 60
  start_limit_s: 120
"""
SAMPLE = ("loader", "skipped", "held")
"""Looked at by the ordinary suite; the others, and all of them by the default limits, are the matrix."""
RANK, STEP = 5, 3
"""Of the second stage, which begins a step by receiving; those of the first begin it by gathering parameters."""
START_S = 90.0
WITHIN_S = 15.0
"""From fault to named, with the default limits."""

Json = dict[str, Any]


def start(
    start_job: StartJob, tmp_path: Path, fault: Fault | None, *more: str | Path, rank: int = RANK, fast: bool = True
) -> Job:
    """A job with a fault, on one node with limits of 2 s, or with those of everybody on four and one that stands by."""
    args: list[str | Path] = [*faults.SIZES, "--at", f"{rank}:{STEP}", "--note", "note", *more]
    if fault is not None and not fault.by_signal:
        args += ["--fault", fault.name]
    flags = ["--mesh", faults.MESH]
    if fast:
        (tmp_path / "fast.yaml").write_text(FAST)
        flags += ["--config", str(tmp_path / "fast.yaml")]
    else:
        flags += [f"--local-nodes={faults.NODES + 1}", f"--nnodes={faults.NODES}", "--standby=1"]
    nproc = faults.RANKS if fast else faults.PER_NODE
    return start_job("faulty_3d.py", nproc=nproc, flags=flags, args=args, environment={"OMP_NUM_THREADS": "1"})


def hurt(job: Job, fault: Fault, rank: int) -> float:
    """When it happened."""
    if fault.by_signal:
        job.wait_for_step(STEP, within_s=START_S)
        job.kill_rank(rank, signal.SIGSTOP)
        return time.time()
    job.wait_for_file("note", within_s=START_S)
    lines = eventually(lambda: (job.folder / "note").read_text().splitlines(), "the moment of the fault is written")
    return float(json.loads(lines[0])["time"])


def verdict(job: Job, fault: Fault, *, within_s: float = 20.0) -> Json:
    """The incident, once it says who it is and something has been decided."""

    def named() -> Json | None:
        found = [one for one in job.peek_incidents() if (one["ranks"] or fault.in_circle) and faults.by_stacks(one)]
        return found[0] if found and found[0]["action"] not in ("none", "capture") else None

    found = eventually(named, f"{fault.name} is named", within_s=within_s, story=job.story)
    assert found is not None
    return found


def check(incident: Json, fault: Fault, rank: int) -> None:
    said = "\n".join(incident["evidence"])
    assert fault.is_right(rank, incident["ranks"], faults.kind_of(incident)), (incident, said)
    assert fault.may_lead_to(incident["action"]), (incident["action"], said)
    assert any(word in said for word in fault.seen), said
    if fault.in_circle:
        assert said.count("group") >= 2, said


def hanging(
    start_job: StartJob, tmp_path: Path, fault: Fault, rank: int = RANK, *, fast: bool = True
) -> tuple[Job, Json, float]:
    """A job that hangs, what is said about it, and after how many seconds."""
    with ExitStack() as stack:
        more: list[str | Path] = []
        if fault.name == "dead-mount":
            folder = tmp_path / "dead"
            folder.mkdir()
            try:
                # free again before the job is closed: what sleeps in the kernel cannot be cleaned up
                more = ["--file", stack.enter_context(dead_disk.mounted(folder)).file]
            except OSError as error:
                pytest.skip(f"no file system of our own can be mounted here: {error}")
        job = start(start_job, tmp_path, fault, *more, rank=rank, fast=fast)
        began = hurt(job, fault, rank)
        incident = verdict(job, fault, within_s=20 if fast else 40)
        return job, incident, time.time() - began


def stacks(job: Job, *words: str) -> Any:
    """What `evertrain stacks --json` prints."""
    answer = jobs.evertrain(
        job.folder, "stacks", "--job", job.name, "--json", *words, environment=job.environment, timeout_s=60
    )
    assert answer.returncode == 0, f"{answer.stderr}\n{job.story()}"
    return json.loads(answer.stdout)


def cells(sample: Sequence[str]) -> list[Any]:
    """Each fault, and those of operations that never meet on a rank of the first stage, too."""
    cells = [pytest.param(name, RANK, marks=[] if name in sample else pytest.mark.matrix) for name in FAULTS]
    return cells + [pytest.param(name, 0, marks=pytest.mark.matrix) for name in ("skipped", "order", "shape", "dtype")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "rank"), cells(SAMPLE))
def test_the_culprit_of_a_hang_is_named(start_job: StartJob, tmp_path: Path, name: str, rank: int) -> None:
    job, incident, _ = hanging(start_job, tmp_path, FAULTS[name], rank)
    check(incident, FAULTS[name], rank)
    assert incident["cause"].startswith("hang (")
    kept = stacks(job, "--incident", str(incident["id"]))
    assert kept["verdict"]["kind"] == incident["class"]
    assert sorted({rank for group in kept["groups"] for rank in group["ranks"]}) == list(range(faults.RANKS))


@pytest.mark.matrix
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FAULTS)
def test_by_the_default_limits_it_takes_no_longer_than_15_s(start_job: StartJob, tmp_path: Path, name: str) -> None:
    job, incident, seconds = hanging(start_job, tmp_path, FAULTS[name], fast=False)
    check(incident, FAULTS[name], RANK)
    assert seconds <= WITHIN_S
    if not FAULTS[name].may_evict:
        assert not [node for node in job.status()["nodes"] if node["state"] == "evicted"]


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_stacks_are_shown_while_it_hangs_and_after_the_run(start_job: StartJob, tmp_path: Path) -> None:
    job, _, _ = hanging(start_job, tmp_path, FAULTS["loop"])
    while_it_hangs = stacks(job)
    (odd,) = [group for group in while_it_hangs["groups"] if RANK in group["ranks"] and group["kind"] == "trainer"]
    assert (odd["ranks"], odd["suspect"], odd["frames"][0]["function"]) == ([RANK], True, "pack_sequences")
    assert odd["frames"][0]["file"].endswith("faulty_3d.py")
    others = [group for group in while_it_hangs["groups"] if group is not odd and group["kind"] == "trainer"]
    assert {group["place"] for group in others} <= {"collective", "transfer"}
    assert (while_it_hangs["verdict"]["kind"], while_it_hangs["verdict"]["ranks"]) == ("loop", [RANK])
    assert while_it_hangs["reason"] == "user"
    assert stacks(job)["capture"] > while_it_hangs["capture"], "each is a look of its own"
    assert job.end()
    assert "pack_sequences" in json.dumps(stacks(job)), "the last one is kept"


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_a_look_at_a_healthy_job_blames_nobody_and_stops_nothing(start_job: StartJob, tmp_path: Path) -> None:
    job = start(start_job, tmp_path, None, "--loaders")
    before = job.wait_for_step(STEP, within_s=START_S)["step"]
    shown = stacks(job)
    loaders = [group for group in shown["groups"] if group["kind"] == "loader"]
    assert sorted(rank for group in loaders for rank in group["ranks"]) == list(range(faults.RANKS))
    assert shown["verdict"]["ranks"] == [], shown["verdict"]
    job.wait_for_step(before + 5)
    assert job.incidents() == []
    assert job.status()["attempt"] == 1
