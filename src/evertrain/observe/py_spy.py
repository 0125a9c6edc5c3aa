"""What does py-spy say of a process? Its dump as it is, or why there is none.

`--nonblocking` reads the memory of a process that goes on meanwhile: nothing is stopped, and now and then a stack is
torn. With native frames py-spy has to stop the process, for long where its libraries are large; that is done only to
whom it cannot hurt any more. Whoever asks waits no longer than he said, also for a py-spy that hangs in the kernel.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from typing import Literal

import msgspec

from evertrain.observe import process_tree

Problem = Literal["", "absent", "refused", "ended", "unreadable", "late"]

_NICE = 5
"""Ranks need the processors more; much nicer, and it would not be done in time where all of them are busy."""
_REFUSED = re.compile(r"Permission denied|Operation not permitted|EPERM|EACCES|Permission Denied", re.IGNORECASE)
_NO_FRAME = re.compile(r'"frames": \[\s*[^\]\s]')


class Answer(msgspec.Struct, frozen=True):
    text: str = ""
    problem: Problem = ""
    failure: str = ""
    """In words, for the user."""


def find() -> str | None:
    """py-spy beside our own interpreter, or on the PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def dump(program: str, pid: int, limit_s: float, *, native: bool = False) -> Answer:
    """One dump in JSON."""
    how = "--native" if native else "--nonblocking"
    command = [program, "dump", how, "--json", "--pid", str(pid)]
    was_stopped = not native or _is_stopped(pid)
    try:
        running = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return Answer(problem="absent", failure=f"py-spy cannot be started: {error.strerror}")
    try:
        os.setpriority(os.PRIO_PROCESS, running.pid, _NICE)
    except OSError:
        pass  # it has ended already
    try:
        said, complained = running.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _give_up(running)
        if not was_stopped and _is_stopped(pid):
            # it was killed between stopping the process and letting go of it
            _go_on(pid)
        return Answer(problem="late", failure=f"py-spy has not answered within {limit_s:.1f} s")
    if running.returncode == 0 and _NO_FRAME.search(text := said.decode(errors="replace")):
        return Answer(text)
    return _refusal(complained.decode(errors="replace"), pid)


def _refusal(complaint: str, pid: int) -> Answer:
    fields = process_tree.stat(pid)
    if fields is None or fields[0] in "ZX":
        return Answer(problem="ended", failure="it has ended")
    if _REFUSED.search(complaint) or not _may_read(pid):
        return Answer(problem="refused", failure="py-spy may not read it")
    first = next((line for line in complaint.splitlines() if line.strip()), "it shows no stack")
    return Answer(problem="unreadable", failure=f"py-spy: {first.removeprefix('Error: ')[:200]}")


def _may_read(pid: int) -> bool:
    """Whether the kernel lets us see its memory; py-spy does not always say that this was its trouble."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        pass
    return True


def _give_up(running: subprocess.Popen[bytes]) -> None:
    """End it, and wait only for as long as that usually takes: what sleeps in the kernel ends when it can."""
    running.kill()
    try:
        running.communicate(timeout=0.2)
    except subprocess.TimeoutExpired:
        for stream in (running.stdout, running.stderr):
            if stream is not None:
                stream.close()


def _is_stopped(pid: int) -> bool:
    fields = process_tree.stat(pid)
    return fields is not None and fields[0] in "Tt"


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except OSError:
        pass
