"""From a real port that loses its carrier to an incident, and a healthy machine that is accused of nothing."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from conftest import StartJob
from support import jobs, machines
from support.jobs import SCRIPTS, Json
from support.machines import Machine
from support.nvml import FakeNvml, build
from support.waiting import eventually

NO_MACHINES = machines.why_not()


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    if NO_MACHINES:
        pytest.skip(NO_MACHINES)
    with machines.pair(tmp_path, shared=False) as both:
        yield both


@pytest.mark.matrix
def test_a_port_that_is_down_is_an_alert_within_half_a_minute_and_training_goes_on(
    two_machines: tuple[Machine, Machine],
) -> None:
    whole = ["--nnodes=2", f"--rdzv-endpoint={two_machines[0].name}:29412"]
    name, environment = f"port-{jobs.SESSION}-{two_machines[0].namespace}", {"EVERTRAIN_TOKEN": "as both know"}
    first, second = (
        one.start(
            "train.py", nproc=1, flags=whole, args=["--steps", "160", "--sleep", "0.1"], job=name,
            environment=environment,
        )
        for one in two_machines
    )  # fmt: skip
    first.wait_for_step(20)
    assert first.incidents() == []

    def alerts() -> dict[str, tuple[str, str, str]]:
        return {one["nodes"][0]: (one["cause"], one["action"], one["evidence"][0]) for one in first.incidents()}

    began = time.monotonic()
    with two_machines[1].unplugged():
        eventually(lambda: two_machines[0].name in alerts(), "the first machine's alert", story=first.story)
        assert time.monotonic() - began < 30.0
        time.sleep(max(0.0, began + 16.0 - time.monotonic()))  # the outage itself: two looks of the other one
    # the other one could not say so before
    eventually(lambda: two_machines[1].name in alerts(), "the other machine's alert", story=first.story)
    for machine in two_machines:
        cause, action, evidence = alerts()[machine.name]
        assert (cause, action) == ("nic down", "tolerate")
        assert f"{machine.cable}: no carrier" in evidence
    assert (first.wait(), second.wait()) == (0, 0)
    assert [node["state"] for node in first.status()["nodes"]] == ["active", "active"]


def test_a_job_on_a_healthy_machine_is_told_of_nothing(start_job: StartJob) -> None:
    job = start_job("train.py", nproc=1, flags=["--local-nodes=2"], args=["--steps", "120", "--sleep", "0.1"])
    job.wait_for_step(100)  # sensors have looked twice by then
    assert job.wait() == 0
    assert job.incidents() == []
    logs = job.job_dir / "logs"
    assert "SignalRaised" not in (logs / "controller.log").read_text()
    agents = sorted(logs.glob("agent-*.log"))
    assert len(agents) == 2
    for log in agents:
        assert "Traceback" not in log.read_text() and "sensor" not in log.read_text()


XID = "NVRM: Xid (PCI:0000:19:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def test_a_gpu_that_falls_off_the_bus_costs_its_node_the_place_within_five_seconds(
    start_job: StartJob, tmp_path: Path
) -> None:
    for node in ("node-0", "node-1", "node-2"):
        (tmp_path / f"kmsg-{node}").touch()
    flags = ["--local-nodes", "3", "--nnodes", "2", "--standby", "1"]
    environment = {"EVERTRAIN_KMSG": f"{tmp_path}/kmsg-{{node}}"}
    args = ["--until", "over", "--steps", "100000"]
    job = start_job("train.py", nproc=1, flags=flags, args=args, environment=environment)
    job.wait_until(lambda status: {one["state"] for one in status["nodes"]} == {"active", "standby"}, "a standby")
    job.wait_for_step(3)
    with (tmp_path / "kmsg-node-1").open("a") as log:
        log.write(f"4,900,{time.monotonic_ns() // 1000},-;{XID}\n")
    began = time.monotonic()
    job.wait_until(
        lambda status: any((one["id"], one["state"]) == ("node-1", "evicted") for one in status["nodes"]), "eviction"
    )
    assert time.monotonic() - began < 5.0
    job.wait_until(lambda status: status["state"] == "running" and status["attempt"] == 2, "training goes on")
    (incident,) = job.incidents()
    assert (incident["action"], incident["nodes"]) == ("evict", ["node-1"])
    assert any("fallen off the bus" in line for line in incident["evidence"])
    (job.folder / "over").touch()
    assert job.wait() == 0


WITH_A_CHILD = """
import os, runpy, subprocess, sys
if os.environ["RANK"] == "0":
    child = subprocess.Popen(["sleep", "600"])
    with open("child.new", "w") as file:
        file.write(str(child.pid))
    os.replace("child.new", f"child-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the library in NVIDIA's place")
