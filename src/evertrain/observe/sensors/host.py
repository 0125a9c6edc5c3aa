"""How is the machine itself? Room where the job writes, mounts, disk errors, memory, descriptors, the clock.

A mount whose server is gone holds whoever asks it, in the kernel and for good: each is asked by a thread of its own,
which is left behind if it must be. A look costs about a millisecond.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from evertrain.model.sensing import HostReading, Seen, Sign

Rules = Callable[[HostReading, float], Sequence[Sign]]

_SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "wekafs", "cifs", "fuse.ceph", "fuse.glusterfs",
     "fuse.juicefs"}
)  # fmt: skip
"""File systems of other machines: data and code lie there, whether we know of it or not."""
_ANSWER_S = 0.5
"""So long a look waits for the mounts; what comes later is part of the next one."""
_MOST_MOUNTS = 32
_UNSYNCHRONISED, _NANOSECONDS = 0x0040, 0x2000


class Clock(msgspec.Struct, frozen=True):
    """What the kernel says of its clock."""

    is_synchronised: bool
    offset_s: float


class HostSensor:
    """`rules` say what is odd; `folders` are those that the job writes to, and `shared_memory` is one in memory."""

    name = "host"
    period_s = 10.0
    limit_s = 15.0

    def __init__(
        self,
        rules: Rules,
        *,
        folders: Sequence[str],
        shared_memory: str = "/dev/shm",
        proc: Path = Path("/proc"),
        sys: Path = Path("/sys"),
        clock: Callable[[], Clock | None] | None = None,
    ) -> None:
        self._rules = rules
        self._folders = [os.path.abspath(folder) for folder in folders if folder]
        self._shared_memory = os.path.abspath(shared_memory)
        self._proc, self._sys = proc, sys
        self._clock = clock or kernel_clock
        self._probes: dict[str, _Probe] = {}

    def look(self, now: float) -> Seen:
        try:
            mounts = self._mounts()
            free, dead = self._ask(mounts)
            load_per_core = self._load()
            memory = self._memory()
        except (OSError, ValueError, IndexError) as error:
            return Seen(blind=f"{self._proc} cannot be read: {error}")
        clock = self._clock()
        shared = free.get(_mount_of(self._shared_memory, mounts))
        reading = HostReading(
            disk_free_fraction={
                folder: fraction
                for mount, folder in self._by_mount(mounts).items()
                if (fraction := free.get(mount)) is not None
            },
            mounts_dead=dead,
            disk_errors=self._disk_errors(),
            memory_free_fraction=memory,
            shared_memory_free_fraction=shared,
            descriptors_fraction=self._descriptors(),
            clock_offset_s=clock.offset_s if clock is not None else None,
            clock_is_synchronised=clock.is_synchronised if clock is not None else None,
            load_per_core=load_per_core,
        )
        return Seen(signs=tuple(self._rules(reading, now)), last=_in_words(reading))

    # -- mounts --------------------------------------------------------------------------------------------------------

    def _mounts(self) -> dict[str, str]:
        """By mount point its type; of several on top of each other the last one."""
        found = {}
        for line in (self._proc / "self/mounts").read_text().splitlines():
            fields = line.split()
            found[fields[1].replace("\\040", " ")] = fields[2]
        return found

    def _by_mount(self, mounts: dict[str, str]) -> dict[str, str]:
        """The job's folders, one for each mount point; memory that is shared is told by its own name."""
        found: dict[str, str] = {}
        for folder in self._folders:
            mount = _mount_of(folder, mounts)
            if mount != _mount_of(self._shared_memory, mounts):
                found.setdefault(mount, folder)
        return found

    def _ask(self, mounts: dict[str, str]) -> tuple[dict[str, float], dict[str, float]]:
        """What part of each is free, and for how long the others have not answered."""
        wanted = [_mount_of(folder, mounts) for folder in (*self._folders, self._shared_memory)]
        wanted += [mount for mount, kind in mounts.items() if kind in _SHARED]
        wanted = list(dict.fromkeys(wanted))[:_MOST_MOUNTS]
        for mount in [mount for mount in self._probes if mount not in wanted]:
            self._probes.pop(mount).close()
        for mount in wanted:
            if mount not in self._probes:
                self._probes[mount] = _Probe(mount)
            self._probes[mount].ask()
        deadline = time.monotonic() + _ANSWER_S
        free, dead = {}, {}
        for mount in wanted:
            silent_s = self._probes[mount].wait(deadline)
            if silent_s is not None:
                dead[mount] = silent_s
            elif (fraction := self._probes[mount].free) is not None:
                free[mount] = fraction
        return free, dead

    def close(self) -> None:
        for probe in self._probes.values():
            probe.close()

    # -- the rest ------------------------------------------------------------------------------------------------------

    def _disk_errors(self) -> dict[str, int]:
        found = {}
        for path in sorted((self._sys / "block").glob("*/device/ioerr_cnt")):
            try:
                found[path.parts[-3]] = int(path.read_text(), 16)
            except (OSError, ValueError):
                pass  # it has just been taken out
        return found

    def _memory(self) -> float | None:
        table = {}
        for line in (self._proc / "meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            table[name] = int(value.split()[0])
        available, total = table.get("MemAvailable"), table.get("MemTotal")
        return available / total if available is not None and total else None

    def _descriptors(self) -> float | None:
        try:
            used, _, most = map(int, (self._proc / "sys/fs/file-nr").read_text().split())
        except (OSError, ValueError):
            return None
        return used / most if most > 0 else None

    def _load(self) -> float:
        return float((self._proc / "loadavg").read_text().split()[0]) / (os.cpu_count() or 1)


class _Probe:
    """Asks one mount point, one question at a time."""

    def __init__(self, mount: str) -> None:
        self._mount = mount
        self._asked, self._answered = threading.Event(), threading.Event()
        self._answered.set()
        self._since = 0.0
        self._closed = False
        self.free: float | None = None
        """None: it has answered that it cannot say."""
        threading.Thread(target=self._work, name=f"mount {mount}", daemon=True).start()

    def ask(self) -> None:
        """Unless it owes an answer."""
        if self._answered.is_set():
            self._since = time.monotonic()
            self._answered.clear()
            self._asked.set()

    def wait(self, deadline: float) -> float | None:
        """For so long it has not answered; None: it has."""
        if self._answered.wait(max(0.0, deadline - time.monotonic())):
            return None
        return time.monotonic() - self._since

    def close(self) -> None:
        self._closed = True
        self._asked.set()

    def _work(self) -> None:
        while self._asked.wait() and not self._closed:
            self._asked.clear()
            try:
                self.free = _free(os.statvfs(self._mount))
            except OSError:
                self.free = None  # an error is an answer
            self._answered.set()


def _free(found: os.statvfs_result) -> float | None:
    """The scarcer of bytes and files."""
    if not found.f_blocks:
        return None
    free = (found.f_bfree if os.geteuid() == 0 else found.f_bavail) / found.f_blocks
    return min(free, found.f_favail / found.f_files) if found.f_files else free


def _mount_of(folder: str, mounts: dict[str, str]) -> str:
    """By its name alone: to ask the file system is what may never come back."""
    inside = [mount for mount in mounts if folder == mount or folder.startswith(mount.rstrip("/") + "/")]
    return max(inside, key=len, default="/")


def _in_words(reading: HostReading) -> str:
    words = [f"{free:.0%} of {folder} free" for folder, free in reading.disk_free_fraction.items()]
    if reading.shared_memory_free_fraction is not None:
        words.append(f"{reading.shared_memory_free_fraction:.0%} of shared memory")
    if reading.memory_free_fraction is not None:
        words.append(f"{reading.memory_free_fraction:.0%} of memory")
    if reading.clock_is_synchronised is False:
        words.append("clock not synchronised")
    words += [f"{mount} silent for {for_s:.0f} s" for mount, for_s in reading.mounts_dead.items()]
    if reading.load_per_core is not None:
        words.append(f"load {reading.load_per_core:.1f} a core")
    return ", ".join(words)


class _Timex(ctypes.Structure):
    """`struct timex` of linux/timex.h, as 64-bit systems have it."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 512),
    )


def kernel_clock() -> Clock | None:
    """Reads, and changes nothing; None where this is not allowed."""
    timex = _Timex()
    try:
        if ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex)) < 0:
            return None
    except (OSError, AttributeError):
        return None
    unit = 1e9 if timex.status & _NANOSECONDS else 1e6
    return Clock(not timex.status & _UNSYNCHRONISED, timex.offset / unit)
