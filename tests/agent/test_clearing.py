"""Before a start nothing of the old attempt is on a GPU: the real binding on a library in NVIDIA's place."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent.clearing import ANSWER_S, Clearing, find_process
from evertrain.keeper.children import start_ticks
from evertrain.model.report import Desired
from evertrain.model.sensing import GpuReading
from support.nvml import FakeNvml, build
from support.waiting import eventually

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to build the library in NVIDIA's place")

AGENT = """
import asyncio, json, sys, time
from evertrain.agent.clearing import Clearing
from evertrain.detect.gpu import GpuRules
from evertrain.model.report import Desired
from evertrain.observe.sensors.gpu import GpuSensor

async def main():
    sensor, changed = GpuSensor(GpuRules()), asyncio.Event()
    sensor.limit_s = 1.0
    clearing = Clearing(sensor, changed.set)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        if asked["looks"]:
            await asyncio.to_thread(sensor.look, time.monotonic())
        before = time.perf_counter()
        clearing.look(asked["state"], Desired(job="job", term=1, gpu_wait_s=asked["limit_s"]))
        took, began, said = time.perf_counter() - before, time.monotonic(), [clearing.held]
        while clearing.held:
            changed.clear()
            await changed.wait()
            said.append(clearing.held)
        signs = [(sign.kind, sign.device, sign.evidence) for sign in clearing.signs]
        answer = {"said": said, "waited_s": time.monotonic() - began, "signs": signs, "took_s": took}
        print(json.dumps(answer), flush=True)

