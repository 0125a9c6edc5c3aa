"""Is a process frozen or throttled by its control groups? Version 2 and version 1, and both beside each other.

A limit of a group above counts as the process's own: it is stopped by it in the same way.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
_MOST_BYTES = 1 << 16
_SETTLED_S = 1.0
"""A process may be moved, and a limit may come: so often is looked where it is."""


def lines(pid: int) -> list[str]:
    """Of /proc/PID/cgroup; empty where it is gone, or not ours to see."""
    return (_read(f"/proc/{pid}/cgroup") or "").splitlines()


def is_frozen(line: str) -> bool:
    """Whether the group of this line, or one above it, is frozen."""
    return any(map(_says_frozen, _freezers(line)))


class Groups:
    """Those of one process, for whoever asks ten times a second."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._next_look = 0.0
        self._freezers: list[str] = []
        self._limited: list[str] = []
        """Statistics of the groups that have a limit of processor time."""

    def is_frozen(self) -> bool:
        self._look()
        return any(map(_says_frozen, self._freezers))

    def throttled(self) -> tuple[int, int]:
        """So often was the process's time used up, and for so many microseconds did that hold it; both count up."""
        self._look()
        count, held_us = 0, 0
        for path in self._limited:
            for line in (_read(path) or "").splitlines():
                name, _, value = line.partition(" ")
                if name == "nr_throttled":
                    count += int(value)
                elif name == "throttled_usec":
                    held_us += int(value)
                elif name == "throttled_time":  # version 1, nanoseconds
                    held_us += int(value) // 1000
        return count, held_us

    def _look(self) -> None:
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + _SETTLED_S
        found = lines(self._pid)
        self._freezers = [path for line in found for path in _freezers(line) if os.path.exists(path)]
        self._limited = [path for line in found for path in _limited(line)]


def _freezers(line: str) -> list[str]:
    """Files that say whether the group of this line is frozen."""
    controllers, path = _parts(line)
    if controllers is None:
        return [f"{root}{path.rstrip('/')}/cgroup.events" for root in (ROOT, ROOT / "unified")]
    return [f"{ROOT}/freezer{path.rstrip('/')}/freezer.state"] if "freezer" in controllers else []


def _says_frozen(path: str) -> bool:
    said = _read(path) or ""
    return "frozen 1" in said or said.strip() in ("FROZEN", "FREEZING")


def _limited(line: str) -> list[str]:
    controllers, path = _parts(line)
    roots: tuple[Path, ...]
    if controllers is None:
        roots, name, none = (ROOT, ROOT / "unified"), "cpu.max", "max"
    elif "cpu" in controllers:
        roots, name, none = (ROOT / "cpu",), "cpu.cfs_quota_us", "-1"
    else:
        return []
    found = []
    parts = [part for part in path.split("/") if part]
    for root in roots:
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            limit = _read(f"{folder}/{name}")
            if limit is not None and limit.split()[:1] != [none]:
                found.append(f"{folder}/cpu.stat")
    return found


def _parts(line: str) -> tuple[list[str] | None, str]:
    """Controllers, and the path; None: of version 2, which has all of them in one place."""
    number, _, rest = line.partition(":")
    controllers, _, path = rest.partition(":")
    return None if number == "0" and not controllers else controllers.split(","), path


def _read(path: str) -> str | None:
    """At a third of what `open` costs."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, _MOST_BYTES).decode("ascii", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)
