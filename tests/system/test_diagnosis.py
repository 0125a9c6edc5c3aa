"""When numbers are wrong and nobody knows why, stopped nodes are tested: who is broken goes, and nobody else."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import InPeace, StartJob
from support import jobs, machines, training
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
    assert "node-2: 50 of 50 runs differ from what most nodes give" in shown and "GFLOP/s" in shown, shown


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
        assert ("50 of 50 runs differ from what was stored" in answer.stdout) is bool(code), answer.stdout


def diagnose(job: Job, *words: str) -> tuple[int, str]:
    answer = jobs.evertrain(job.folder, "diagnose", job.name, *words, environment=job.environment, timeout_s=110)
    return answer.returncode, answer.stdout + answer.stderr


@pytest.mark.timeout(240)
def test_by_hand_a_standby_is_tested_while_the_job_trains_and_goes_if_it_is_broken(start_job: StartJob) -> None:
    job = start_job(
        "train.py", nproc=1, flags=["--local-nodes=3", "--nnodes=2", "--standby=1"],
        args=["--sleep", "0.3", "--steps", "600"],
        environment={**CALM, "EVERTRAIN_DIAGNOSE_FAULT": "flip:node=node-2"},
    )  # fmt: skip
    job.wait_until(lambda seen: (seen["step"] or 0) >= 3, "it trains", within_s=90)
    code, said = diagnose(job)
    assert code == 3 and "it trains on node-0, node-1, and tests take the machine" in said and "--nodes node-2" in said
    job.wait_until(lambda seen: seen["nodes"][2]["state"] == "standby", "it has tested itself", within_s=90)
    code, said = diagnose(job, "--nodes", "node-2", "--suite", "nan", "--json")
    assert code == 2, said
    checks = json.loads(said)["checks"]
    assert [one["name"] for one in checks] == ["vendor diagnostics", "compute"]
    assert "elements are wrong" in checks[1]["accused"]["node-2"]
    status = job.wait_until(lambda seen: seen["nodes"][2]["state"] == "evicted", "it is no standby any more")
    assert status["attempt"] == 1, "training has gone on"
    (incident,) = job.incidents()
    assert (incident["cause"], incident["nodes"]) == ("failed tests", ["node-2"])
    assert "elements are wrong" in "".join(incident["evidence"])


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_by_hand_a_job_that_waits_for_nodes_is_tested_and_starts_afterwards(start_job: StartJob) -> None:
    name, flags = f"waits-{jobs.SESSION}", ["--nnodes=2", "--rdzv-endpoint=localhost:29431", "--rdzv-backend=c10d"]
    more: dict[str, Any] = {"nproc": 1, "flags": flags, "args": ["--steps", "3"], "job": name, "environment": CALM}
    first = start_job("train.py", folder="waits", **more)
    first.wait_until(lambda seen: "1 of 2 nodes are here" in seen["message"], "it waits")
    began = time.monotonic()
    code, said = diagnose(first, "--suite", "illegal-access")
    assert code == 0 and "OK - compute, memory, bit-wise alignment: passed" in said, said
    assert time.monotonic() - began < 90
    second = start_job("train.py", folder="waits", **more)
    assert (first.wait(), second.wait()) == (0, 0)


@pytest.mark.matrix
@pytest.mark.timeout(240)
def test_a_machine_that_comes_as_a_standby_and_computes_wrongly_is_found_by_itself(tmp_path: Path) -> None:
    if why := machines.why_not():
        pytest.skip(why)
    with machines.pair(tmp_path) as (first, second):
        job, _ = (
            one.start(
                "train.py", nproc=1, job=f"comes-{first.namespace}",
                flags=["--nnodes=1", "--standby=1", f"--rdzv-endpoint={first.name}:29441"],
                args=["--sleep", "0.3", "--steps", "600"],
                environment={**CALM, "EVERTRAIN_DIAGNOSE_FAULT": f"flip:node={second.name},matmul=7,p=0.3"},
            )
            for one in (first, second)
        )  # fmt: skip
        status = job.wait_until(
            lambda seen: [node["state"] for node in seen["nodes"]] == ["active", "evicted"], "it is found", within_s=150
        )
        assert status["attempt"] == 1, "training has gone on"
        (incident,) = job.incidents()
    assert (incident["cause"], incident["nodes"]) == ("failed tests", [second.name])
    # only the training step has so many products; alone and with nothing to compare with, it contradicts itself
    assert "bit-wise alignment: rank 0: 50 runs gave" in incident["evidence"][0]
