"""`evertrain clean`: what did dead runs leave in shared memory? Their folders, which are removed here.

A folder belongs to somebody as long as one process of its run lives; what cannot be told from its owner file is old
enough to go only when nobody has touched it for an hour. A step that only the folder has is brought to disk first.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from evertrain.cli import places, processes, rescue
from evertrain.cli.memory import in_words
from evertrain.cli.parsing import Parser
from evertrain.cli.processes import ProcessId
from evertrain.cli.rescue import Rescue
from evertrain.model.errors import TroubleError

UNOWNED_S = 3600.0


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="evertrain clean", description="Remove what dead runs left in shared memory, and say what it was."
    )
    parser.read(argv)
    said: list[str] = []
    removed = remove_dead_runs(said.append)
    for line in said:
        print(line)
    for folder, size in removed:
        print(f"removed {folder} ({in_words(size)})")
    if not removed and not said:
        print(f"nothing to clean in {places.user_folder()}")
    return 0


def remove_dead_runs(
    say: Callable[[str], None], here: Path | None = None, fresh: bool = False
) -> list[tuple[Path, int]]:
    """Remove run folders that nobody owns any more; what they were and their sizes.

    `here` is the run dir of a job that is about to start: it must not start without a step that cannot be brought to
    disk, unless it starts `fresh`.
    """
    removed = []
    for folder in sorted(places.user_folder().glob("*/")):
        with rescue.alone(folder) as alone:
            if not alone or is_owned(folder):
                continue
            if not _is_empty_of_steps(folder, say, here, fresh):
                continue
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder, ignore_errors=True)
            removed.append((folder, size))
    return removed


def _is_empty_of_steps(folder: Path, say: Callable[[str], None], here: Path | None, fresh: bool) -> bool:
    """Whether the folder holds no step that is not on disk as well, or one that nobody wants."""
    rescued = rescue.to_disk(folder)
    if rescued is None:
        return True
    if not rescued.problems:
        say(f"{_steps(rescued, 'is', 'are')} on disk now; the processes of the job had been killed")
        return True
    if rescued.run_dir != here:
        say(_lost(rescued, folder))
        return False
    if not fresh:
        raise TroubleError(f"{_lost(rescued, folder)}; make room, or --fresh gives it up")
    return True


def _lost(rescued: Rescue, folder: Path) -> str:
    why = "; ".join(dict.fromkeys(rescued.problems))
    return f"{_steps(rescued, 'lies', 'lie')} in {folder} only and cannot be brought to disk ({why})"


def _steps(rescued: Rescue, one: str, many: str) -> str:
    listed = ", ".join(map(str, rescued.steps))
    if len(rescued.steps) == 1:
        return f"step {listed} of job {rescued.job} {one}"
    return f"steps {listed} of job {rescued.job} {many}" if listed else f"the newest step of job {rescued.job} {one}"


def is_owned(folder: Path) -> bool:
    """Whether any process of the run lives."""
    try:
        owner = json.loads((folder / "owner.json").read_bytes())
        named = [owner, *owner["processes"].values()]
        known = [ProcessId(process["pid"], process["start_ticks"]) for process in named]
        booted = owner["boot_id"]
    except (OSError, ValueError, KeyError, TypeError):
        # being made at this moment, or broken
        return time.time() - _touched(folder) < UNOWNED_S
    return booted == processes.boot_id() and any(processes.is_alive(process) for process in known)


def _touched(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except OSError:
        return time.time()
