"""Which process is that, and is it still the same one? A pid alone may have been given to somebody else since."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

STATE, START_TICKS = 0, 19  # fields of /proc/<pid>/stat, counted after the command's closing parenthesis


class ProcessId(NamedTuple):
    """A pid and the time, in clock ticks since boot, at which its process began: together they never come again."""

    pid: int
    start_ticks: int


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None where there is none, or only a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[STATE] in "ZX" else ProcessId(pid, int(fields[START_TICKS]))


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs; a zombie does not."""
    return identify(process.pid) == process


def send(process: ProcessId, signal_number: int = signal.SIGKILL) -> bool:
    """Send a signal to this very process; False where it is gone."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # with the descriptor open the pid cannot change hands between the check and the signal
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(handle, signal_number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def recorded(job_dir: Path) -> dict[str, ProcessId]:
    """The processes that a job wrote down in `<job dir>/processes/`, by name."""
    found = {}
    for file in sorted(job_dir.glob("processes/*.json")):
        try:
            record = json.loads(file.read_bytes())
            found[file.stem] = ProcessId(record["pid"], record["start_ticks"])
        except (FileNotFoundError, json.JSONDecodeError, KeyError):
            continue  # being written, or gone again, at this very moment
    return found


def of_folder(folder: Path) -> Iterator[ProcessId]:
    """Every live process started for `folder`: its environment, command line or working directory names the folder."""
    mark = str(folder)
    own_family = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in psutil.process_iter():
        try:
            if process.pid in own_family or mark not in _words(process):
                continue
        except psutil.Error:
            continue  # gone meanwhile, or not ours to see
        if (found := identify(process.pid)) is not None:
            yield found


def command_line(process: ProcessId) -> str:
    try:
        return " ".join(psutil.Process(process.pid).cmdline())
    except psutil.Error:
        return "(gone)"


def _words(process: psutil.Process) -> str:
    return "\n".join((process.cwd(), *process.cmdline(), *process.environ().values()))
