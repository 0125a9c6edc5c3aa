"""Where tests of stopped nodes see nothing, the job itself is replayed on groups of them: who spoils it goes."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import StartJob
from support import jobs
from support.jobs import Job

NODES = ["--local-nodes=7", "--nnodes=6", "--standby=1"]
SIZES = ["--pp=2", "--dp=3", "--steps=12", "--layers=4", "--width=64", "--batch=4", "--context=32", "--microbatches=2"]
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
    """One repetition more than none, so that a job that is well is not replayed for long."""
    (tmp_path / "config.yaml").write_text("diagnose: {budget_s: 60, replay_repeats: 1}\n")


def phases(incident: dict[str, Any]) -> list[str]:
    return [one["groups"][0]["phase"] for one in incident["replay"]["rounds"]]


@pytest.mark.timeout(240)
def test_a_node_that_spoils_the_job_alone_is_found_by_replays_of_it(start_job: StartJob) -> None:
    job = run(start_job, "--bad-node=node-4", fault="flip:node=node-4,matmul=1")
    assert job.wait(220) == 0
    first, second = job.incidents()
    assert first["cause"] == second["cause"] == "loss not finite"
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
    shown = jobs.evertrain(job.folder, "incidents", "2", "--job", job.name, environment=job.environment).stdout
    assert "replay" in shown and "they meet at node-4" in shown, shown


@pytest.mark.timeout(240)
def test_numbers_that_the_code_spoils_cost_no_node_its_place(start_job: StartJob) -> None:
    everywhere = ";".join(f"flip:node=node-{number},matmul=1" for number in range(6))
    job = run(start_job, "--bad-attempts=2", fault=everywhere)
    assert job.wait(220) == 0
    second = job.incidents()[1]
    assert phases(second) == ["horizontal", "vertical"]
    assert second["replay"]["nodes"] == [] and "all groups agree bit by bit" in second["replay"]["because"]
    assert second["action"] == "human"
    assert [node["state"] for node in job.status()["nodes"]] == ["active"] * 6 + ["standby"]
