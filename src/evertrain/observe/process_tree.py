"""Which processes belong to a rank, and how does each of them stand? As the kernel tells it, without touching any.

A rank's own process and all below it. Nothing here waits for a process: what is stopped, or sleeps in the kernel and
heeds no signal, is described as any other. `cmdline` is not read of the latter: that may wait for the same thing.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from evertrain.model.stacks import Frame, ProcessKind, Thread
from evertrain.trace import cgroups

State = Literal["", "stopped", "uninterruptible", "ended"]

_FREEZERS = ("__refrigerator", "do_freezer_trap")
_POLLING = frozenset({"gloo_tcp_loop"})
"""Each of gloo's groups has one, and together they use about a hundredth of a core while nothing comes."""
_OWN = "evertrain-"
"""Begins the names of our own processes."""
_LOADER_NAME = "pt_data_worker"
_LOADER_FILE = re.compile(r"torch/utils/data/_utils/(worker|fetch)\.py$|(^|/)(dataloader|data_loader)s?\.py$")
_LOADER_FUNCTION = re.compile(r"(^|\.)_?(data_)?worker_(loop|main|fn)$")
_CHECKPOINT_FILE = re.compile(
    r"torch/distributed/checkpoint/|torch/serialization\.py$|(^|/)\w*(checkpoint|ckpt)\w*(\.py$|/)", re.IGNORECASE
)
_CHECKPOINT_FUNCTION = re.compile(r"checkpoint|ckpt", re.IGNORECASE)
_CHECKPOINT_NAME = re.compile(r"checkpoint|ckpt|async_?save", re.IGNORECASE)
_PYTHON = re.compile(r"python|pypy", re.IGNORECASE)
_PYTHON_LIBRARY = re.compile(rb"/libpython3[^/\n]*\.so")

_X86_64 = {
    0: "read", 1: "write", 7: "poll", 8: "lseek", 9: "mmap", 11: "munmap", 16: "ioctl", 17: "pread64", 18: "pwrite64",
    19: "readv", 20: "writev", 22: "pipe", 23: "select", 24: "sched_yield", 34: "pause", 35: "nanosleep",
    42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl",
    73: "flock", 74: "fsync", 75: "fdatasync", 82: "rename", 87: "unlink", 128: "rt_sigtimedwait",
    130: "rt_sigsuspend", 202: "futex", 217: "getdents64", 219: "restart_syscall", 230: "clock_nanosleep",
    232: "epoll_wait", 247: "waitid", 257: "openat", 262: "newfstatat", 270: "pselect6", 271: "ppoll",
    281: "epoll_pwait", 288: "accept4", 332: "statx", 4: "stat", 5: "fstat", 2: "open", 3: "close",
}  # fmt: skip
_ARM64 = {
    22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 35: "unlinkat", 38: "renameat", 56: "openat",
    57: "close", 61: "getdents64", 62: "lseek", 63: "read", 64: "write", 65: "readv", 66: "writev", 67: "pread64",
    68: "pwrite64", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 80: "fstat", 82: "fsync", 83: "fdatasync",
    95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield", 128: "restart_syscall",
    133: "rt_sigsuspend", 137: "rt_sigtimedwait", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom",
    211: "sendmsg", 212: "recvmsg", 215: "munmap", 222: "mmap", 242: "accept4", 260: "wait4", 291: "statx",
}  # fmt: skip


def of_machine(machine: str) -> Mapping[int, str]:
    return _ARM64 if machine in ("aarch64", "arm64") else _X86_64


SYSTEM_CALLS = of_machine(platform.machine())
"""By their numbers on this machine, those that a process may be found in for long."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a rank, at one moment."""

    rank: int
    pid: int
    kind: ProcessKind
    """As far as its name tells; its stack may tell better, see `kind`."""
    state: State
    waits_in: str
    """Where its main thread sleeps in the kernel: the system call, or the kernel's function; empty if not known."""
    is_python: bool
    command: str


def processes(rank: int, pid: int) -> list[Process]:
    """The rank's own process first; those that have ended meanwhile are left out, but for the rank's own."""
    found = []
    for member in tree(pid):
        process = _process(rank, pid, member)
        if process is not None:
            found.append(process)
    return found


def own(rank: int, pid: int) -> Process:
    """The rank's own process alone."""
    return _process(rank, pid, pid) or _ended(rank, pid)


def kind(process: Process, threads: tuple[Thread, ...]) -> ProcessKind:
    """What it is, by its stack where there is one."""
    if process.kind != "helper":
        return process.kind
    frames = [frame for thread in threads for frame in thread.frames]
    if any(_is_loader(frame) for frame in frames):
        return "loader"
    if any(_CHECKPOINT_FILE.search(frame.file) or _CHECKPOINT_FUNCTION.search(frame.function) for frame in frames):
        return "checkpoint"
    return "helper"


