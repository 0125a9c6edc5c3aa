"""What the kernel says of a process: what it used, what kept it from a processor, and which limits it stands under."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evertrain.trace import cgroups, layout
from evertrain.trace.hosts import UNKNOWN_CARRIER, Host

SPINNER = "import threading, time, sys\nprint('up', flush=True)\nwhile True: pass\n"
THREADS = (
    "import threading, time\n"
    "for _ in range(20): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    "print('up', flush=True)\ntime.sleep(60)\n"
)


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", request.param], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None and started.stdout.readline() == "up\n"
        yield started
        started.kill()


def read(record: bytes | None) -> Any:
    assert record is not None
    return np.frombuffer(bytes(8) + record + bytes(8), layout.dtype("host"))[0]


@pytest.mark.parametrize("process", [SPINNER], indirect=True)
def test_processor_time_and_how_long_it_was_waited_for(process: subprocess.Popen[str]) -> None:
    host = Host(4, process.pid, device=1)
    assert host.look(1_000_000_000, None) is None, "nothing to compare with yet"
    began = time.monotonic()
    time.sleep(0.3)
    passed_us = int((time.monotonic() - began) * 1e6)
    seen = read(host.look(1_000_000_000 + passed_us * 1000, True))
    assert (seen["kind"], seen["rank"], seen["device"], seen["threads"]) == (layout.KINDS["host"], 4, 1, 1)
    assert chr(seen["state"]) == "R" and seen["dt_us"] == passed_us and seen["carrier"] == 1
    # it wants a core all the time: what it did not get it waited for
    assert 0.5 * passed_us < seen["cpu_us"] + seen["delay_us"] < 3 * passed_us + 100_000
    host.close()


@pytest.mark.parametrize("process", [THREADS], indirect=True)
def test_many_threads_are_asked_twice_a_second(process: subprocess.Popen[str]) -> None:
    host = Host(0, process.pid)
    host.look(1_000_000_000, None)
    soon = read(host.look(1_100_000_000, None))
    assert soon["cpu_us"] == soon["delay_us"] == layout.UNSEEN and soon["carrier"] == UNKNOWN_CARRIER
    later = read(host.look(1_600_000_000, None))
    assert later["cpu_us"] < 500_000 and later["threads"] == 21 and chr(later["state"]) == "S"
    host.close()


@pytest.mark.parametrize("process", [SPINNER], indirect=True)
def test_one_that_has_ended_is_no_trouble(process: subprocess.Popen[str]) -> None:
    host = Host(0, process.pid)
    host.look(1_000_000_000, None)
    process.kill()
    process.wait()
    assert host.look(1_100_000_000, None) is None
    host.close()
    host.close()
    with pytest.raises(OSError):
        Host(0, process.pid)


# -- control groups ----------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    return tmp_path


def put(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


@pytest.mark.parametrize(
    ("lines", "files"),
    [
        (
            ["0::/job/rank0"],
            {"job/rank0/cpu.max": "max 100000\n", "job/cpu.max": "50000 100000\n",
             "job/cpu.stat": "usage_usec 1\nnr_periods 9\nnr_throttled 4\nthrottled_usec 1234\n"},
        ),
        (
            ["3:cpu,cpuacct:/job", "2:memory:/", "0::/"],
            {"cpu/job/cpu.cfs_quota_us": "20000\n", "cpu/cpu.cfs_quota_us": "-1\n",
             "cpu/job/cpu.stat": "nr_periods 9\nnr_throttled 4\nthrottled_time 1234567\n"},
        ),
    ],
    ids=["version 2", "version 1"],
)  # fmt: skip
def test_throttling_counts_wherever_the_limit_is(
    lines: list[str], files: dict[str, str], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "lines", lambda _: lines)
    put(tree, files)
    assert cgroups.Groups(os.getpid()).throttled() == (4, 1234)


def test_a_group_without_a_limit_throttles_nobody(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "lines", lambda _: ["0::/job"])
    put(tree, {"job/cpu.max": "max 100000\n", "job/cpu.stat": "nr_throttled 4\nthrottled_usec 1\n"})
    assert cgroups.Groups(os.getpid()).throttled() == (0, 0)


@pytest.mark.parametrize(
    ("line", "file", "frozen", "thawed"),
    [
        ("0::/job", "job/cgroup.events", "populated 1\nfrozen 1\n", "populated 1\nfrozen 0\n"),
        ("0::/job", "unified/job/cgroup.events", "frozen 1\n", "frozen 0\n"),
        ("6:freezer:/job", "freezer/job/freezer.state", "FROZEN\n", "THAWED\n"),
        ("6:freezer:/job", "freezer/job/freezer.state", "FREEZING\n", "THAWED\n"),
    ],
)
def test_freezers_of_both_versions(
    line: str, file: str, frozen: str, thawed: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "lines", lambda _: [line])
    put(tree, {file: frozen})
    assert cgroups.is_frozen(line) and cgroups.Groups(os.getpid()).is_frozen()
    put(tree, {file: thawed})
    assert not cgroups.is_frozen(line) and not cgroups.Groups(os.getpid()).is_frozen()
    assert not cgroups.is_frozen("2:memory:/job")


def interfaces(path: Path, received: int, sent: int, loopback: int) -> None:
    """As /proc/PID/net/dev has them."""
    head = "Inter-|   Receive                    |  Transmit\n face |bytes    packets errs | bytes    packets errs\n"
    rest = " 1 0 0 0 0 0 0"
    lines = [f"    lo: {loopback}{rest} {loopback}{rest}", f" data0: {received}{rest} {sent}{rest}"]
    path.write_text(head + "\n".join(lines) + "\n")


def test_what_interfaces_carry_is_counted_once_a_second_without_the_loopback(tmp_path: Path) -> None:
    where = tmp_path / "dev"
    interfaces(where, 1000, 2000, 10**9)
    host = Host(0, os.getpid())
    os.close(host._interfaces)
    host._interfaces = os.open(where, os.O_RDONLY)
    seen = []
    for at in range(1, 25):
        if at == 12:
            interfaces(where, 1500, 2700, 5 * 10**9)
        if (record := host.look(10_000_000_000 + at * 100_000_000, None)) is not None:
            seen.append(int(read(record)["wire_bytes"]))
    host.close()
    assert sum(seen) == 500 + 700 and sum(one > 0 for one in seen) == 1
