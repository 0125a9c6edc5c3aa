"""Does a rank's process tree do anything? CPU time, I/O, page faults and states, from /proc.

A rank may look idle while a child of it works (a data loader's workers, a checkpoint writer), so the whole tree counts.
Seconds are the caller's monotonic ones: a jump of the wall clock changes nothing here.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from evertrain.observe import process_tree

_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(msgspec.Struct, frozen=True):
    """What the process tree of one rank has used since it began, and how it stands now."""

    cpu_s: float
    io_bytes: int
    """Read and written through system calls, sockets and pipes included."""
    faults: int
    processes: int
    stopped: bool
    """Every thread of the rank's own process is stopped or traced, or its control group is frozen."""
    uninterruptible: bool
    """The rank's main thread sleeps in the kernel and heeds no signal (state D)."""
    reads_stdin: bool
    """It waits for somebody to type: a debugger's prompt."""


def usage(pid: int) -> Usage | None:
    """The tree below and with `pid`; None when the process is gone or cannot be seen."""
    own = process_tree.stat(pid)
    if own is None:
        return None
    cpu, io, faults, count = 0.0, 0, 0, 0
    for member in process_tree.tree(pid):
        stat = own if member == pid else process_tree.stat(member)
        if stat is None:
            continue  # ended meanwhile
        count += 1
        # with the children it has reaped: short-lived helpers are work too
        cpu += (sum(map(int, stat[11:15])) - process_tree.polling_ticks(member)) / _TICKS
        faults += int(stat[7]) + int(stat[9])
        io += _io(member)
    return Usage(
        cpu_s=cpu,
        io_bytes=io,
        faults=faults,
        processes=count,
        stopped=(state := process_tree.state_of(pid, own[0])) == "stopped",
        uninterruptible=state == "uninterruptible",
        reads_stdin=_reads_stdin(pid),
    )


def _io(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    values = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return values.get("rchar", 0) + values.get("wchar", 0) + values.get("read_bytes", 0)


def _reads_stdin(pid: int) -> bool:
    """Whether the main thread is in read(0, …); False where the kernel does not tell."""
    call = process_tree.system_call(pid)
    return call is not None and process_tree.SYSTEM_CALLS.get(call[0]) == "read" and call[1] == "0x0"
