"""What if everything of a run was killed at once? Its newest common step is in shared memory still, and goes to disk.

Whoever removes the folder of a dead run asks here first, whichever job it belongs to.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from evertrain.checkpoint import disk, slots
from evertrain.checkpoint.slots import SlotInfo
from evertrain.decide import resume
from evertrain.decide.applying import fold
from evertrain.decide.state import JobState


class Rescue(NamedTuple):
    """The steps that only the folder of a dead run had."""

    job: str
    run_dir: Path
    steps: tuple[int, ...]
    problems: tuple[str, ...]
    """Why it is not on disk; empty when it is."""


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether nobody else is at this folder: two commands may find the same dead run."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield folder.exists()
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def to_disk(folder: Path) -> Rescue | None:
    """Bring the newest step that all ranks of the run have to disk; None where there is nothing to rescue.

    Where ranks ran on other machines as well nobody here knows which step that is, so all steps go.
    """
    held = {node.name: slots.list(node / "slots") for node in sorted(folder.glob("*/"))}
    if not any(held.values()):
        return None
    try:
        owner = json.loads((folder / "owner.json").read_bytes())
        run_dir, is_member = Path(owner["run_dir"]), bool(owner["member"])
        described = json.loads((run_dir / "job.json").read_bytes())
        job, database = str(described["job"]), Path(described["database"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if is_member:
        return _all(job, run_dir, held, folder)
    state = _state(database)
    # a run that came to its end has brought to disk what was worth it
    if state is None or state.run is None or state.run.run_id != folder.name or state.ended is not None:
        return None
    if set(state.placement().values()) - set(held):
        return _all(job, run_dir, held, folder)
    on_disk = {node: disk.list(run_dir / "checkpoints" / node) for node in held}
    copies = {node: (*of_node, *on_disk[node]) for node, of_node in held.items()}
    chosen = resume.choose(copies, state.placement(), resume.rules(state))
    if chosen is None or "memory" not in chosen.tiers.values():
        return None
    problems: list[str] = []
    for node, of_node in held.items():
        if paths := _of_step(of_node, chosen):
            problems += disk.flush(paths, run_dir / "checkpoints" / node)
    return Rescue(job, run_dir, (chosen.step,), tuple(problems))


def _all(job: str, run_dir: Path, held: Mapping[str, tuple[SlotInfo, ...]], folder: Path) -> Rescue:
    steps: set[int] = set()
    problems: tuple[str, ...] = ()
    for node, of_node in held.items():
        kept, troubles = disk.flush_all(folder / node / "slots", run_dir / "checkpoints" / node)
        # those that stand to be lost are named where any cannot be kept
        steps.update((slot.step for slot in of_node) if troubles else kept)
        problems += troubles
    return Rescue(job, run_dir, tuple(sorted(steps)), problems)


def _of_step(held: tuple[SlotInfo, ...], chosen: resume.Resume) -> list[str]:
    wanted = [slot for slot in held if slot.step == chosen.step and chosen.tiers.get(slot.rank) == "memory"]
    # of two runs of the same step the later one counts
    return list({slot.rank: slot.path for slot in sorted(wanted, key=lambda slot: slot.attempt)}.values())


def _state(database: Path) -> JobState | None:
    # SQLAlchemy is slow to import, and dead runs are rare
    from evertrain.controller.store import read_log

    try:
        return fold(read_log(database))
    except Exception:  # whatever the database's libraries raise for a broken file
        return None
