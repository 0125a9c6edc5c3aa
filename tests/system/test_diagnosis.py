"""When numbers are wrong and nobody knows why, stopped nodes are tested: who is broken goes, and nobody else."""

from __future__ import annotations

import os
from typing import Any

import pytest

from conftest import InPeace, StartJob
from support import jobs, training
from support.jobs import Job

NODES = ["--local-nodes=4", "--nnodes=3", "--standby=1"]
CALM = {"OMP_NUM_THREADS": "1"}
"""Bits depend on the number of threads, and a node with one rank would give it all cores."""


@pytest.fixture(scope="module")
def calm(in_peace: InPeace) -> str:
    """What three ranks end with if nobody disturbs them."""
    return training.digest(in_peace("train.py", nproc=3))


def nan(start_job: StartJob, *, fault: str = "") -> Job:
    """A job on three nodes whose numbers become none."""
    environment = {**CALM, "EVERTRAIN_DIAGNOSE_FAULT": fault} if fault else CALM
    return start_job(
        "train.py",
        nproc=1,
        flags=[*NODES, "--inject", "nan:rank=1@step=5"],
        args=["--sleep", "0.3"],
        environment=environment,
    )


def checks(incident: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What each test came to, by name."""
    return {one["name"]: one for one in incident["checks"]}


def test_a_node_that_computes_wrongly_is_named_and_replaced(start_job: StartJob, calm: str) -> None:
    job = nan(start_job, fault="flip:node=node-2,matmul=7")
    assert job.wait(150) == 0
    first = job.incidents()[0]
    assert (first["cause"], first["action"]) == ("loss not finite", "evict")
    seen = checks(first)
    assert list(seen) == ["vendor diagnostics", "compute", "bit-wise alignment"]
    assert list(seen["bit-wise alignment"]["accused"]) == ["node-2"]
    assert {node["id"]: node["state"] for node in job.status()["nodes"]}["node-2"] == "evicted"
    assert training.digest(job.folder) == calm
    shown = jobs.evertrain(job.folder, "incidents", "1", "--job", job.name, environment=job.environment).stdout
    assert "node-2: 10 of 10 runs differ from what most nodes give" in shown and "GFLOP/s" in shown, shown


def test_numbers_that_the_code_makes_wrong_cost_no_node_its_place(start_job: StartJob, calm: str) -> None:
    job = nan(start_job)
    assert job.wait(150) == 0
    first = job.incidents()[0]
    seen = checks(first)
    assert {"compute", "bit-wise alignment", "exchange between nodes"} <= seen.keys()
    assert not any(one["accused"] for one in seen.values())
    aligned = seen["bit-wise alignment"]["results"]
    assert {one["outcome"] for one in aligned.values()} == {"passed"} and len(aligned) == 3
    assert [node["state"] for node in job.status()["nodes"]][:3] == ["active"] * 3
    assert training.digest(job.folder) == calm

    # the bits that three nodes agreed on are what this machine is compared with from now on
    for fault, code in (("", 0), (f"flip:node={os.uname().nodename},matmul=7", 2)):
        environment = {**job.environment, "OMP_NUM_THREADS": "1", "EVERTRAIN_DIAGNOSE_FAULT": fault}
        answer = jobs.evertrain(job.folder, "diagnose", job.name, environment=environment, timeout_s=90)
        assert answer.returncode == code, answer.stdout + answer.stderr
        assert ("10 of 10 runs differ from what was stored" in answer.stdout) is bool(code), answer.stdout
