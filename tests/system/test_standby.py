"""Spare nodes: tested before they count, and ready at the barrier, before the script or inside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import StartJob
from support import jobs, training
from support.jobs import Json

SPARE = ["--local-nodes=3", "--nnodes=2", "--standby=1"]
IN_INIT = [*SPARE, "--standby-barrier=init"]


def spare(status: Json) -> Json:
    (found,) = [node for node in status["nodes"] if node["id"] == "node-2"]
    return dict(found)


def early(status: Json) -> str:
    return str(spare(status).get("early", {}).get("state", ""))


def began(folder: Path, attempt: int) -> dict[int, Any]:
    """By rank, what each process of an attempt says of its beginning."""
    files = {int(file.name.rpartition("-r")[2]): file for file in folder.glob(f"began-a{attempt}-r*")}
    return {rank: json.loads(file.read_bytes()) for rank, file in files.items()}


def test_a_spare_node_tests_itself_and_waits_before_the_script(start_job: StartJob) -> None:
    job = start_job("ahead.py", nproc=1, flags=SPARE, args=["--setup=0.1", "--steps=30"])
    status = job.wait_until(lambda seen: spare(seen)["state"] == "standby", "the spare node has tested itself")
    assert {node["id"]: node["state"] for node in status["nodes"]} | {"node-2": "standby"} == {
        "node-0": "active", "node-1": "active", "node-2": "standby",
    }  # fmt: skip
    assert job.wait() == 0
    assert job.incidents() == []
    assert len(list(job.folder.glob("setup-*.json"))) == 2, "no process of the spare node has begun the script"


@pytest.mark.matrix
def test_with_the_barrier_in_init_a_spare_node_has_its_set_up_behind_it(start_job: StartJob) -> None:
    job = start_job("ahead.py", nproc=2, flags=IN_INIT, args=["--setup=0.5", "--steps=80"])
    job.wait_until(lambda seen: early(seen) == "waiting", "its ranks wait in init()")
    assert "node-2 standby (in evertrain.init())" in jobs.evertrain(
        job.folder, "status", "--job", job.name, environment=job.environment
    ).stdout.replace("\n", " ")
    assert len(list(job.folder.glob("setup-*.json"))) == 6
    assert job.wait() == 0
    assert job.incidents() == []
    assert {rank["node"] for rank in began(job.folder, 1).values()} == {"node-0", "node-1"}
    assert len(list(job.folder.glob("began-*"))) == 4, "those that waited were ranks of nothing"


@pytest.mark.matrix
def test_a_script_that_must_know_its_rank_waits_before_it_and_status_says_why(start_job: StartJob) -> None:
    job = start_job("train.py", nproc=1, flags=IN_INIT, args=["--steps=60", "--sleep=0.1"])
    status = job.wait_until(lambda seen: early(seen) == "failed", "it cannot")
    reason = "the script needs RANK before it calls evertrain.init()"
    assert (spare(status)["state"], spare(status)["early"]) == ("standby", {"state": "failed", "reason": reason})
    assert status["message"] == f"node-2 waits before the script, not in evertrain.init(): {reason}"
    assert job.wait() == 0
    assert job.incidents() == []


@pytest.mark.parametrize(
    "flags", [pytest.param(SPARE, id="start", marks=pytest.mark.matrix), pytest.param(IN_INIT, id="init")]
)
def test_a_spare_node_takes_over_and_training_ends_with_the_same_bits(
    start_job: StartJob, tmp_path: Path, flags: list[str]
) -> None:
    setup_s = 3.0
    args = [f"--setup={setup_s}", "--steps=60"]
    job = start_job("ahead.py", nproc=2, flags=[*flags, "--inject", "gpu-lost:node=1@step=45"], args=args)
    in_init = flags is IN_INIT
    if in_init:
        job.wait_until(lambda seen: early(seen) == "waiting" and (seen["step"] or 0) < 45, "its ranks wait in init()")
    assert job.wait() == 0
    (incident,) = job.incidents()
    assert incident["action"] == "evict" and incident["nodes"] == ["node-1"]
    ranks = began(job.folder, 2)
    assert [ranks[rank]["node"] for rank in range(4)] == ["node-0", "node-0", "node-2", "node-2"]
    # those of the node that stayed set themselves up again; those of the spare one have done so long ago
    late = max(began(job.folder, 1)[rank]["time"] for rank in range(4))
    for rank in (2, 3):
        assert (ranks[rank]["setup_began"] < ranks[0]["setup_began"] - 0.5) == in_init, (late, ranks)
    assert "before" not in job.output
    for rank in range(4):
        assert (job.job_dir / "logs" / "attempt_2" / str(rank) / "stderr.log").exists()
    calm = tmp_path / "calm"
    calm.mkdir()
    undisturbed = jobs.start(calm, "ahead.py", nproc=2, flags=["--local-nodes=2"], args=["--setup=0", "--steps=60"])
    try:
        assert undisturbed.wait() == 0
        assert training.digest(calm) == training.digest(job.folder)
    finally:
        jobs.close(calm, [undisturbed])