def _is_loader(frame: Frame) -> bool:
    return bool(_LOADER_FILE.search(frame.file)) or bool(_LOADER_FUNCTION.search(frame.function))


def _process(rank: int, root: int, pid: int) -> Process | None:
    fields = stat(pid)
    if fields is None or fields[0] in "ZX":
        return _ended(rank, pid) if pid == root else None
    name = _read(f"/proc/{pid}/comm").strip()
    if name.startswith(_OWN):
        return None
    state = state_of(pid, fields[0])
    command = name
    if state != "uninterruptible":
        command = _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip() or name
    return Process(
        rank=rank,
        pid=pid,
        kind="trainer" if pid == root else _kind_by_name(root, name, command),
        state=state,
        waits_in=waits_in(pid, fields[0]),
        is_python=_is_python(pid, state),
        command=command[:300],
    )


def _ended(rank: int, pid: int) -> Process:
    return Process(rank=rank, pid=pid, kind="trainer", state="ended", waits_in="", is_python=False, command="")


def _kind_by_name(root: int, name: str, command: str) -> ProcessKind:
    if name.startswith(_LOADER_NAME):
        return "loader"
    if _CHECKPOINT_NAME.search(name):
        return "checkpoint"
    # a fork has the command line of its parent, which tells nothing of it
    if _CHECKPOINT_NAME.search(command) and command != _read(f"/proc/{root}/cmdline").replace("\0", " ").strip():
        return "checkpoint"
    return "helper"


def _is_python(pid: int, state: State) -> bool:
    try:
        if _PYTHON.search(os.path.basename(os.readlink(f"/proc/{pid}/exe"))):
            return True
        # embedded in another program; not asked of one that may never let go of its memory map
        return state != "uninterruptible" and bool(_PYTHON_LIBRARY.search(Path(f"/proc/{pid}/maps").read_bytes()))
    except OSError:
        # not ours to see; whoever reads its stack will say why
        return True


# --- one process


def tree(pid: int) -> list[int]:
    """The pids of the process and of all below it, its own first."""
    found, waiting = [], [pid]
    while waiting:
        found.append(member := waiting.pop())
        for thread in threads(member):
            waiting += map(int, _read(f"/proc/{member}/task/{thread}/children").split())
    return found


def threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on; the command may contain anything, so count from its end."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split() or None


def polling_ticks(pid: int) -> int:
    """Processor time of those threads of a process that only ask again and again whether something has come."""
    ticks = 0
    for thread in threads(pid):
        head, _, fields = _read(f"/proc/{pid}/task/{thread}/stat").rpartition(")")
        if head.partition("(")[2] in _POLLING:
            ticks += sum(map(int, fields.split()[11:13]))
    return ticks


def state_of(pid: int, letter: str) -> State:
    """By the state of its main thread, and of the others where that one is stopped."""
    if letter in "ZX":
        return "ended"
    if letter in "Tt":
        return "stopped" if all(one in "Tt" for one in _thread_states(pid)) else ""
    if letter in "DS" and is_frozen(pid):
        return "stopped"
    return "uninterruptible" if letter == "D" else ""


def is_frozen(pid: int) -> bool:
    """By the freezer of its control group: the kernel shows it as asleep, or as uninterruptible."""
    if _read(f"/proc/{pid}/wchan") in _FREEZERS:
        return True
    # newer kernels freeze whoever sleeps where he sleeps
    return any(map(cgroups.is_frozen, cgroups.lines(pid)))


def waits_in(pid: int, letter: str) -> str:
    """The system call's name is the same on all kernels; of one that heeds no signal, the function says more."""
    call = system_call(pid)
    named = SYSTEM_CALLS.get(call[0], f"system call {call[0]}") if call is not None else ""
    where = _read(f"/proc/{pid}/wchan")
    where = "" if where == "0" or letter == "R" else where
    return where or named if letter == "D" else named or where


def system_call(pid: int) -> tuple[int, str] | None:
    """The number of the system call that the main thread is in, and its first argument; None: in none, or not seen."""
    number, _, rest = _read(f"/proc/{pid}/syscall").partition(" ")
    if not number.isdecimal():
        return None
    return int(number), rest.partition(" ")[0]


def _thread_states(pid: int) -> Iterator[str]:
    for thread in threads(pid):
        if fields := _read(f"/proc/{pid}/task/{thread}/stat").rpartition(")")[2].split():
            yield fields[0]


def _read(path: str) -> str:
    """Empty where it is gone, or not ours to see."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
