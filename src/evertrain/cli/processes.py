"""Is that process still the one that was written down? A pid alone is given away again by the kernel."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class ProcessId(NamedTuple):
    """A pid and the clock ticks since boot at which its process began."""

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None where there is none or only a zombie."""
    fields = _stat(pid)
    return ProcessId(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None


def parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str]:
    """/proc/<pid>/stat from the state on; the command's name before it, in parentheses, may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def send(process: ProcessId, number: int) -> bool:
    """Signal this very process; False where it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        # with the descriptor open, the pid cannot change hands between look and signal
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def children() -> Iterator[int]:
    """Pids of our own children, orphans that came to us as a subreaper included."""
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            yield from map(int, listing.read_text().split())
        except OSError:
            continue


def read(file: Path) -> ProcessId | None:
    """A process that was written down as `{"pid", "start_ticks"}`."""
    try:
        record = json.loads(file.read_bytes())
        return ProcessId(int(record["pid"]), int(record["start_ticks"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def living(folder: Path) -> dict[str, ProcessId]:
    """Those written down in a job's `processes/` folder that still run, by name."""
    recorded = {file.stem: read(file) for file in sorted(folder.glob("*.json"))}
    return {name: process for name, process in recorded.items() if process is not None and is_alive(process)}
