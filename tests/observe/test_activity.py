"""What a process tree does, measured on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from evertrain.observe.activity import Usage, usage
from support.waiting import eventually

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert started[-1].stdout is not None
        started[-1].stdout.readline()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def rate(pid: int, seconds: float = 0.6) -> tuple[float, float]:
    """CPU in cores, and bytes a second."""
    before, begun = _usage(pid), time.monotonic()
    time.sleep(seconds)
    after, took = _usage(pid), time.monotonic() - begun
    return (after.cpu_s - before.cpu_s) / took, (after.io_bytes - before.io_bytes) / took


def _usage(pid: int) -> Usage:
    found = usage(pid)
    assert found is not None
    return found


def test_a_sleeper_uses_nothing(start: Start) -> None:
    process = start("import time; print(flush=True); time.sleep(60)")
    assert rate(process.pid) == (0.0, 0.0)
    assert not _usage(process.pid).stopped


def test_a_loop_uses_cpu(start: Start) -> None:
    process = start("print(flush=True)\nwhile True: pass")
    assert rate(process.pid)[0] > 0.05


def test_threads_that_only_ask_whether_something_has_come_are_no_work(start: Start) -> None:
    code = (
        "import ctypes, threading\n"
        "def spin():\n"
        "    ctypes.CDLL(None).prctl(15, b'gloo_tcp_loop', 0, 0, 0)\n"
        "    print(flush=True)\n"
        "    while True: pass\n"
        "threading.Thread(target=spin).start()"
    )
    process = start(code)
    before = _own_ticks(process.pid)
    assert rate(process.pid)[0] < 0.03
    assert _own_ticks(process.pid) > before


def _own_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


def test_a_child_that_works_counts_for_its_parent(start: Start) -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'print(flush=True)\\nwhile True: pass'])\n"
        "try: child.wait()\nfinally: child.kill()"
    )
    process = start(code)
    assert _usage(process.pid).processes == 2
    assert rate(process.pid)[0] > 0.05
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)


def test_a_stopped_process_is_seen_to_be(start: Start) -> None:
    process = start("import time; print(flush=True); time.sleep(60)")
    process.send_signal(signal.SIGSTOP)
    eventually(lambda: _usage(process.pid).stopped, "it is stopped", within_s=5)
    process.send_signal(signal.SIGCONT)
    eventually(lambda: not _usage(process.pid).stopped, "it goes on", within_s=5)


def test_waiting_for_somebody_to_type_is_seen(start: Start) -> None:
    process = start("print(flush=True); input()")
    eventually(lambda: _usage(process.pid).reads_stdin, "it reads", within_s=5)
    assert not _usage(os.getpid()).reads_stdin


def test_a_process_that_is_gone_is_none() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert usage(process.pid) is None
