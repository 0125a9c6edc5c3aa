"""Nodes that are broken are taken out, standbys take their place, and nothing healthy is touched."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import InPeace, StartJob
from support import jobs, processes, training
from support.jobs import Job
from support.waiting import eventually

STEPS = 45
QUICK = "hang: {still_limit_s: 2 s, suspect_s: 0.5 s}\n"


@pytest.fixture(scope="module")
def calm(in_peace: InPeace) -> str:
    """What four ranks end with if nobody disturbs them."""
    return training.digest(in_peace("train.py", "--steps", str(STEPS), "--sleep", "0", nproc=4))


@pytest.fixture
def start(start_job: StartJob, tmp_path: Path) -> Any:
    """A job of four ranks on two nodes, or on four, with standbys."""

    def begin(
        *faults: str,
        nodes: int = 2,
        standby: int = 1,
        config: str = "",
        flags: tuple[str, ...] = (),
        sleep: float = 0.06,
    ) -> Job:
        file = tmp_path / "config.yaml"
        file.write_text(config)
        injected = [word for fault in faults for word in ("--inject", fault)]
        size = [f"--local-nodes={nodes + standby}", f"--nnodes={nodes}", f"--standby={standby}"]
        return start_job(
            "train.py",
            nproc=4 // nodes,
            flags=[*size, f"--config={file}", *flags, *injected],
            args=["--steps", str(STEPS), "--sleep", str(sleep)],
            # a node with one rank would give it all cores, and bits depend on the number of threads
            environment={"OMP_NUM_THREADS": "1"},
        )

    return begin


def states(job: Job) -> dict[str, str]:
    return {node["id"]: node["state"] for node in job.status()["nodes"]}


def actions(job: Job) -> list[str]:
    return [incident["action"] for incident in job.incidents()]


def placed(job: Job) -> dict[int, str]:
    return {worker["rank"]: worker["node"] for worker in job.status()["workers"]}


def is_replayed(job: Job) -> None:
    """Deciding again from the log comes to the same."""
    for incident in job.incidents():
        words = ("incidents", str(incident["id"]), "--replay", "--job", job.name)
        answer = jobs.evertrain(job.folder, *words, environment=job.environment)
        assert answer.returncode == 0, answer.stdout + answer.stderr


def ready(job: Job, node: str) -> None:
    job.wait_until(
        lambda status: {"id": node, "state": "standby"}.items() <= _node(status, node).items(), f"{node} waits"
    )


def _node(status: dict[str, Any], node: str) -> dict[str, Any]:
    return next((one for one in status["nodes"] if one["id"] == node), {})


def test_a_node_that_has_lost_its_gpu_is_replaced_by_the_standby(start: Any, calm: str) -> None:
    job = start("gpu-lost:node=1@step=20")
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    (incident,) = job.incidents()
    assert (incident["action"], incident["nodes"], incident["cause"]) == ("evict", ["node-1"], "gpu lost")
    assert incident["evidence"] and incident["first_new_step"] is not None
    assert states(job) == {"node-0": "active", "node-1": "evicted", "node-2": "active"}
    assert placed(job) == {0: "node-0", 1: "node-0", 2: "node-2", 3: "node-2"}, "it has taken over its ranks"
    assert "incident 1: node-1: gpu lost" in job.errors
    is_replayed(job)


@pytest.mark.matrix
def test_one_network_alert_is_tolerated(start: Any, calm: str) -> None:
    job = start("network-alert:node=1@step=20")
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert job.status()["attempt"] == 1
    (incident,) = job.incidents()
    assert (incident["action"], incident["nodes"]) == ("tolerate", ["node-1"])
    is_replayed(job)


@pytest.mark.matrix
def test_the_second_network_alert_evicts(start: Any, calm: str) -> None:
    job = start("network-alert:node=1@step=15", "network-alert:node=1@step=25")
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert actions(job) == ["tolerate", "evict"]
    assert len(job.incidents()[1]["evidence"]) == 2
    assert states(job)["node-1"] == "evicted"
    is_replayed(job)


@pytest.mark.matrix
def test_a_hang_without_a_reading_is_restarted_in_place_and_the_second_evicts(start: Any, calm: str) -> None:
    job = start("hang:rank=2@step=15", "hang:rank=3@step=30", config=QUICK)
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert actions(job) == ["restart", "evict"]
    assert all(incident["nodes"] == ["node-1"] for incident in job.incidents())
    assert states(job)["node-2"] == "active"
    is_replayed(job)


@pytest.mark.matrix
def test_a_hang_beside_a_hardware_reading_evicts_at_once(start: Any, calm: str) -> None:
    job = start("reading:node=1@step=12", "hang:rank=2@step=20", config=QUICK)
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert actions(job) == ["evict"]
    assert states(job)["node-1"] == "evicted"
    is_replayed(job)


@pytest.mark.matrix
def test_beyond_the_pool_training_goes_on_and_a_human_is_called(start: Any, calm: str) -> None:
    config = "ladder: {budget_nodes: 4}\n"
    job = start("gpu-lost:node=1@step=15", "gpu-lost:node=0@step=32", config=config)
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert actions(job) == ["evict", "human"]
    assert states(job)["node-0"] == "active"
    is_replayed(job)


@pytest.mark.matrix
def test_over_the_budget_nobody_is_evicted(start: Any, calm: str) -> None:
    job = start("gpu-lost:node=1@step=15", "gpu-lost:node=0@step=32", standby=2)
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert actions(job) == ["evict", "human"]
    assert "budget" in job.incidents()[1]["because"]
    assert states(job)["node-3"] == "standby"


@pytest.mark.matrix
def test_observe_only_does_nothing(start: Any, calm: str) -> None:
    job = start("gpu-lost:node=1@step=20", flags=("--observe-only",))
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert job.status()["attempt"] == 1
    (incident,) = job.incidents()
    assert incident["action"] == "tolerate" and "would evict" in incident["because"]


@pytest.mark.matrix
def test_without_a_standby_nothing_waits_for_ever(start: Any, calm: str) -> None:
    job = start("gpu-lost:node=2@step=15", "kill:rank=2@step=30", nodes=4, standby=0)
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert actions(job) == ["human", "restart"]
    assert set(states(job).values()) == {"active"}


def test_the_standby_of_a_lost_node_trains_within_fifteen_seconds(start: Any, calm: str) -> None:
    job = start("node-loss:node=1@step=20")
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    (incident,) = job.incidents()
    assert (incident["action"], incident["nodes"], incident["cause"]) == ("evict", ["node-1"], "node lost")
    assert sum(incident["seconds"].values()) <= 15.0
    assert states(job)["node-2"] == "active" and states(job)["node-1"] == "lost"
    is_replayed(job)


def test_a_frozen_node_that_comes_back_is_fenced(start: Any, calm: str) -> None:
    """Everything of a node stands still for so long that it is replaced, and then goes on where it was."""
    job = start(config="machines: {lost_s: 3 s, broken_s: 2 s}\n", sleep=0.12)
    job.wait_for_step(15)
    mine = [processes.identify(pid) for rank, pid in job.rank_pids().items() if rank in (2, 3)]
    whole = [one for one in (*mine, job.processes()["keeper-node-1"], job.processes()["agent-node-1"]) if one]
    try:
        for process in whole:
            processes.send(process, signal.SIGSTOP)
        job.wait_for_attempt(2)
        after = job.wait_until(lambda status: status["state"] == "running", "training goes on")
    finally:
        for process in whole:
            processes.send(process, signal.SIGCONT)
    assert {worker["node"] for worker in after["workers"]} == {"node-0", "node-2"}
    eventually(
        lambda: not any(one is not None and processes.is_alive(one) for one in mine),
        "its old ranks end",
        story=job.story,
    )
    assert job.wait() == 0
    assert training.digest(job.folder) == calm, "nothing of what it did got into the new attempt"
    (incident,) = job.incidents()
    assert (incident["action"], incident["nodes"]) == ("evict", ["node-1"])


@pytest.mark.matrix
def test_an_agent_that_cannot_be_heard_changes_nothing(start: Any, calm: str) -> None:
    job = start(config="machines: {lost_s: 2 s, broken_s: 1 s}\n", sleep=0.15)
    job.wait_for_step(10)
    job.kill("agent-node-1", signal.SIGSTOP)
    try:
        job.wait_until(lambda status: any("node-1" in line for line in status["blind"]), "its silence is noticed")
        job.wait_for_step(38)
    finally:
        job.kill("agent-node-1", signal.SIGCONT)
    assert job.wait() == 0
    assert job.incidents() == [] and job.status()["attempt"] == 1
    assert training.digest(job.folder) == calm


@pytest.mark.matrix
def test_a_controller_that_hears_nobody_does_nothing(start: Any, calm: str) -> None:
    job = start(config="machines: {lost_s: 2 s, broken_s: 1 s}\n", sleep=0.15)
    job.wait_for_step(10)
    agents = [f"agent-node-{number}" for number in range(3)]
    for agent in agents:
        job.kill(agent, signal.SIGSTOP)
    try:
        job.wait_until(lambda status: len(status["blind"]) > 2, "their silence is noticed")
        lines = job.folder / "losses-r0.jsonl"
        eventually(lambda: len(lines.read_text().splitlines()) >= 38, "training goes on", story=job.story)
    finally:
        for agent in agents:
            job.kill(agent, signal.SIGCONT)
    assert job.wait() == 0
    assert job.incidents() == [] and job.status()["attempt"] == 1
    assert training.digest(job.folder) == calm


@pytest.mark.matrix
@pytest.mark.timeout(700)
def test_an_agent_that_is_cut_off_for_five_minutes_changes_nothing(start_job: StartJob, tmp_path: Path) -> None:
    """By the default limits."""
    size = ["--local-nodes=3", "--nnodes=2", "--standby=1"]
    job = start_job("train.py", nproc=2, flags=size, args=["--steps", "2500", "--sleep", "0.13"])
    job.wait_for_step(10)
    job.kill("agent-node-1", signal.SIGSTOP)
    try:
        job.wait_until(lambda status: (status["step"] or 0) >= 2400, "five minutes of steps", within_s=600)
    finally:
        job.kill("agent-node-1", signal.SIGCONT)
    assert job.wait(120) == 0
    assert job.incidents() == [] and job.status()["attempt"] == 1
    assert training.steps_done(job.folder, 2) == list(range(1, 2501)), "no step lost"


@pytest.mark.matrix
def test_an_evicted_node_is_let_back_by_the_user(start: Any, calm: str) -> None:
    job = start("gpu-lost:node=1@step=10", sleep=0.2)
    job.wait_until(lambda status: _node(status, "node-1").get("state") == "evicted", "node-1 is out")
    listed = _command(job, "node", "list", "--json")
    out = next(node for node in json.loads(listed) if node["id"] == "node-1")
    assert out["state"] == "evicted" and "gpu" in out["because"]
    _command(job, "node", "allow", "node-1")
    ready(job, "node-1")
    assert job.wait() == 0
    assert training.digest(job.folder) == calm


@pytest.mark.matrix
def test_a_node_that_is_drained_is_replaced_without_a_fault(start: Any, calm: str) -> None:
    job = start(sleep=0.2)
    ready(job, "node-2")
    job.wait_for_step(10)
    _command(job, "node", "drain", "node-1")
    assert job.wait() == 0
    assert training.digest(job.folder) == calm
    assert job.incidents() == []
    assert states(job)["node-1"] == "evicted" and set(placed(job).values()) == {"node-0", "node-2"}


def _command(job: Job, *words: str) -> str:
    answer = jobs.evertrain(job.folder, *words, "--job", job.name, environment=job.environment, timeout_s=60)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout
