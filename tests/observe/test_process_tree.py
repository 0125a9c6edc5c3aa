"""Real processes, as the kernel tells of them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.model.stacks import Frame, Thread
from evertrain.observe import process_tree
from evertrain.observe.process_tree import Process
from support import dead_disk, still
from support.waiting import eventually


@pytest.fixture
def start() -> Iterator[still.Start]:
    with still.processes() as start:
        yield start


def stack(function: str, file: str) -> tuple[Thread, ...]:
    return (Thread((Frame("sleep", "time"), Frame(function, file, 3)), is_main=True),)


def test_a_rank_and_all_below_it(start: still.Start) -> None:
    process = start(still.FAMILY)
    found = process_tree.processes(3, process.pid)
    assert [one.rank for one in found] == [3] * 4
    assert found[0].pid == process.pid and found[0].kind == "trainer" and found[0].is_python
    assert [one.kind for one in found[1:]] == ["helper"] * 3, "names tell nothing of forks"
    (sleep,) = [one for one in found if not one.is_python]
    assert sleep.command == "sleep 600" and sleep.waits_in == "clock_nanosleep"


def test_a_fork_is_told_by_its_stack() -> None:
    process = Process(rank=0, pid=1, kind="helper", state="", waits_in="", is_python=True, command="train.py")
    kind = process_tree.kind
    assert kind(process, stack("_worker_loop", "torch/utils/data/_utils/worker.py")) == "loader"
    assert kind(process, stack("_MapDatasetFetcher.fetch", "torch/utils/data/_utils/fetch.py")) == "loader"
    assert kind(process, stack("save", "torch/distributed/checkpoint/_async_process_executor.py")) == "checkpoint"
    assert kind(process, stack("write_out", "megatron/training/checkpointing.py")) == "checkpoint"
    assert kind(process, stack("save_checkpoint", "<string>")) == "checkpoint"
    assert kind(process, stack("main", "multiprocessing/resource_tracker.py")) == "helper"
    assert kind(process, ()) == "helper"


def test_what_is_stopped_is_and_one_stopped_thread_does_not_make_it_so(start: still.Start) -> None:
    process = start(still.SLEEPER)
    assert process_tree.own(0, process.pid).state == ""
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: process_tree.own(0, process.pid).state == "stopped", "it is stopped", within_s=10)
    process.send_signal(signal.SIGCONT)
    eventually(lambda: process_tree.own(0, process.pid).state == "", "it goes on", within_s=10)


def test_a_frozen_control_group_is_stopped_too(start: still.Start) -> None:
    process = start(still.SLEEPER)
    group = Path("/sys/fs/cgroup/freezer") / f"evertrain-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(process.pid))
    except OSError as error:
        pytest.skip(f"no freezer here: {error}")
    try:
        (group / "freezer.state").write_text("FROZEN")
        eventually(lambda: process_tree.own(0, process.pid).state == "stopped", "it is frozen", within_s=10)
    finally:
        (group / "freezer.state").write_text("THAWED")
        process.kill()
        process.wait()
        group.rmdir()


def test_on_a_dead_disk(start: still.Start, tmp_path: Path) -> None:
    folder = tmp_path / "dead"
    folder.mkdir()
    try:
        with dead_disk.mounted(folder) as disk:
            process = start(f"print(flush=True); open({str(disk.file)!r}).read()")
            eventually(
                lambda: process_tree.own(0, process.pid).state == "uninterruptible",
                "it waits for the disk",
                within_s=20,
            )
            seen = process_tree.own(0, process.pid)
            assert seen.is_python and (seen.waits_in == "read" or "fuse" in seen.waits_in or "wait" in seen.waits_in)
            disk.free()
            process.wait(10)
    except OSError as error:
        pytest.skip(f"no file system of one's own here: {error}")


def test_who_has_ended(start: still.Start) -> None:
    process = subprocess.Popen(["true"])
    eventually(lambda: process_tree.own(7, process.pid).state == "ended", "it has ended", within_s=10)
    assert [one.state for one in process_tree.processes(7, process.pid)] == ["ended"], "a rank's own is told of"
    process.wait()
    assert process_tree.processes(7, process.pid)[0].kind == "trainer"
    parent = start(
        "import subprocess, time\nsubprocess.Popen(['true'])\ntime.sleep(0.3)\nprint(flush=True); time.sleep(60)"
    )
    eventually(lambda: len(process_tree.processes(0, parent.pid)) == 1, "its child has ended", within_s=10)


def test_our_own_processes_are_not_shown(start: still.Start) -> None:
    process = start(
        "import ctypes, os, time\n"
        "if os.fork() == 0:\n"
        "    ctypes.CDLL(None).prctl(15, b'evertrain-zygote', 0, 0, 0)\n"
        "    print(flush=True)\n"
        "time.sleep(600)"
    )
    assert [one.pid for one in process_tree.processes(0, process.pid)] == [process.pid]
    assert len(process_tree.tree(process.pid)) == 2


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_numbers_of_system_calls(machine: str) -> None:
    calls = process_tree.of_machine(machine)
    assert {"read", "write", "futex", "ppoll", "recvfrom", "nanosleep", "clock_nanosleep", "wait4", "epoll_pwait"} <= {
        *calls.values()
    }
    assert len(set(calls.values())) == len(calls)
