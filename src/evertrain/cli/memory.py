"""Is there enough shared memory for the job? Asked before the first step: a full tmpfs later is SIGBUS in a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evertrain.model.errors import TroubleError

SHARED_MEMORY = Path("/dev/shm")
PAGE_BYTES = 12288
"""One telemetry page and its directory entry, rounded up."""
ATTEMPTS_AT_ONCE = 3
"""The one that ends, the one that runs and the one that is prepared."""
NODE_BYTES = 64 * 1024
"""Socket, specs and folders of a node."""
NO_LIMIT = 1 << 60
"""cgroup v1 writes no limit as a number of about this size."""


@dataclass(frozen=True)
class Room:
    """The tightest limit on what can still be put into shared memory."""

    free_bytes: int
    where: str
    cure: str


def need_bytes(nodes: int, ranks_per_node: int) -> int:
    return nodes * (NODE_BYTES + ranks_per_node * ATTEMPTS_AT_ONCE * PAGE_BYTES)


def check(need: int, shared_memory: Path = SHARED_MEMORY) -> None:
    """Raise if the pages of all ranks would not fit."""
    try:
        room = min(rooms(shared_memory), key=lambda room: room.free_bytes)
    except FileNotFoundError:
        raise TroubleError(f"there is no {shared_memory}: evertrain needs shared memory; mount a tmpfs there") from None
    if room.free_bytes < need:
        raise TroubleError(
            f"the ranks' pages need {in_words(need)} of shared memory, but {room.where} has "
            f"{in_words(room.free_bytes)} free; {room.cure}"
        )


def rooms(shared_memory: Path = SHARED_MEMORY, root: Path = Path("/")) -> Iterator[Room]:
    """Every limit that holds for us."""
    system = os.statvfs(shared_memory)
    yield Room(
        system.f_bavail * system.f_frsize,
        str(shared_memory),
        "remove what is left over (`evertrain clean`) or make it bigger (docker run --shm-size=1g)",
    )
    for limit, usage in _cgroup_files(root):
        try:
            text = limit.read_text().strip()
            used = int(usage.read_text())
        except (OSError, ValueError):
            continue
        if text != "max" and int(text) < NO_LIMIT:
            yield Room(max(0, int(text) - used), "the memory cgroup", "raise its limit")


def _cgroup_files(root: Path) -> Iterator[tuple[Path, Path]]:
    """Limit and usage of our memory cgroup and all above it, version 2 and version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # in a container the path may name folders that only the host sees; the top is then our own group
        group = Path(path.lstrip("/"))
        for folder in (group, *group.parents):
            yield top / folder / names[0], top / folder / names[1]


def in_words(number: int) -> str:
    value = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
