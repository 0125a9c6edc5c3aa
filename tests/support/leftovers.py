"""What has a run left behind? After its end there may be no process, no shared memory and no socket of it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from support import processes

SHARED_MEMORY = Path("/dev/shm") / f"evertrain-{os.getuid()}"

found_at_close: list[str] = []
"""What jobs had left behind when their tests ended; the end of the session wants it empty."""


def after_a_while(folder: Path, name_parts: Sequence[str], *, within_s: float) -> list[str]:
    """What is still there after `within_s`, in words, of jobs that ran below `folder` or have such names."""
    deadline = time.monotonic() + within_s
    while (left := _left(folder, name_parts)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def clear_away(folder: Path, name_parts: Sequence[str]) -> None:
    """Kill and remove all of it."""
    for process in processes.of_folder(folder):
        processes.send(process)
    for run in _run_folders(name_parts):
        shutil.rmtree(run, ignore_errors=True)


def _left(folder: Path, name_parts: Sequence[str]) -> list[str]:
    marks = (str(folder), *name_parts)
    left = [f"process {process.pid}: {processes.command_line(process)}" for process in processes.of_folder(folder)]
    left += [f"shared memory {run}" for run in _run_folders(name_parts)]
    left += [f"socket {path}" for path in _unix_sockets() if any(mark in path for mark in marks)]
    return left


def _run_folders(name_parts: Sequence[str]) -> list[Path]:
    return [run for run in SHARED_MEMORY.glob("*") if any(part in run.name for part in name_parts)]


def _unix_sockets() -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:  # the eighth is the path, where there is one
            yield fields[7]
