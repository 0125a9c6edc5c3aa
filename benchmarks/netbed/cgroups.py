"""One cgroup a rank for its share of the processor, and one for all that runs beside them: of version 1 or 2, whichever
has the cpu controller here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_US = 100_000
_V1 = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/cpu,cpuacct"))
_V2 = Path("/sys/fs/cgroup")
_REMOVE_LIMIT_S = 5.0


def root() -> Path | None:
    """Where groups with a quota are made; None: nowhere here."""
    for folder in _V1:
        if (folder / "cgroup.procs").exists():
            return folder
    try:
        return _V2 if "cpu" in (_V2 / "cgroup.controllers").read_text().split() else None
    except FileNotFoundError:
        return None


def version() -> int:
    return 2 if root() == _V2 else 1


class RankGroups:
    """Named after their bed, so that those of a dead one are found."""

    def __init__(self, name: str) -> None:
        folder = root()
        self.folder = folder / name if folder is not None else None

    def make(self, ranks: int, priority: int = 0) -> None:
        """Together they have as much of a busy machine as two processes a rank of this priority, as of `nice`."""
        if self.folder is None:
            return
        self.folder.mkdir()
        if version() == 2:
            for place in (self.folder.parent, self.folder):
                (place / "cgroup.subtree_control").write_text("+cpu")
        self._weigh(self.folder, 2 * ranks * 1.25**-priority)
        for rank in range(ranks):
            self._of(rank).mkdir()
        self.others.mkdir()
        self._weigh(self.others, ranks)

    @property
    def others(self) -> Path:
        assert self.folder is not None, "no cgroup with a quota here"
        return self.folder / "others"

    def _weigh(self, folder: Path, processes: float) -> None:
        if version() == 2:
            (folder / "cpu.weight").write_text(str(min(10_000, round(100 * processes))))
        else:
            (folder / "cpu.shares").write_text(str(min(262_144, round(1024 * processes))))

    def limit(self, rank: int, cores: float | None, period_us: int = PERIOD_US) -> None:
        """So much of a core at most; None: all it wants."""
        quota = None if cores is None else max(1000, round(cores * period_us))
        if version() == 2:
            (self._of(rank) / "cpu.max").write_text(f"{'max' if quota is None else quota} {period_us}")
        else:
            (self._of(rank) / "cpu.cfs_quota_us").write_text("-1")
            (self._of(rank) / "cpu.cfs_period_us").write_text(str(period_us))
            (self._of(rank) / "cpu.cfs_quota_us").write_text(str(-1 if quota is None else quota))

    def add(self, rank: int, pid: int) -> None:
        (self._of(rank) / "cgroup.procs").write_text(str(pid))

    def pids(self) -> Iterator[int]:
        for file in self.folder.glob("*/cgroup.procs") if self.folder is not None else ():
            yield from map(int, file.read_text().split())

    def remove(self) -> None:
        """Once nobody is in them; the kernel takes a moment to see that."""
        deadline = time.monotonic() + _REMOVE_LIMIT_S
        while self.folder is not None and self.folder.exists():
            try:
                for one in (*self.folder.glob("rank-*"), self.others):
                    if one.exists():
                        one.rmdir()
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _of(self, rank: int) -> Path:
        assert self.folder is not None, "no cgroup with a quota here"
        return self.folder / f"rank-{rank}"
