"""One job on two machines: each has a network, a name and shared memory of its own."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import InPeace, StartJob
from support import jobs, machines, training
from support.machines import Machine

Two = tuple[Machine, Machine]
PORT = 29411
EACH = 2
"""Ranks on each machine."""

NO_MACHINES = machines.why_not()


@pytest.fixture(scope="module")
def four_undisturbed(in_peace: InPeace) -> str:
    """What train.py ends with on four ranks, on one machine and in peace."""
    return training.digest(in_peace("train.py", "--steps", "40", nproc=2 * EACH))


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[Two]:
    """With one file system."""
    if NO_MACHINES:
        pytest.skip(NO_MACHINES)
    with machines.pair(tmp_path) as both:
        yield both


@pytest.fixture
def two_apart(tmp_path: Path) -> Iterator[Two]:
    """Each with a folder of its own."""
    if NO_MACHINES:
        pytest.skip(NO_MACHINES)
    with machines.pair(tmp_path, shared=False) as both:
        yield both


def start(
    two: Two,
    *flags: str,
    steps: int = 40,
    sleep: float = 0.05,
    job: str = "",
    environment: dict[str, str] | None = None,
) -> tuple[jobs.Job, jobs.Job]:
    """The same command on both."""
    name = job or f"two-{jobs.SESSION}-{two[0].namespace}"
    whole = ["--nnodes=2", f"--rdzv-endpoint={two[0].name}:{PORT}", *flags]
    args = ["--steps", str(steps), "--sleep", str(sleep)]
    first, second = (
        one.start("train.py", nproc=EACH, flags=whole, args=args, job=name, environment=environment) for one in two
    )
    return first, second


def test_kill_and_hang_on_both_machines_end_in_the_same_bits(
    two_machines: Two, four_undisturbed: str, tmp_path: Path
) -> None:
    config = tmp_path / "quick.yaml"
    config.write_text("hang: {still_limit_s: 2 s, suspect_s: 1 s}\n")
    faults = ["kill:rank=0@step=5", "kill:rank=3@step=15", "hang:rank=2@step=25"]
    first, second = start(two_machines, f"--config={config}", *(f"--inject={fault}" for fault in faults))
    assert (first.wait(), second.wait()) == (0, 0)
    incidents = first.incidents()
    assert [incident["ranks"] for incident in incidents] == [[0], [3], [2]]
    assert [incident["nodes"] for incident in incidents] == [[two_machines[i].name] for i in (0, 1, 1)]
    assert all(incident["first_new_step"] is not None for incident in incidents)
    assert incidents[2]["cause"] == "hang (still)"
    assert training.digest(tmp_path) == four_undisturbed
    # each shows the output of its own ranks; what happens to the job is said once
    assert "injected fault kill:rank=0" in first.errors
    assert "injected fault kill:rank=3" not in first.errors
    assert "injected fault kill:rank=3" in second.errors
    assert f"job {first.name} done" in first.errors
    assert "incident" not in second.errors
    assert [node["id"] for node in first.status()["nodes"]] == [one.name for one in two_machines]


@pytest.mark.matrix
def test_a_link_that_is_down_for_20_s_costs_no_more_than_a_restart(two_apart: Two, four_undisturbed: str) -> None:
    first, second = start(two_apart, environment={"EVERTRAIN_TOKEN": "as both know"})
    first.wait_for_step(10)
    # a machine whose folder is its own can be asked as well
    assert second.status()["attempt"] == 1
    with two_apart[1].unplugged():
        time.sleep(20)  # the outage itself, not a wait for something
    assert (first.wait(), second.wait()) == (0, 0)
    status = first.status()
    assert status["attempt"] <= 2
    assert [node["state"] for node in status["nodes"]] == ["active", "active"]
    digests = {training.digest(one.folder) for one in two_apart}
    assert digests == {four_undisturbed}


@pytest.mark.parametrize("crashed", [pytest.param(0, marks=pytest.mark.matrix), 1])
def test_without_one_node_the_other_ends_soon_and_nothing_is_lost(
    two_apart: Two, four_undisturbed: str, tmp_path: Path, crashed: int
) -> None:
    config = tmp_path / "impatient.yaml"
    config.write_text("machines: {lost_s: 3 s}\nrestart: {node_return_s: 3 s}\n")
    flags, environment = [f"--config={config}"], {"EVERTRAIN_TOKEN": "as both know"}
    both = start(two_apart, *flags, environment=environment)
    both[0].wait_for_step(10)
    two_apart[crashed].crash()
    began = time.monotonic()
    survivor = both[1 - crashed]
    assert survivor.wait(60) == 1
    assert time.monotonic() - began < 40
    if crashed == 0:
        assert "the first node has not been reached" in survivor.errors
        assert "of this node are on disk" in survivor.errors
    else:
        assert f"{two_apart[1].name}: no word from its agent" in survivor.errors
        (incident,) = survivor.incidents()
        assert (incident["cause"], incident["nodes"]) == ("node lost", [two_apart[1].name])
    both = start(two_apart, *flags, job=survivor.name, environment=environment)
    assert [job.wait() for job in both] == [0, 0]
    assert "resumed from step" in both[0].errors
    assert {training.digest(one.folder) for one in two_apart} == {four_undisturbed}


def test_a_drill_that_takes_a_machine_away_takes_its_command_along(two_machines: Two) -> None:
    first, second = start(two_machines, "--grace=4", "--inject=node-loss:node=1@step=10")
    assert second.wait(60) == 1
    assert "goes on without this machine, which a drill has taken away" in second.errors
    first.interrupt(signal.SIGINT)
    assert first.wait(60) == 130
    assert first.status()["state"] == "stopped"


def test_a_signal_on_either_machine_stops_the_job_and_keeps_its_step(two_machines: Two, four_undisturbed: str) -> None:
    first, second = start(two_machines)
    first.wait_for_step(10)
    second.interrupt(signal.SIGINT)
    assert (first.wait(), second.wait()) == (130, 130)
    assert f"stopped by SIGINT on {two_machines[1].name}" in first.errors
    assert "is on disk, the same command resumes there" in second.errors
    # who comes back first does not matter: a node keeps the ranks whose checkpoints it has
    first, second = start(two_machines, job=first.name)
    assert (first.wait(), second.wait()) == (0, 0)
    assert "resumed from step" in first.errors
    assert training.digest(two_machines[0].folder) == four_undisturbed


@pytest.mark.matrix
def test_the_token_is_asked_for_with_the_line_to_paste(two_apart: Two, tmp_path: Path) -> None:
    first, second = start(two_apart, steps=3)
    assert second.wait() == 1
    token = first.job_dir / "token"
    assert f"export EVERTRAIN_TOKEN=$(ssh {two_apart[0].name} cat {token})" in second.errors
    secret = tmp_path / "secret"
    flags = ["--nnodes=2", f"--rdzv-endpoint={two_apart[0].name}:{PORT}", f"--token-file={secret}"]
    secret.write_text("not the right one\n")
    wrong = two_apart[1].start("train.py", nproc=EACH, flags=flags)
    assert wrong.wait() == 1
    assert "this node's token is not the job's" in wrong.errors
    secret.write_bytes(token.read_bytes())
    right = two_apart[1].start("train.py", nproc=EACH, flags=flags, args=["--steps", "3"], job=first.name)
    assert (first.wait(), right.wait()) == (0, 0)


def test_srun_needs_no_flags(two_machines: Two) -> None:
    """What Slurm tells its tasks is enough; the order in which they come is not."""
    found = []
    for number, one in reversed(list(enumerate(two_machines))):
        environment = {
            "SLURM_JOB_ID": "17", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_NODEID": str(number), "SLURMD_NODENAME": one.name,
            "SLURM_STEP_NODELIST": f"{two_machines[0].name},{two_machines[1].name}",
        }  # fmt: skip
        name = f"srun-{jobs.SESSION}"
        found.append(one.start("train.py", nproc=EACH, args=["--steps", "3"], job=name, environment=environment))
    assert [job.wait() for job in found] == [0, 0]
    placed = {worker["rank"]: worker["node"] for worker in found[0].status()["workers"]}
    assert placed == {rank: two_machines[rank // EACH].name for rank in range(2 * EACH)}


@pytest.mark.matrix
def test_two_jobs_of_two_nodes_each_on_one_machine(start_job: StartJob) -> None:
    """Whoever comes first at a port serves the job; the other one joins, although the host is the same."""
    found = []
    for port in (29421, 29422):
        flags = ["--nnodes=2", f"--rdzv-endpoint=localhost:{port}", "--rdzv-backend=c10d"]
        name = f"neighbours-{jobs.SESSION}-{port}"
        for _ in range(2):
            found.append(start_job("train.py", folder=str(port), nproc=1, flags=flags, args=["--steps", "3"], job=name))
    assert [job.wait() for job in found] == [0, 0, 0, 0]
    for job in (found[0], found[2]):
        nodes = [node["id"] for node in job.status()["nodes"]]
        assert nodes[1] == f"{nodes[0]}-2"
