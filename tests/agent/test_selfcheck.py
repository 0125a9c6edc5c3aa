"""A node tests itself: all checks pass where all is well; where something is broken, that one fails and says so."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent import selfcheck, sensing
from evertrain.agent.selfcheck import SelfChecks
from evertrain.model.copies import Peer
from evertrain.model.report import Check, Desired
from evertrain.model.sensing import Seen, Sign
from evertrain.model.spec import AgentSpec

READY = {"starter": {"wanted": "zygote", "mode": "zygote", "state": "ready", "reason": ""}}


def spec(folder: Path, *, disk: str = "", python: str = sys.executable) -> AgentSpec:
    return AgentSpec(
        job="job", run_id="job-1", node="node-2", node_dir=str(folder / "shm"), disk_dir=disk or str(folder / "disk"),
        log_root="", controller_url="", token_file="", fired_dir="", python=python,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path


@pytest.fixture
def peer() -> Iterator[Peer]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Peer("node-0", "127.0.0.1", listener.getsockname()[1])


def starter(**changed: str) -> dict[str, Any]:
    return {"starter": {**READY["starter"], **changed}}


async def checks(
    of: AgentSpec, *peers: Peer, keeper: Callable[[], dict[str, Any] | None] = lambda: READY
) -> dict[str, Check]:
    return {check.name: check for check in await selfcheck.run(of, keeper, peers)}


async def only_failure(of: AgentSpec, *peers: Peer, **more: Any) -> Check:
    """The one check that has not passed: nothing else suffers from what is wrong with it."""
    (found,) = [check for check in (await checks(of, *peers, **more)).values() if not check.passed]
    return found


async def test_a_sound_node_passes_everything_and_keeps_nothing(folder: Path, peer: Peer) -> None:
    found = await checks(spec(folder), peer)
    machine = ["shared memory", "disk", "memory", "cpu", "host", "gpu", "network"]
    assert list(found) == ["keeper", *machine, "reach"]
    assert "host: " in found["host"].detail and "gpu: " in found["gpu"].detail
    assert [check for check in found.values() if not check.passed] == []
    assert all(check.detail for check in found.values())
    assert list((folder / "shm").iterdir()) == list((folder / "disk").iterdir()) == []


async def test_where_there_is_nobody_to_reach_nothing_is_said_about_it(folder: Path) -> None:
    assert "reach" not in await checks(spec(folder))


async def test_a_disk_that_cannot_be_written_fails(folder: Path) -> None:
    (folder / "disk").write_text("a file where the folder should be")
    found = await only_failure(spec(folder))
    assert found.name == "disk" and f"{folder}/disk cannot be written" in found.detail and "look at" in found.detail


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_folder_without_rights_fails(folder: Path) -> None:
    (folder / "shm").chmod(0o500)
    assert (await only_failure(spec(folder))).name == "shared memory"


async def test_a_file_system_that_refuses_writes_fails(folder: Path) -> None:
    found = await only_failure(spec(folder, disk="/proc/self"))
    assert found.name == "disk" and "/proc/self cannot be written" in found.detail


async def test_shared_memory_that_is_not_there_fails(folder: Path) -> None:
    (folder / "shm").rmdir()
    found = await only_failure(spec(folder))
    assert found.name == "shared memory" and "No such file" in found.detail


async def test_shared_memory_without_room_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "MIN_FREE_FRACTION", 1.1)
    found = await only_failure(spec(folder))
    assert found.name == "shared memory" and "MiB free" in found.detail and "evertrain clean" in found.detail


async def test_a_disk_that_returns_something_else_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lose_a_bit(descriptor: int) -> None:
        if "/disk/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            os.pwrite(descriptor, b"\0\0", 4097)

    monkeypatch.setattr(os, "fsync", lose_a_bit)
    found = await only_failure(spec(folder))
    assert found.name == "disk" and "reads differently" in found.detail


async def test_a_disk_that_never_answers_fails_in_bounded_time(folder: Path) -> None:
    (folder / "disk").mkdir()
    os.mkfifo(folder / "disk" / "self-check")  # opening it for writing waits for a reader
    began = time.monotonic()
    with pytest.raises(selfcheck.Wrong, match="no answer within"):
        await selfcheck._in_thread(lambda: selfcheck._disk(str(folder / "disk")), 0.5)
    assert time.monotonic() - began < 5.0
    with open(folder / "disk" / "self-check", "rb") as reader:
        reader.read(1)  # the thread goes on, and fails


async def test_memory_and_processor_that_compute_wrongly_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "_KNOWN", (1, "0x1p+0"))
    found = await only_failure(spec(folder))
    assert found.name == "cpu" and "instead of" in found.detail


async def test_the_fixed_computation_is_quick() -> None:
    began = time.thread_time()
    selfcheck._cpu()
    assert time.thread_time() - began < 1.0


async def test_a_port_that_nobody_listens_at_fails_by_name(folder: Path, peer: Peer) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = Peer("node-1", "127.0.0.1", unused.getsockname()[1])
        found = await only_failure(spec(folder), peer, dead)
    assert found.name == "reach" and f"node-1 (127.0.0.1:{dead.port})" in found.detail
    assert "node-0" not in found.detail


async def test_a_keeper_that_does_not_answer_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "START_LIMIT_S", 0.2)
    found = await only_failure(spec(folder), keeper=lambda: None)
    assert found.name == "keeper" and "has not answered" in found.detail


async def test_imports_are_waited_for_but_not_for_ever(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([None, starter(state="starting"), READY])
    assert (await checks(spec(folder), keeper=lambda: next(looks)))["keeper"].passed
    monkeypatch.setattr(selfcheck, "START_LIMIT_S", 0.2)
    dying = starter(state="starting", reason="the zygote is being started again: it ended with exit code 1")
    found = await only_failure(spec(folder), keeper=lambda: dying)
    assert found.name == "keeper" and "ended with exit code 1" in found.detail


async def test_a_start_that_had_to_be_another_one_passes_if_it_can_work(folder: Path) -> None:
    spawned = starter(mode="spawn", reason="line 3 of train.py sets OMP_NUM_THREADS before it imports torch")
    found = (await checks(spec(folder), keeper=lambda: spawned))["keeper"]
    assert found.passed and "instead of zygote: line 3 of train.py" in found.detail


async def test_a_start_that_cannot_work_fails(folder: Path) -> None:
    broken = folder / "python"
    broken.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    broken.chmod(0o700)
    spawned = starter(mode="spawn", reason="torch cannot be imported: No module named torch")
    found = await only_failure(spec(folder, python=str(broken)), keeper=lambda: spawned)
    assert found.name == "keeper" and "No module named torch" in found.detail
    program = starter(wanted="spawn", mode="spawn")
    found = await only_failure(spec(folder, python=str(folder / "none")), keeper=lambda: program)
    assert found.name == "keeper" and "cannot be started" in found.detail


async def test_a_check_that_breaks_is_a_failed_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> str:
        raise KeyError("x")

    monkeypatch.setattr(selfcheck, "_memory", broken)
    found = await only_failure(spec(folder))
    assert found.name == "memory" and "the check itself failed: KeyError" in found.detail


# -- what `evertrain check` looks at -----------------------------------------------------------------------------------


class Fake:
    """A sensor that sees what it is told to."""

    period_s = 0.05

    def __init__(self, name: str, seen: Seen, *, hangs: bool = False) -> None:
        self.name, self.seen, self.hangs = name, seen, hangs
        self.limit_s = 0.2 if hangs else 20.0
        self.looks = 0
        self.over = threading.Event()

    def look(self, now: float) -> Seen:
        self.looks += 1
        if self.hangs:
            self.over.wait(30)
        return self.seen


def sign(kind: str, evidence: str) -> Sign:
    return Sign(key=kind, kind=kind, evidence=evidence, time=0.0)


WELL = Seen(last="all well")
LOST = Seen(signs=(sign("gpu_lost", "GPU 3 does not answer"),), last="7 GPUs")
HOT = Seen(signs=(sign("gpu_hot", "GPU 3: 92 C"),), last="8 GPUs")


@pytest.mark.parametrize(
    ("seen", "passed", "is_odd", "detail"),
    [
        (WELL, True, False, "gpu: all well; dcgm: none here: no exporter"),
        (Seen(absent="no NVIDIA driver on this node"), True, False, "none here: no NVIDIA driver"),
        (HOT, True, True, "gpu: GPU 3: 92 C"),
        (Seen(blind="NVML does not start"), True, True, "gpu: cannot see: NVML does not start"),
        (LOST, False, False, "gpu: GPU 3 does not answer; see `evertrain check gpu` on this machine"),
    ],
    ids=["well", "absent", "odd", "blind", "broken"],
)
async def test_only_what_is_broken_for_certain_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, seen: Seen, passed: bool, is_odd: bool, detail: str
) -> None:
    sensors = [Fake("gpu", seen), Fake("dcgm", Seen(absent="no exporter")), Fake("host", WELL), Fake("network", WELL)]
    kernel = Fake("kernel", LOST)
    monkeypatch.setattr(sensing, "sensors_of", lambda spec: [*sensors, kernel])
    found = await checks(spec(folder))
    assert (found["gpu"].passed, found["gpu"].is_odd) == (passed, is_odd) and detail in found["gpu"].detail
    assert {name for name, check in found.items() if not check.passed} == (set() if passed else {"gpu"})
    assert [one.looks for one in sensors] == [1, 1, 1, 1], "one look each: it is cheap"
    assert kernel.looks == 0, "a fifo can be read by one only, and that is the agent's own sensor"


async def test_a_sensor_that_hangs_passes_and_is_not_asked_again_before_it_is_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Fake("gpu", LOST, hangs=True)
    monkeypatch.setattr(sensing, "sensors_of", lambda spec: [hanging])
    inspection = selfcheck.inspection_of(spec(folder))
    for _ in range(3):
        (gpu,) = [one for one in await selfcheck.run(spec(folder), None, (), inspection) if one.name == "gpu"]
        assert gpu.passed and gpu.is_odd and "no answer within 0.2 s" in gpu.detail
    assert hanging.looks == 1
    hanging.hangs = False
    hanging.over.set()

    async def fails() -> bool:
        return any(
            one.name == "gpu" and not one.passed for one in await selfcheck.run(spec(folder), None, (), inspection)
        )

    async with asyncio.timeout(20.0):
        while hanging.looks < 2:
            failed = await fails()
    assert failed, "it is back, and what it sees counts"


async def test_the_self_checks_sensors_leave_the_agents_own_alone(folder: Path) -> None:
    inspection = selfcheck.inspection_of(spec(folder))
    for group in ("host", "gpu", "network"):
        inspection.look(group)
    assert list((folder / "shm").iterdir()) == []


async def test_a_node_that_wants_to_join_tests_its_machine_alone_and_quickly(folder: Path) -> None:
    changed = asyncio.Event()
    made = SelfChecks(spec(folder), lambda: None, changed.set)
    began = time.monotonic()
    made.obey(Desired(job="job", term=1, check=-1))
    assert await answered(made, changed) == -1
    assert time.monotonic() - began < 5.0, "nobody waits for a keeper whose imports go on"
    assert made.report is not None
    machine = ["shared memory", "disk", "memory", "cpu", "host", "gpu", "network"]
    assert [check.name for check in made.report.checks] == machine and made.report.failed == ()


async def answered(made: SelfChecks, changed: asyncio.Event) -> int:
    await asyncio.wait_for(changed.wait(), 30.0)
    changed.clear()
    assert made.report is not None
    return made.report.number


async def test_each_number_is_answered_once(folder: Path) -> None:
    changed = asyncio.Event()
    made = SelfChecks(spec(folder), lambda: READY, changed.set)
    made.obey(Desired(job="job", term=1))
    assert made.report is None
    for number in (1, 2):
        order = Desired(job="job", term=1, check=number)
        made.obey(order)
        made.obey(order)
        assert await answered(made, changed) == number
        made.obey(order)
        assert made._running is None
    assert made.report is not None and made.report.failed == ()


async def test_a_self_check_that_breaks_as_a_whole_is_answered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(selfcheck, "run", broken)
    changed = asyncio.Event()
    made = SelfChecks(spec(folder), lambda: READY, changed.set)
    made.obey(Desired(job="job", term=1, check=4))
    assert await answered(made, changed) == 4
    assert made.report is not None
    (check,) = made.report.failed
    assert check.name == "self-check" and "can't start new thread" in check.detail
