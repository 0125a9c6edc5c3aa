"""Is there enough shared memory for the job? Asked before the first step: a full tmpfs later is SIGBUS in a rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from evertrain.model.errors import TroubleError
from evertrain.worker import room

SHARED_MEMORY = Path("/dev/shm")
PAGE_BYTES = 20480
"""One telemetry page and its directory entry, rounded up."""
ATTEMPTS_AT_ONCE = 3
"""The one that ends, the one that runs and the one that is prepared."""
NODE_BYTES = 64 * 1024
"""Socket, specs and folders of a node."""


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
        tightest = min(rooms(shared_memory), key=lambda room: room.free_bytes)
    except FileNotFoundError:
        raise TroubleError(f"there is no {shared_memory}: evertrain needs shared memory; mount a tmpfs there") from None
    if tightest.free_bytes < need:
        raise TroubleError(
            f"the ranks' pages need {in_words(need)} of shared memory, but {tightest.where} has "
            f"{in_words(tightest.free_bytes)} free; {tightest.cure}"
        )


def rooms(shared_memory: Path = SHARED_MEMORY, root: Path = Path("/")) -> Iterator[Room]:
    """Every limit that holds for us."""
    system = os.statvfs(shared_memory)
    yield Room(
        system.f_bavail * system.f_frsize,
        str(shared_memory),
        "remove what is left over (`evertrain clean`) or make it bigger (docker run --shm-size=1g)",
    )
    left = room.cgroup_left(str(root))
    if left is not None:
        yield Room(max(0, left), "the memory cgroup", "raise its limit")


def in_words(number: int) -> str:
    value = float(number)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
