"""Where do this node's trace rings lie, and how large may they be?

    NODE_DIR/trace/a{attempt}-r{rank}-hook.ring     written by the rank
    NODE_DIR/trace/a{attempt}-r{rank}-agent.ring    written here, on its behalf
    NODE_DIR/trace/a{attempt}-r{rank}-agent.flows   addresses of its connections
    NODE_DIR/trace/a{attempt}-r{rank}-nccl-{pid}.ring     made and written by the profiler plugin in NCCL

They are allocated before the rank runs, ahead of time where its attempt is prepared ahead. All of a node together take
a quarter of the free memory at most: first the attempt before gives way, then all become smaller, and where that leaves
too little there is no tracing, which is said and hurts nothing. The last two attempts stay.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from evertrain.model.config import TraceConfig
from evertrain.model.spec import AgentSpec
from evertrain.trace import rings
from evertrain.worker import room

TABLE = 256
"""Places of a hook's table: what the rank is blocked in, and operations in flight."""
KEPT_ATTEMPTS = 2
_SHARE = 4
_NAME = re.compile(r"a(\d+)-r(\d+)-([a-z]+)(?:-(\d+))?\.(ring|flows)")


class Name(NamedTuple):
    """What the name of a file says."""

    attempt: int
    rank: int
    writer: str
    pid: int
    kind: str


def named(path: Path) -> Name | None:
    """None: it is none of ours."""
    if (found := _NAME.fullmatch(path.name)) is None:
        return None
    return Name(int(found[1]), int(found[2]), found[3], int(found[4] or 0), found[5])


class Rings:
    """Those of one node; for several threads."""

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        self._config: TraceConfig = spec.trace
        self._folder = Path(spec.node_dir) / "trace"
        self._lock = threading.Lock()
        self.blind = ""
        """Why there are none; empty: there are."""

    def prefix(self, attempt: int, rank: int) -> Path:
        """Of the rank's files; the plugin in NCCL adds `-nccl-{pid}.ring`."""
        return self._folder / f"a{attempt}-r{rank}"

    def path(self, attempt: int, rank: int, writer: str) -> Path:
        return self._folder / f"a{attempt}-r{rank}-{writer}.ring"

    def addresses(self, attempt: int, rank: int) -> Path:
        return self._folder / f"a{attempt}-r{rank}-agent.flows"

    def files(self) -> Iterator[tuple[Path, Name]]:
        try:
            found = sorted(self._folder.iterdir())
        except OSError:
            return
        for path in found:
            if (name := named(path)) is not None:
                yield path, name

    def prepare(self, attempt: int, ranks: Sequence[int], term: int) -> None:
        """Have rings for these ranks; those that are there stay as they are."""
        if not self._config.enabled or not ranks:
            return
        with self._lock:
            missing = [rank for rank in ranks if not self.path(attempt, rank, "agent").exists()]
            if not missing:
                return
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                hook, own = self._sizes(attempt, len(missing))
                if not hook or not own:
                    return
                for rank in missing:
                    self._create(attempt, rank, "hook", hook, TABLE, term)
                    self._create(attempt, rank, "agent", own, 0, term)
                self.blind = ""
            except OSError as error:
                self.blind = f"collectives are not traced: {error.strerror or error}"

    def _create(self, attempt: int, rank: int, writer: str, capacity: int, table: int, term: int) -> None:
        rings.create(
            str(self.path(attempt, rank, writer)),
            writer=writer,
            capacity=capacity,
            table=table,
            job=self._spec.job,
            node=self._spec.node,
            rank=rank,
            term=term,
            attempt=attempt,
        )

    def hook_path(self, attempt: int, rank: int) -> str:
        """What the rank is told; empty: it has none."""
        path = self.path(attempt, rank, "hook")
        return str(path) if path.exists() else ""

    def forget(self, attempt: int) -> None:
        """What lies further back than the attempt before this one."""
        self._remove_before(attempt - KEPT_ATTEMPTS + 1)

    def _sizes(self, attempt: int, ranks: int) -> tuple[int, int]:
        """Records of a hook's ring and of one of ours; 0: there is no room."""
        hook, writer = self._config.hook_mib << 20, self._config.writer_mib << 20
        # the plugin in NCCL makes another of this size
        needed = ranks * (hook + 2 * writer)
        free = room.free_bytes(self._spec.node_dir)
        there = sum(path.stat().st_size for path, _ in self.files())
        most = (free + there) // _SHARE
        if there + needed > most:
            self._remove_before(attempt - 1)
            there = sum(path.stat().st_size for path, _ in self.files())
        share = min(1.0, max(0, most - there) / needed) if needed else 0.0
        sizes = rings.capacity_of(int(hook * share), TABLE), rings.capacity_of(int(writer * share))
        if min(sizes) <= 0:
            self.blind = (
                f"collectives are not traced: {free >> 20} MiB of shared memory are too little for {ranks} ranks"
            )
        return sizes

    def _remove_before(self, attempt: int) -> None:
        for path, name in self.files():
            if name.attempt < attempt:
                path.unlink(missing_ok=True)
