"""Agents, controllers, keepers, zygotes and `run` itself are killed: training does not notice, or comes back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from conftest import InPeace, StartJob
from support import jobs, processes
from support.waiting import eventually

NODES = ["--local-nodes", "2"]
RANKS = 4


@pytest.fixture(scope="module")
def undisturbed(in_peace: InPeace) -> str:
    """Digest of the parameters that training ends with if nobody disturbs it."""
    return digest(in_peace("train.py", "--steps", "30", nproc=2, flags=NODES))


def digest(folder: Path) -> str:
    (one,) = {json.loads((folder / f"final-r{rank}.json").read_bytes())["digest"] for rank in range(RANKS)}
    return str(one)


def steps_done(folder: Path) -> dict[int, list[int]]:
    """Every step that each rank did, redone ones as often as they were done."""
    return {
        rank: [json.loads(line)["step"] for line in (folder / f"losses-r{rank}.jsonl").read_text().splitlines()]
        for rank in range(RANKS)
    }


def training(start_job: StartJob, *, steps: int = 30, sleep: float = 0.1) -> jobs.Job:
    job: jobs.Job = start_job("train.py", nproc=2, flags=NODES, args=["--steps", str(steps), "--sleep", str(sleep)])
    job.wait_for_step(4)
    return job


def returned(job: jobs.Job, name: str, before: processes.ProcessId) -> None:
    eventually(lambda: (job.processes().get(name) or before) != before, f"{name} is back", within_s=15, story=job.story)


@pytest.mark.parametrize("name", ["agent-node-1", "controller"])
def test_agents_and_controllers_are_adopted_back(start_job: StartJob, undisturbed: str, name: str) -> None:
    job = training(start_job)
    pids = job.rank_pids()
    before = job.kill(name)
    killed = time.monotonic()
    returned(job, name, before)
    job.wait_until(
        lambda status: (
            all(node["state"] == "active" for node in status["nodes"])
            and not any("cannot be heard" in line for line in status["blind"])
            and all(worker["pid"] for worker in status["workers"])
        ),
        f"{name} has taken up its work",
    )
    # 5 s on a quiet machine; this one may be shared with other tests
    assert time.monotonic() - killed <= 8
    assert job.rank_pids() == pids
    assert job.wait() == 0
    assert job.incidents() == []
    assert steps_done(job.folder) == {rank: list(range(1, 31)) for rank in range(RANKS)}, "no step was redone"
    assert digest(job.folder) == undisturbed


def test_agents_and_controller_at_once(start_job: StartJob, undisturbed: str) -> None:
    job = training(start_job)
    pids = job.rank_pids()
    for name in ("controller", "agent-node-0", "agent-node-1"):
        job.kill(name)
    job.wait_until(lambda status: all(worker["pid"] for worker in status["workers"]), "all is reported again")
    assert job.rank_pids() == pids
    assert job.wait() == 0
    assert job.incidents() == []
    assert digest(job.folder) == undisturbed


def test_a_lost_keeper_is_a_lost_node_whose_ranks_start_anew(start_job: StartJob, undisturbed: str) -> None:
    job = training(start_job)
    pids = job.rank_pids()
    job.kill("keeper-node-1")
    gone = [processes.identify(pid) for rank, pid in pids.items() if rank in (2, 3)]
    eventually(lambda: not any(gone and p and processes.is_alive(p) for p in gone), "its ranks die", within_s=5)
    assert job.wait() == 0
    (incident,) = job.incidents()
    assert (incident["cause"], incident["nodes"], incident["ranks"]) == ("node lost", ["node-1"], [2, 3])
    assert digest(job.folder) == undisturbed


def test_a_dead_zygote_is_replaced_and_training_goes_on(start_job: StartJob, undisturbed: str) -> None:
    job = training(start_job)
    (keeper,) = [process for name, process in job.processes().items() if name == "keeper-node-0"]
    ranks = set(job.rank_pids().values())
    zygote = eventually(lambda: _zygote(keeper, ranks), "the zygote", within_s=10)
    assert zygote is not None
    processes.send(zygote)
    job.kill_rank(1)
    assert job.wait() == 0
    (incident,) = job.incidents()
    assert incident["ranks"] == [1]
    assert digest(job.folder) == undisturbed


def _zygote(keeper: processes.ProcessId, ranks: set[int]) -> processes.ProcessId | None:
    """The keeper's oldest child that is no rank."""
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
    found = [processes.identify(int(pid)) for pid in children if int(pid) not in ranks]
    return min((process for process in found if process), key=lambda process: process.start_ticks, default=None)


def test_kill_9_of_run_stops_the_job_as_sigterm_does(start_job: StartJob) -> None:
    job = training(start_job, steps=400)
    everything = [*job.processes().values(), *filter(None, map(processes.identify, job.rank_pids().values()))]
    job.process.kill()
    eventually(
        lambda: not any(processes.is_alive(process) for process in everything),
        "nothing is left of the job",
        within_s=40,
        story=job.story,
    )
    result = job.result()
    assert result["state"] == "stopped"
    assert "is gone" in result["message"] and "is on disk" in result["message"]
    again = start_job("train.py", nproc=2, flags=NODES, args=["--steps", "400"], job=job.name)
    status = again.wait_for_attempt(2)
    assert status["resume"] and status["resume"] >= 4


def test_an_exit_without_an_agent_is_reported_later_as_what_it_was(start_job: StartJob) -> None:
    job = training(start_job, steps=60)
    pids = job.rank_pids()
    agent = processes.identify(job.processes()["agent-node-1"].pid)
    assert agent is not None
    # the agent cannot speak, its rank ends, and then the agent dies: only the keeper saw it
    processes.send(agent, 19)
    (job.folder / "exit-3").write_text("3")
    eventually(lambda: processes.identify(pids[3]) is None, "rank 3 has exited", within_s=15, story=job.story)
    processes.send(agent, 9)
    job.wait_for_attempt(2)
    job.wait_until(lambda status: status["state"] == "running", "training again")
    incident = job.incidents()[0]
    assert (incident["cause"], incident["ranks"], incident["status"]) == ("exit code 3", [3], 3)