asyncio.run(main())
"""

Json = dict[str, Any]


class Agent:
    """An agent's process, with the sensor and what waits for it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def tell(self, state: Json, *, looks: bool = False, limit_s: float = 30.0) -> Json:
        """What is said until the node is ready."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"state": state, "looks": looks, "limit_s": limit_s}).encode() + b"\n")
        self._process.stdin.flush()
        answer: Json = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Rank:
    """A process in a session of its own, with a child."""

    def __init__(self) -> None:
        command = ["sh", "-c", "sleep 300 & echo $!; wait"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        assert self._process.stdout is not None
        self.pid, self.child = self._process.pid, int(self._process.stdout.readline())
        self._process.stdout.close()
        self.ticks = start_ticks(self.pid)

    def end(self, *, with_child: bool = True) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()
        if with_child:
            self.end_child()

    def end_child(self) -> None:
        try:
            os.kill(self.child, signal.SIGKILL)
        except ProcessLookupError:
            return
        eventually(lambda: (start_ticks(self.child)) == 0 or _is_dead(self.child), "the child is gone")

    def state(self, phase: str, attempt: int = 1) -> Json:
        """As the keeper tells it, with the attempt that waits."""
        rank = {"pid": self.pid, "start_ticks": self.ticks, "state": phase}
        return {
            "attempts": {
                str(attempt): {"phase": phase, "ranks": {"0": rank}},
                str(attempt + 1): {"phase": "prepared", "ranks": {"0": {"pid": 1, "start_ticks": 1}}},
            }
        }


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(library: Path, tmp_path: Path) -> FakeNvml:
    return FakeNvml(library, tmp_path)


@pytest.fixture
def start() -> Iterator[Callable[[dict[str, str]], Agent]]:
    started: list[Agent] = []

    def start(environment: dict[str, str]) -> Agent:
        started.append(Agent(environment))
        return started[-1]

    yield start
    for agent in started:
        agent.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    try:
        made.end()
    except ProcessLookupError:
        made.end_child()


Start = Callable[[dict[str, str]], Agent]


@needs_gcc
def test_a_rank_that_the_driver_still_lists_is_waited_for_until_it_has_gone(
    nvml: FakeNvml, start: Start, rank: Rank
) -> None:
    agent = start(nvml.environment)
    nvml.set(1, pid=rank.pid)
    assert agent.tell(rank.state("running"), looks=True)["said"] == [""], "while it runs nothing waits"
    rank.end()
    threading.Timer(1.0, lambda: nvml.set(1, pid=0)).start()
    told = agent.tell(rank.state("ended"))
    assert 0.9 < told["waited_s"] < 3.0
    asked, held, ready = told["said"]
    assert asked and ready == ""
    assert held == f"process {rank.pid} of attempt 1 on GPU 1 (0000:11:00.0) is still there"
    assert told["signs"] == []
    assert agent.tell(rank.state("ended"))["said"] == [""], "each end once"


@needs_gcc
@pytest.mark.parametrize("is_gone", [False, True], ids=["orphan", "gone from /proc"])
def test_a_child_of_a_rank_is_waited_for_and_at_the_limit_it_is_said(
    nvml: FakeNvml, start: Start, rank: Rank, is_gone: bool
) -> None:
    agent = start(nvml.environment)
    nvml.set(0, pid=rank.child)
    agent.tell(rank.state("running"))
    agent.tell(rank.state("running"), looks=True)
    agent.tell(rank.state("running"))
    rank.end(with_child=is_gone)
    told = agent.tell(rank.state("ended"), limit_s=0.6)
    assert 0.5 < told["waited_s"] < 2.0
    ((kind, device, evidence),) = told["signs"]
    assert (kind, device) == ("gpu_occupied", "GPU 0 (0000:10:00.0)")
    assert f"process {rank.child} of attempt 1" in evidence and "the next attempt starts" in evidence
    again = agent.tell({"attempts": {"2": {**rank.state("ended")["attempts"]["1"]}}}, limit_s=20.0)
    assert again["waited_s"] < ANSWER_S, "what was given up once is not waited for again"


@needs_gcc
def test_a_rank_that_is_dead_but_not_reaped_is_waited_for(nvml: FakeNvml, start: Start, rank: Rank) -> None:
    agent = start(nvml.environment)
    nvml.set(0, pid=rank.pid)
    agent.tell(rank.state("running"), looks=True)
    os.kill(rank.pid, signal.SIGKILL)
    eventually(lambda: _is_dead(rank.pid), "a zombie")
    assert len(agent.tell(rank.state("ended"), limit_s=0.3)["signs"]) == 1


@needs_gcc
def test_strangers_are_not_waited_for(nvml: FakeNvml, start: Start, rank: Rank) -> None:
    agent = start(nvml.environment)
    other = Rank()
    nvml.set(0, pid=other.pid)
    nvml.set(0, pid=other.child)
    nvml.set(1, pid=1)
    nvml.set(1, pid=2**22 - 1)
    agent.tell(rank.state("running"), looks=True)
    rank.end()
    told = agent.tell(rank.state("ended"))
    assert told["waited_s"] < ANSWER_S and told["said"][-1] == "" and len(told["said"]) == 2
    assert told["signs"] == []
    other.end()


@needs_gcc
def test_a_number_that_is_another_processes_now_is_a_stranger(nvml: FakeNvml, start: Start, rank: Rank) -> None:
    agent = start(nvml.environment)
    nvml.set(0, pid=rank.pid)
    before = rank.state("running")
    before["attempts"]["1"]["ranks"]["0"]["start_ticks"] -= 1
    agent.tell(before, looks=True)
    before["attempts"]["1"]["phase"] = "ended"
    # it is the leader of a session of its own number, and yet not the rank that had this number
    told = agent.tell(before, limit_s=5.0)
    assert told["waited_s"] < ANSWER_S and told["signs"] == []


@needs_gcc
def test_a_library_that_hangs_holds_nobody_up(nvml: FakeNvml, start: Start, rank: Rank) -> None:
    agent = start(nvml.environment)
    nvml.set(0, pid=rank.pid)
    agent.tell(rank.state("running"), looks=True)
    rank.end()
    nvml.set(0, list_delay_ms=5000)
    told = agent.tell(rank.state("ended"))
    assert ANSWER_S <= told["waited_s"] < ANSWER_S + 1.0 and told["signs"] == []
    # nobody asks again beside the question that is still open
    assert agent.tell({"attempts": {"2": rank.state("ended")["attempts"]["1"]}})["waited_s"] < 0.5


@needs_gcc
def test_a_sensor_that_was_slow_is_not_even_asked(nvml: FakeNvml, start: Start, rank: Rank) -> None:
    agent = start(nvml.environment)
    nvml.set(0, pid=rank.pid)
    nvml.set(0, list_delay_ms=1100)
    agent.tell(rank.state("running"), looks=True)
    told = agent.tell(rank.state("ended"))
    assert told["said"] == [""] and told["waited_s"] < 0.1


def test_without_a_gpu_an_end_costs_nothing(start: Start, rank: Rank) -> None:
    agent = start({"LD_LIBRARY_PATH": ""})
    agent.tell(rank.state("running"), looks=True)
    told = agent.tell(rank.state("ended"))
    assert told["said"] == [""], "ready in the same report that says that its ranks have ended"
    assert told["took_s"] < 0.001


class Gpus:
    """A sensor that has looked, and says who is there."""

    can_be_asked = True

    def __init__(self, *pids: int) -> None:
        self.readings = [GpuReading(index=0, uuid="GPU-0", processes=pids)]
        self.pids = pids

    def computing(self) -> dict[int, tuple[str, ...]]:
        return dict.fromkeys(self.pids, ("GPU 0",))


async def test_a_sensor_that_breaks_holds_nobody_up(rank: Rank) -> None:
    class Broken(Gpus):
        def computing(self) -> dict[int, tuple[str, ...]]:
            raise RuntimeError("no")

    woken = asyncio.Event()
    clearing = Clearing(Broken(rank.pid), woken.set)
    clearing.look(rank.state("ended"), Desired(job="job", term=1))
    assert clearing.held
    await asyncio.wait_for(woken.wait(), 5.0)
    assert clearing.held == "" and clearing.signs == ()


async def test_an_attempt_that_ends_while_another_one_is_waited_for_is_waited_for_too(rank: Rank) -> None:
    gpus, woken = Gpus(rank.pid), asyncio.Event()
    clearing, second = Clearing(gpus, woken.set), Rank()
    try:
        order = Desired(job="job", term=1)
        clearing.look(rank.state("ended"), order)
        both = {"attempts": {**rank.state("ended")["attempts"], "2": second.state("ended")["attempts"]["1"]}}
        clearing.look(both, order)
        gpus.pids = (second.pid,)
        async with asyncio.timeout(5.0):
            while f"process {second.pid} of attempt 2" not in clearing.held:
                await asyncio.sleep(0.01)
            gpus.pids = ()
            while clearing.held:
                await asyncio.sleep(0.01)
    finally:
        second.end()


def test_who_is_above_a_process_is_read_from_proc(rank: Rank) -> None:
    found = find_process(rank.child)
    assert found is not None and found.session == rank.pid
    assert found.above[0] == (rank.pid, rank.ticks) and os.getpid() in [one.pid for one in found.above]
    rank.end()
    assert find_process(rank.pid) is None