def test_a_start_waits_for_what_a_killed_rank_has_left_on_a_gpu_and_not_for_ever(
    start_job: StartJob, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(WITH_A_CHILD)
    (tmp_path / "config.yaml").write_text("agent: {gpu_wait_s: 4.0}\n")
    (tmp_path / "nvml").mkdir()
    nvml = FakeNvml(build(tmp_path / "nvml"), tmp_path, gpus=1)
    job = start_job(
        "script.py", flags=["--config", "config.yaml"], environment=nvml.environment,
        args=[SCRIPTS / "train.py", "--until", "over", "--steps", "100000"],
    )  # fmt: skip

    def leave_on_gpu(attempt: int) -> int:
        """The child of rank 0 computes, the sensor has seen it, and the rank is killed; its pid."""
        job.wait_for_attempt(attempt)
        child = int(job.wait_for_file(f"child-{attempt - 1}").read_text())
        nvml.set(0, pid=child)
        job.wait_until(lambda status: f"process {child}" in _last(status, "gpu"), "the sensor has seen it")
        job.kill_rank(0)
        return child

    child = leave_on_gpu(1)
    held = f"node-0: the start waits: process {child} of attempt 1 on GPU 0 (0000:10:00.0) is still there"
    assert job.wait_until(lambda status: held in status["message"], "it waits")["attempt"] == 1
    nvml.set(0, pid=0)
    job.wait_for_attempt(2)
    assert "gpu_occupied" not in (job.job_dir / "logs" / "controller.log").read_text()
    child = leave_on_gpu(2)
    job.wait_until(lambda status: f"process {child} of attempt 2 on GPU 0" in status["message"], "it waits again")
    # the driver goes on listing it, although nothing of it is left
    job.wait_for_attempt(3)
    log = (job.job_dir / "logs" / "controller.log").read_text()
    assert "gpu_occupied" in log and f"process {child} of attempt 2" in log
    (job.folder / "over").touch()
    assert job.wait() == 0


def _last(status: Json, sensor: str) -> str:
    return str(next((one["last"] for one in status["sensors"] if one["name"] == sensor), ""))


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the library in NVIDIA's place")
def test_a_slow_nvml_and_an_exporter_that_has_gone_are_blind_and_nothing_is_done(
    start_job: StartJob, tmp_path: Path
) -> None:
    (tmp_path / "nvml").mkdir()
    nvml = FakeNvml(build(tmp_path / "nvml"), tmp_path, gpus=1)
    with exporter() as url:
        environment = {**nvml.environment, "EVERTRAIN_DCGM_URL": url}
        job = start_job("train.py", nproc=1, args=["--until", "over", "--steps", "100000"], environment=environment)
        both = {"gpu", "dcgm"}
        job.wait_until(lambda status: both <= _sensors(status, "ok"), "both see")
        job.wait_for_step(1)
    nvml.set(0, delay_ms=3200)
    status = job.wait_until(lambda status: both <= _sensors(status, "blind"), "both are blind")
    said = "\n".join(status["blind"])
    assert "node-0: gpu: " in said and "node-0: dcgm: " in said
    job.wait_for_step(status["step"] + 100)
    (job.folder / "over").touch()
    assert job.wait() == 0
    assert job.incidents() == [] and job.status()["attempt"] == 1
    assert "SignalRaised" not in (job.job_dir / "logs" / "controller.log").read_text()


def _sensors(status: Json, state: str) -> set[str]:
    return {one["name"] for one in status["sensors"] if one[state]}


@contextmanager
def exporter() -> Iterator[str]:
    """Answers as dcgm-exporter does, until the block is left."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{gpu="0",UUID="GPU-0000"} 0.5\n')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
        server.shutdown()
