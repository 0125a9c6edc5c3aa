"""What does a node have of a save, and where? Its own ranks' copies, and what it keeps for ranks of other nodes.

<node_dir>/backups/a<attempt>-s<step>/head-r<rank>       the head of another node's rank
<node_dir>/backups/a<attempt>-s<step>/part-<digest>      a part of the state of one or more of them
… .partial                                               on its way
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Container, Iterator
from contextlib import suppress
from typing import NamedTuple

from evertrain.checkpoint import disk, heads, slots
from evertrain.checkpoint.heads import Damaged, Gone, Head
from evertrain.checkpoint.slots import SlotInfo
from evertrain.model.copies import Backup, Part, Save
from evertrain.worker import slots as layout
from evertrain.worker.slots import SlotHeader

PARTIAL = ".partial"
_FOLDER = re.compile(r"a(\d+)-s(\d+)")
_HEAD, _PART = "head-r", "part-"


class Found(NamedTuple):
    """A part in a file."""

    path: str
    offset: int
    bytes: int
    rank: int | None
    """The rank of this node in whose slot it lies."""


class Shelf:
    """All that one node can give out. Safe to use from several threads; whatever it reads from may vanish any time."""

    def __init__(self, slots_dir: str, disk_dir: str, backups_dir: str) -> None:
        self._slots_dir = slots_dir
        self._disk_dir = disk_dir
        self._backups_dir = backups_dir
        self._heads: dict[str, tuple[SlotHeader, Head]] = {}
        self._kept: dict[str, tuple[int, Head]] = {}
        self._lock = threading.Lock()

    # -- the node's own ranks

    def turning(self) -> list[SlotInfo]:
        """Whole slots of this node's ranks, those in memory first: one of them may be overwritten any time."""
        return [*slots.list(self._slots_dir), *disk.list_in_place(self._disk_dir)]

    def own(self, save: Save) -> list[SlotInfo]:
        """Copies of this save of ranks that run or ran here, those in memory first."""
        found = (*slots.list(self._slots_dir), *disk.list(self._disk_dir))
        return [copy for copy in found if copy.save == save]

    def known(self, path: str) -> Head | None:
        """The head of a slot as far as it has been learnt and still holds."""
        header = layout.read(path)
        seen = self._heads.get(path)
        return seen[1] if seen is not None and header is not None and _same(seen[0], header) else None

    def learn(self, path: str) -> Head:
        """The head of a slot; may read all of it. Raises Gone and Damaged."""
        with self._lock:
            if (known := self.known(path)) is not None:
                return known
            head = heads.read(path)
            self._heads[path] = (head.header, head)
            for other in [other for other in self._heads if not os.path.exists(other)]:
                del self._heads[other]
            return head

    # -- what is kept for others

    def path(self, save: Save, *, rank: int = -1, digest: str = "") -> str:
        """Where a head or a part is kept."""
        name = f"{_PART}{digest}" if digest else f"{_HEAD}{rank}"
        return os.path.join(self._backups_dir, f"a{save[0]}-s{save[1]}", name)

    def kept(self) -> tuple[Backup, ...]:
        """Everything that is kept whole for others."""
        found = []
        for save, folder in self._saves():
            ranks: dict[int, Head] = {}
            parts = []
            for name in _names(folder):
                path = os.path.join(folder, name)
                if name.endswith(PARTIAL):
                    continue
                if name.startswith(_PART):
                    parts.append(Part(name.removeprefix(_PART), os.stat(path).st_size))
                elif (head := self._kept_head(path)) is not None:
                    ranks[head.header.rank] = head
            if ranks or parts:
                world_size = max((head.header.world_size for head in ranks.values()), default=0)
                listed = {rank: head.parts for rank, head in ranks.items()}
                attempt, step = save
                found.append(
                    Backup(attempt=attempt, step=step, world_size=world_size, heads=listed, parts=tuple(parts))
                )
        return tuple(found)

    def drop(self, needed: Container[Save]) -> None:
        """Remove what is kept of all other saves."""
        for save, folder in self._saves():
            if save not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    def clean(self) -> None:
        """Remove what was on its way when an agent was killed."""
        for _, folder in self._saves():
            for name in _names(folder):
                if name.endswith(PARTIAL):
                    with suppress(
                        OSError
                    ):  # a folder, which nobody here has made, must not keep the agent from starting
                        os.unlink(os.path.join(folder, name))

    def reuse(self, save: Save, digest: str) -> bool:
        """Whether the part is kept already for another save; then it is for this one as well, and costs nothing."""
        target = self.path(save, digest=digest)
        for _, folder in self._saves():
            source = os.path.join(folder, f"{_PART}{digest}")
            if source != target and os.path.exists(source):
                os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
                os.link(source, target)
                return True
        return False

    # -- giving out

    def head(self, save: Save, rank: int) -> bytes:
        """The head of a rank's copy, wherever one is whole. Raises Gone."""
        for copy in self.own(save):
            if copy.rank == rank:
                try:
                    return self.learn(copy.path).pack()
                except (Gone, Damaged):
                    continue
        kept = self._kept_head(self.path(save, rank=rank))
        if kept is None:
            raise Gone(f"no head of rank {rank} at step {save[1]}")
        return kept.pack()

    def part(self, save: Save, digest: str) -> Iterator[Found]:
        """Every place where a part with this digest should lie."""
        kept = self.path(save, digest=digest)
        if os.path.exists(kept):
            yield Found(kept, 0, os.stat(kept).st_size, None)
        for copy in self.own(save):
            try:
                head = self.learn(copy.path)
            except (Gone, Damaged):
                continue
            for place in head.places:
                if place.part.digest == digest:
                    yield Found(copy.path, layout.HEADER_BYTES + place.offset, place.part.bytes, copy.rank)

    def _kept_head(self, path: str) -> Head | None:
        try:
            stamp = os.stat(path).st_mtime_ns
            seen = self._kept.get(path)
            if seen is None or seen[0] != stamp:
                with open(path, "rb") as file:
                    seen = self._kept[path] = (stamp, heads.parse(file.read(), path))
            return seen[1]
        except (OSError, Damaged):
            self._kept.pop(path, None)
            return None

    def _saves(self) -> list[tuple[Save, str]]:
        found = []
        for name in _names(self._backups_dir):
            if match := _FOLDER.fullmatch(name):
                found.append(((int(match[1]), int(match[2])), os.path.join(self._backups_dir, name)))
        return found


def _same(one: SlotHeader, other: SlotHeader) -> bool:
    """Whether the slot still holds that save; checksums may have been added."""
    return one._replace(sums_crc=None) == other._replace(sums_crc=None)


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
