"""How much shared memory may checkpoints take here? The least of what the file system, machine and cgroup have left."""

from __future__ import annotations

import os

FRACTION = 0.8
"""Of what is free; the rest is for everybody else, and for the error of this estimate."""


def free_bytes(folder: str) -> int:
    """Bytes that files in `folder`, which is in shared memory, could still take."""
    found = os.statvfs(folder)
    room = [found.f_bavail * found.f_frsize]
    for left in (_machine_left(), _cgroup_left()):
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


def _cgroup_left() -> int | None:
    """The tightest limit from this process's cgroup up to the root; version 2, then version 1."""
    try:
        with open("/proc/self/cgroup") as file:
            entries = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return None
    lefts = []
    for _, controllers, path in entries:
        if controllers == "":
            lefts += _walk("/sys/fs/cgroup", path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            lefts += _walk(root, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return min(lefts, default=None)


def _walk(root: str, path: str, limit_name: str, used_name: str, reclaimable: str) -> list[int]:
    lefts = []
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        folder = os.path.join(root, *parts[:depth])
        try:
            limit = _first_line(os.path.join(folder, limit_name))
            if limit == "max":
                continue
            used = int(_first_line(os.path.join(folder, used_name)))
            with open(os.path.join(folder, "memory.stat")) as file:
                cached = next((int(line.split()[1]) for line in file if line.split()[0] == reclaimable), 0)
        except (OSError, ValueError):
            continue
        lefts.append(int(limit) - used + cached)
    return lefts


def _first_line(path: str) -> str:
    with open(path) as file:
        return file.readline().strip()
