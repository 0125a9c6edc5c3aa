"""`evertrain clean`: what did dead runs leave in shared memory? Their folders, which are removed here.

A folder belongs to somebody as long as one process of its run lives; what cannot be told from its owner file is old
enough to go only when nobody has touched it for an hour.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from evertrain.cli import places, processes
from evertrain.cli.memory import in_words
from evertrain.cli.parsing import Parser
from evertrain.cli.processes import ProcessId

UNOWNED_S = 3600.0


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="evertrain clean", description="Remove what dead runs left in shared memory, and say what it was."
    )
    parser.read(argv)
    removed = remove_dead_runs()
    for folder, size in removed:
        print(f"removed {folder} ({in_words(size)})")
    if not removed:
        print(f"nothing to clean in {places.user_folder()}")
    return 0


def remove_dead_runs() -> list[tuple[Path, int]]:
    """Remove run folders that nobody owns any more; what they were and their sizes."""
    removed = []
    for folder in sorted(places.user_folder().glob("*/")):
        if not is_owned(folder):
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            shutil.rmtree(folder, ignore_errors=True)
            removed.append((folder, size))
    return removed


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
