"""Which copies of a job's checkpoints can be reached from here? By step, with the place of every one.

Memory of this machine while the job runs, its nodes' folders on disk, and the shared store: what other machines hold is
theirs to list.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from evertrain.checkpoint import disk, heads, slots, store, sums
from evertrain.checkpoint.backups import Shelf
from evertrain.checkpoint.slots import SlotInfo
from evertrain.cli import look
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError
from evertrain.worker import slots as layout

TIERS = ("memory", "disk", "peers")


@dataclass
class Step:
    """One save of one step, of one attempt."""

    step: int
    attempt: int
    world_size: int
    time: float = 0.0
    copies: list[SlotInfo] = field(default_factory=list)
    backups: set[int] = field(default_factory=set)
    """Ranks of which another node on this machine keeps a backup."""
    folder: str = ""
    """In the shared store; empty: it is not there."""
    stored_bytes: int = 0

    def ranks(self, tier: str) -> list[int]:
        if tier == "peers":
            return sorted(self.backups)
        return sorted({copy.rank for copy in self.copies if copy.tier == tier})

    @property
    def missing(self) -> list[int]:
        """Ranks of which there is no copy here."""
        have = {copy.rank for copy in self.copies} | self.backups
        return [rank for rank in range(self.world_size) if rank not in have and not self.folder]

    @property
    def bytes(self) -> int:
        """Of one copy of each rank."""
        return sum({copy.rank: copy.bytes for copy in self.copies}.values()) or self.stored_bytes

    def best(self) -> dict[int, list[SlotInfo]]:
        """Copies of each rank, those on disk first: they stay where they are."""
        found: dict[int, list[SlotInfo]] = defaultdict(list)
        for copy in sorted(self.copies, key=lambda copy: copy.tier):
            found[copy.rank].append(copy)
        return dict(sorted(found.items()))


class Kept(NamedTuple):
    """A file that a node keeps for others."""

    step: int
    path: str

    def fault(self) -> str:
        """Why it is not intact, or nothing."""
        file = Path(self.path)
        try:
            raw = file.read_bytes()
            if file.name.startswith("head-"):
                heads.parse(raw, "it")
                return ""
        except FileNotFoundError:
            return "gone"
        except heads.Damaged as damage:
            return str(damage)
        found = layout.pack_sums(sums.of_data(raw, [layout.Part("", 0, len(raw))])) if len(raw) % 4096 == 0 else b""
        return "" if file.name == f"part-{sums.digest(found)}" else "its data do not match their checksums"


def of_job(job: KnownJob, url: str | None = None) -> tuple[list[Step], str]:
    """Every step of which anything is here, oldest attempt first, then by step; and why the store is not part of it."""
    found: dict[tuple[int, int], Step] = {}
    for copy in _all(job):
        step = found.setdefault(copy.save, Step(copy.step, copy.attempt, copy.world_size, copy.time))
        step.time = min(step.time, copy.time)
        step.copies.append(copy)
    for node in _folders(job.run_folder):
        for backup in Shelf("", "", str(node / "backups")).kept():
            step = found.setdefault(backup.save, Step(backup.step, backup.attempt, backup.world_size))
            step.backups.update(backup.heads)
    trouble = ""
    try:
        if (url := url or _store_of(found.values()) or _store_in_log(job)) is not None:
            for folder, manifest in store.list(url, job.job):
                save = (manifest.attempt, manifest.step)
                step = found.setdefault(save, Step(manifest.step, manifest.attempt, manifest.world_size, manifest.time))
                step.folder, step.stored_bytes = folder, manifest.bytes
    except (store.StoreError, TroubleError) as error:
        trouble = str(error)
    return [step for _, step in sorted(found.items())], trouble


def kept(job: KnownJob) -> Iterator[Kept]:
    """Each file that nodes of this machine keep for others."""
    for folder in sorted(job.run_folder.glob("*/backups/a*-s*")):
        step = int(folder.name.rpartition("-s")[2])
        yield from (Kept(step, str(file)) for file in sorted(folder.iterdir()) if file.suffix != ".partial")


def broken(job: KnownJob) -> list[str]:
    """Files of checkpoints on disk that are no copies: cut off, with a damaged header, or found damaged before."""
    files = sorted(map(str, (job.run_dir / "checkpoints").glob("*/step-*/r*")))
    return [file for file in files if (header := layout.read(file)) is None or header.state != layout.COMPLETE]


def hold(step: Step, files: Sequence[str], folder: str) -> list[str]:
    """Names in `folder` under which files of a step stay, even where a job that runs removes them from its disk."""
    held = []
    for number, file in enumerate(files):
        name = os.path.join(folder, str(number))
        try:
            os.link(file, name)
        except OSError:
            name = file  # in memory, or another user's
        held.append(name)
    if any(is_gone(step, name) for name in held):
        raise TroubleError(gone(step))
    return held


def is_gone(step: Step, file: str) -> bool:
    """Whether a file that was a copy of this step has gone, or is one of another step by now."""
    header = layout.read(file)
    return not os.path.exists(file) if header is None else (header.attempt, header.step) != (step.attempt, step.step)


def gone(step: Step) -> str:
    return f"step {step.step} is gone: the job runs and has saved newer ones; those on disk stay longest"


def _all(job: KnownJob) -> Iterable[SlotInfo]:
    for node in _folders(job.run_folder):
        yield from slots.list(node / "slots")
    for node in _folders(job.run_dir / "checkpoints"):
        yield from disk.list(node)


def _store_of(steps: Iterable[Step]) -> str | None:
    """The store that the newest checkpoint names."""
    copies = sorted((copy for step in steps for copy in step.copies), key=lambda copy: copy.time, reverse=True)
    found = (store.settings_in(copy.path) for copy in copies[:3])
    return next((settings.url for settings in found if settings is not None), None)


def _store_in_log(job: KnownJob) -> str | None:
    """The store that the job has written to, for when it has no checkpoint here any more."""
    from evertrain.controller import views

    return look.read(job, views.store_of) if job.database.exists() else None


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []


def choose(job: KnownJob, wanted: str | None, *, lasting: bool = False, in_store: bool = False) -> Step:
    """The step of this number, of its newest attempt; by default the newest that is whole in files of ranks here.

    `lasting`: by default rather one on disk, as a job that runs soon overwrites what is in memory. `in_store`: one of
    which there are files in the shared store alone is good enough.
    """
    found = of_job(job)[0]
    steps = [step for step in found if step.copies or (in_store and step.folder)]
    if not steps:
        stored = next((f"; {step.folder} has step {step.step}" for step in reversed(found) if step.folder), "")
        raise TroubleError(f"job {job.job} has no checkpoint here ({job.run_dir / 'checkpoints'}){stored}")
    if wanted is None or wanted == "newest":
        whole = [step for step in steps if len(step.best()) == step.world_size]
        if not whole:
            raise TroubleError(
                f"no step of job {job.job} is whole here; `evertrain checkpoint list` shows what there is"
            )
        on_disk = [step for step in whole if len(step.ranks("disk")) == step.world_size]
        return on_disk[-1] if lasting and on_disk else whole[-1]
    if not wanted.isdigit():
        raise UsageError(f"{wanted!r} is not a step: a number, or newest")
    same = [step for step in steps if step.step == int(wanted)]
    if not same:
        if folders := [step.folder for step in found if step.step == int(wanted) and step.folder]:
            raise TroubleError(f"step {wanted} is in {folders[-1]} alone, which torch.distributed.checkpoint reads")
        there = ", ".join(str(step) for step in sorted({step.step for step in steps})[-8:])
        raise TroubleError(f"step {wanted} of job {job.job} is not here; there are {there}")
    return same[-1]
