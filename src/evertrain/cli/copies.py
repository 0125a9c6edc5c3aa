"""Which copies of a job's checkpoints can be reached from here? By step, with the place of every one.

Memory of this machine while the job runs, and its nodes' folders on disk: what other machines hold is theirs to list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from evertrain.checkpoint import disk, slots
from evertrain.checkpoint.slots import SlotInfo
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError
from evertrain.worker import slots as layout

TIERS = ("memory", "disk")


@dataclass
class Step:
    """One save of one step, of one attempt."""

    step: int
    attempt: int
    world_size: int
    time: float
    copies: list[SlotInfo] = field(default_factory=list)

    def ranks(self, tier: str) -> list[int]:
        return sorted({copy.rank for copy in self.copies if copy.tier == tier})

    @property
    def missing(self) -> list[int]:
        """Ranks of which there is no copy here."""
        have = {copy.rank for copy in self.copies}
        return [rank for rank in range(self.world_size) if rank not in have]

    @property
    def bytes(self) -> int:
        """Of one copy of each rank."""
        return sum({copy.rank: copy.bytes for copy in self.copies}.values())

    def best(self) -> dict[int, list[SlotInfo]]:
        """Copies of each rank, those on disk first: they stay where they are."""
        found: dict[int, list[SlotInfo]] = defaultdict(list)
        for copy in sorted(self.copies, key=lambda copy: copy.tier):
            found[copy.rank].append(copy)
        return dict(sorted(found.items()))


def of_job(job: KnownJob) -> list[Step]:
    """Every step of which anything is here, oldest attempt first, then by step."""
    found: dict[tuple[int, int], Step] = {}
    for copy in _all(job):
        key = (copy.attempt, copy.step)
        step = found.setdefault(key, Step(copy.step, copy.attempt, copy.world_size, copy.time))
        step.time = min(step.time, copy.time)
        step.copies.append(copy)
    return [step for _, step in sorted(found.items())]


def _all(job: KnownJob) -> Iterable[SlotInfo]:
    for node in _folders(job.run_folder):
        yield from slots.list(node / "slots")
    for node in _folders(job.run_dir / "checkpoints"):
        yield from disk.list(node)


def broken(job: KnownJob) -> list[str]:
    """Files of checkpoints on disk that are no copies: cut off, with a damaged header, or found damaged before."""
    files = (job.run_dir / "checkpoints").glob("*/step-*/r*")
    return [
        str(file)
        for file in sorted(files)
        if (header := layout.read(str(file))) is None or header.state != layout.COMPLETE
    ]


def _folders(parent: Path) -> list[Path]:
    try:
        return sorted(path for path in parent.iterdir() if path.is_dir())
    except OSError:
        return []


def choose(job: KnownJob, wanted: str | None) -> Step:
    """The step of this number, of its newest attempt; by default the newest that is whole."""
    steps = of_job(job)
    if not steps:
        raise TroubleError(f"job {job.job} has no checkpoint here ({job.run_dir / 'checkpoints'})")
    if wanted is None or wanted == "newest":
        whole = [step for step in steps if not step.missing]
        if not whole:
            raise TroubleError(
                f"no step of job {job.job} is whole here; `evertrain checkpoint list` shows what there is"
            )
        return whole[-1]
    if not wanted.isdigit():
        raise UsageError(f"{wanted!r} is not a step: a number, or newest")
    found = [step for step in steps if step.step == int(wanted)]
    if not found:
        there = ", ".join(str(step) for step in sorted({step.step for step in steps})[-8:])
        raise TroubleError(f"step {wanted} of job {job.job} is not here; there are {there}")
    return found[-1]
