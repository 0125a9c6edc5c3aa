"""Does a rank's process tree do anything? CPU time, I/O, page faults and states, from /proc.

A rank may look idle while a child of it works (a data loader's workers, a checkpoint writer), so the whole tree counts.
Seconds are the caller's monotonic ones: a jump of the wall clock changes nothing here.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

_READ = ("0", "63")
"""The system call's number on x86-64 and on arm64."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Usage(msgspec.Struct, frozen=True):
    """What the process tree of one rank has used since it began, and how it stands now."""

    cpu_s: float
    io_bytes: int
    """Read and written through system calls, sockets and pipes included."""
    faults: int
    processes: int
    stopped: bool
    """Every thread of the rank's own process is stopped or traced."""
    uninterruptible: bool
    """The rank's main thread sleeps in the kernel and heeds no signal (state D)."""
    reads_stdin: bool
    """It waits for somebody to type: a debugger's prompt."""


def usage(pid: int) -> Usage | None:
    """The tree below and with `pid`; None when the process is gone or cannot be seen."""
    own = _stat(pid)
    if own is None:
        return None
    cpu, io, faults, count = 0.0, 0, 0, 0
    for member in _tree(pid):
        stat = own if member == pid else _stat(member)
        if stat is None:
            continue  # ended meanwhile
        count += 1
        # with the children it has reaped: short-lived helpers are work too
        cpu += sum(map(int, stat[11:15])) / _TICKS
        faults += int(stat[7]) + int(stat[9])
        io += _io(member)
    return Usage(
        cpu_s=cpu,
        io_bytes=io,
        faults=faults,
        processes=count,
        stopped=own[0] in "Tt" and all(state in "Tt" for state in _thread_states(pid)),
        uninterruptible=own[0] == "D",
        reads_stdin=_reads_stdin(pid),
    )


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; the command may contain anything, so count from its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _tree(pid: int) -> list[int]:
    found, waiting = [], [pid]
    while waiting:
        found.append(member := waiting.pop())
        try:
            threads = os.listdir(f"/proc/{member}/task")
        except OSError:
            continue
        for thread in threads:
            try:
                waiting += map(int, Path(f"/proc/{member}/task/{thread}/children").read_text().split())
            except OSError:
                continue
    return found


def _io(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    values = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return values.get("rchar", 0) + values.get("wchar", 0) + values.get("read_bytes", 0)


def _reads_stdin(pid: int) -> bool:
    """Whether the main thread is in read(0, …); False where the kernel does not tell."""
    try:
        number, first, *_ = Path(f"/proc/{pid}/syscall").read_text().split()
    except (OSError, ValueError):
        return False
    return number in _READ and first == "0x0"


def _thread_states(pid: int) -> list[str]:
    states = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    for thread in threads:
        try:
            states.append(Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0])
        except OSError:
            continue
    return states
