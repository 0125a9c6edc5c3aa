"""Which checkpoints lie in a node's memory? Reads slot headers only; ranks and torch are not needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Literal

from evertrain.model.copies import Copy
from evertrain.worker import slots as layout

_RANK = re.compile(r"r\d+")


class SlotInfo(Copy, frozen=True, kw_only=True):
    """A complete copy, and the file that it is."""

    term: int
    time: float
    """When the save began."""
    bytes: int
    path: str


def list(slots_dir: str | os.PathLike[str]) -> tuple[SlotInfo, ...]:
    """The complete slots of all ranks under a node's slots folder; while ranks run, any may be overwritten since."""
    return complete(_paths(os.fspath(slots_dir)), "memory")


def complete(paths: Iterable[str], tier: Literal["memory", "disk"]) -> tuple[SlotInfo, ...]:
    """What is whole among these files."""
    found = []
    for path in paths:
        header = layout.read(path)
        if header is not None and header.state == layout.COMPLETE:
            found.append(
                SlotInfo(
                    rank=header.rank,
                    step=header.step,
                    attempt=header.attempt,
                    term=header.term,
                    time=header.time,
                    world_size=header.world_size,
                    bytes=header.size,
                    path=path,
                    tier=tier,
                )
            )
    return tuple(found)


def found_damaged(slots_dir: str | os.PathLike[str]) -> tuple[layout.SlotHeader, ...]:
    """Slots in a node's memory that a rank has found damaged; the next save goes there."""
    return damaged(_paths(os.fspath(slots_dir)))


def damaged(paths: Iterable[str]) -> tuple[layout.SlotHeader, ...]:
    """Those among these files that a rank has found damaged."""
    headers = (layout.read(path) for path in paths)
    return tuple(header for header in headers if header is not None and header.state == layout.DAMAGED)


def _paths(folder: str) -> Iterable[str]:
    """`<folder>/r<rank>/<slot>`, in order."""
    for rank in _names(folder):
        if _RANK.fullmatch(rank):
            yield from (os.path.join(folder, rank, slot) for slot in _names(os.path.join(folder, rank)))


def _names(folder: str) -> Iterable[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return ()
