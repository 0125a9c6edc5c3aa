"""Where tests of stopped nodes see nothing, the job itself is replayed on groups of them: who spoils it goes."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import StartJob
from support import jobs
from support.jobs import Job

NODES = ["--local-nodes=7", "--nnodes=6", "--standby=1"]
SIZES = [
    "--pp=2", "--dp=3", "--at=3", "--steps=5", "--layers=4", "--width=64", "--batch=4", "--context=32",
    "--microbatches=2",
]  # fmt: skip
CALM = {"OMP_NUM_THREADS": "1"}


def run(start_job: StartJob, *args: str, fault: str = "") -> Job:
    return start_job(
        "replayed.py",
        nproc=1,
        flags=[*NODES, "--config", "config.yaml"],
        args=[*args, *SIZES],
        environment={**CALM, "EVERTRAIN_REPLAY_FAULT": fault} if fault else CALM,
    )


@pytest.fixture(autouse=True)
def config(tmp_path: Any) -> None:
    """No repetition, so that a job whose nodes are well is not replayed for long."""
    (tmp_path / "config.yaml").write_text("diagnose: {budget_s: 30, replay_repeats: 1}\n")


def not_finite(job: Job) -> list[dict[str, Any]]:
    """On a machine that is busy with other things some may be named as slow beside it."""
    return [one for one in job.incidents() if one["cause"] == "loss not finite"]


def phases(incident: dict[str, Any]) -> list[str]:
    return [one["groups"][0]["phase"] for one in incident["replay"]["rounds"]]


@pytest.mark.timeout(450)
def test_a_node_that_spoils_the_job_alone_is_found_by_replays_of_it(start_job: StartJob) -> None:
    job = run(start_job, "--bad-node=node-4", fault="flip:node=node-4,matmul=1")
    assert job.wait(400) == 0
    first, second = not_finite(job)
    assert not any(check["accused"] for check in first["checks"]) and first["checks"], "its tests have passed"
    assert second["action"] == "replay" and not second["checks"]
    assert phases(second) == ["horizontal", "vertical", "retest"]
    differ = [
        sorted(group["nodes"]) for one in second["replay"]["rounds"] for group in one["groups"] if group["differs"]
    ]
    assert len(differ) == 3 and all("node-4" in nodes for nodes in differ)
    assert second["replay"]["nodes"] == ["node-4"]
    settings = second["replay"]["rounds"][0]["settings"]
    assert (settings["layers"], settings["dp"], settings["steps"]) == (2, 1, 3)
    states = {node["id"]: node["state"] for node in job.status()["nodes"]}
    assert states["node-4"] == "evicted" and states["node-6"] == "active"
    number = str(second["id"])
    shown = jobs.evertrain(job.folder, "incidents", number, "--job", job.name, environment=job.environment).stdout
    assert "replay" in shown and "they meet at node-4" in shown, shown


@pytest.mark.matrix
@pytest.mark.timeout(450)
def test_numbers_that_the_code_spoils_cost_no_node_its_place(start_job: StartJob) -> None:
    everywhere = ";".join(f"flip:node=node-{number},matmul=1" for number in range(6))
    job = run(start_job, "--bad-attempts=2", fault=everywhere)
    assert job.wait(400) == 0
    _, second = not_finite(job)
    assert phases(second) == ["horizontal", "vertical"]
    assert second["replay"]["nodes"] == [] and "all groups agree bit by bit" in second["replay"]["because"]
    assert second["action"] == "human"
    assert [node["state"] for node in job.status()["nodes"]] == ["active"] * 6 + ["standby"]
