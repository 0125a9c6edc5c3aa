"""How does a process that was forked or started ahead look like `python -u script.py args`?

Everything that shows where a process came from is set here: command line and name (`ps`, `pkill -f`, py-spy), standard
input, `sys.orig_argv`. Nothing in this module is about what the process does.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
ARG_START, ARG_END = 45, 46
"""Fields of /proc/self/stat, counted from the state, which follows the name."""

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have this process killed when its parent ends, and end it now if that has happened already."""
    _libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def name_process(name: str) -> None:
    """The name in `ps` and `top`, of which the kernel keeps 15 bytes."""
    _libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def show_command_line(words: Sequence[str]) -> None:
    """Write `words` over the argument area, which the keeper has made just as long (keeper/interpreter.py)."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[ARG_START]), int(fields[ARG_END])
    line = b"".join(os.fsencode(word) + b"\0" for word in words)
    room = end - start
    # longer where `${local_rank}` stands for more than one digit and where a restart has brought longer arguments;
    # the last byte has to stay zero
    shown = line if len(line) <= room else line[: room - 1]
    ctypes.memmove(start, shown.ljust(room, b"\0"), room)


def take_stdin(descriptor: int) -> None:
    """Make the real standard input what the bootstrap has been read from until now."""
    os.dup2(descriptor, 0)
    os.close(descriptor)
    # the C library has seen the end of the bootstrap, and input() on a terminal would believe it
    _libc.clearerr(ctypes.c_void_p.in_dll(_libc, "stdin"))
    if (old := sys.stdin) is not None:
        binary = open(0, "rb", closefd=False)  # noqa: SIM115
        binary.raw.name = "<stdin>"  # type: ignore[attr-defined]
        sys.stdin = sys.__stdin__ = io.TextIOWrapper(  # type: ignore[misc]
            binary, encoding=old.encoding, errors=old.errors, newline="\n", write_through=True
        )
        sys.stdin.mode = "r"  # type: ignore[misc]


def redirect_output(stdout: str, stderr: str) -> None:
    """Send output to files, which outlive whoever reads them; where they cannot be opened, nowhere."""
    for descriptor, path in ((1, stdout), (2, stderr)):
        try:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError:
            opened = os.open(os.devnull, os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
