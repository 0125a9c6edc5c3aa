"""How much shared memory may checkpoints take here? The least of what the file system, machine and cgroup have left."""

from __future__ import annotations

import os

FRACTION = 0.8
"""Of what is free; the rest is for everybody else, and for the error of this estimate."""


def free_bytes(folder: str) -> int:
    """Bytes that files in `folder`, which is in shared memory, could still take."""
    found = os.statvfs(folder)
    room = [found.f_bavail * found.f_frsize]
    for left in (_machine_left(), cgroup_left()):
        if left is not None:
            room.append(left)
    return max(0, min(room))


def _machine_left() -> int | None:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def cgroup_left(root: str = "/") -> int | None:
    """What the memory cgroups allow, from this process's own up to the top; None where nothing limits it.

    Version 2 and version 1. Caches that the kernel can drop count as free.
    """
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    top = os.path.join(root, "sys/fs/cgroup")
    lefts = []
    for _, controllers, path in entries:
        if controllers == "":
            lefts += _walk(top, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            lefts += _walk(os.path.join(top, "memory"), path, *names)
    return min(lefts, default=None)


def _walk(top: str, path: str, limit_name: str, used_name: str, reclaimable: str) -> list[int]:
    lefts = []
    # in a container the path may name folders that only the host sees; the top is then our own group
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        folder = os.path.join(top, *parts[:depth])
        try:
            limit = _first_line(os.path.join(folder, limit_name))
            if limit == "max":
                continue
            used = int(_first_line(os.path.join(folder, used_name)))
        except (OSError, ValueError):
            continue
        lefts.append(int(limit) - used + _statistic(os.path.join(folder, "memory.stat"), reclaimable))
    return lefts


def _statistic(path: str, name: str) -> int:
    try:
        with open(path) as file:
            return next((int(line.split()[1]) for line in file if line.split()[0] == name), 0)
    except OSError:
        return 0


def _first_line(path: str) -> str:
    with open(path) as file:
        return file.readline().strip()
