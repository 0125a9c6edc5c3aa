"""What the kernel says of a rank's process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from evertrain.trace import layout
from evertrain.trace.hosts import Host

SECOND = 1_000_000_000
HEAD = "Inter-|   Receive                    |  Transmit\n face |bytes    packets errs | bytes    packets errs\n"


def table(path: Path, received: int, sent: int, loopback: int) -> None:
    rest = " 1 0 0 0 0 0 0"
    lines = [f"    lo: {loopback}{rest} {loopback}{rest}", f" data0: {received}{rest} {sent}{rest}"]
    path.write_text(HEAD + "\n".join(lines) + "\n")


def test_what_interfaces_carry_is_counted_once_a_second_without_the_loopback(tmp_path: Path) -> None:
    where = tmp_path / "dev"
    table(where, 1000, 2000, 10**9)
    host = Host(0, os.getpid())
    os.close(host._interfaces)
    host._interfaces = os.open(where, os.O_RDONLY)
    seen = []
    for at in range(1, 25):
        if at == 12:
            table(where, 1500, 2700, 5 * 10**9)
        if (record := host.look(10 * SECOND + at * SECOND // 10, None)) is not None:
            raw = bytes(8) + record + bytes(layout.RECORD_BYTES - 8 - len(record))
            seen.append(int(np.frombuffer(raw, layout.dtype("host"))["wire_bytes"][0]))
    host.close()
    assert sum(seen) == 500 + 700 and sum(one > 0 for one in seen) == 1


def test_a_process_that_has_ended_says_nothing() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    host = Host(0, pid)
    os.waitpid(pid, 0)
    assert host.look(SECOND, None) is None
    host.close()
    with pytest.raises(OSError):
        Host(0, pid)
