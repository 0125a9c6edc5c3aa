"""What does the kernel say of a rank's process? Its state, what it used of a processor, and what kept it from one.

Read ten times a second while the rank communicates, so each look is a few system calls: files of /proc stay open. How
long threads were runnable and did not run is known of each thread alone; a process with many is asked twice a second.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from evertrain.trace import layout
from evertrain.trace.cgroups import Groups

_MANY_THREADS = 8
_MANY_EVERY_NS = 500_000_000
_WIRE_EVERY_NS = 1_000_000_000
_MOST_INTERFACES = 64 << 10
_TICK_US = 1_000_000 // os.sysconf("SC_CLK_TCK")
_HOST = layout.KINDS["host"]
UNKNOWN_CARRIER = 255


class _Counts(NamedTuple):
    """What counts up."""

    throttled: int
    throttled_us: int
    faults: int
    read_bytes: int
    wrote_bytes: int


class Host:
    """One rank's process; the first look is what the next one is compared with."""

    def __init__(self, rank: int, pid: int, device: int = -1) -> None:
        """Raises OSError where it cannot be seen."""
        self.rank, self.pid = rank, pid
        self._device = device
        self._stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self._io = _opened(f"/proc/{pid}/io")
        self._interfaces = _opened(f"/proc/{pid}/net/dev")
        self._wire_ns, self._wire_bytes = 0, -1
        self._tasks = _opened(f"/proc/{pid}/task", os.O_DIRECTORY)
        self._groups = Groups(pid)
        self._threads: dict[str, tuple[int, int]] = {}
        self._threads_ns = 0
        self._ticks: int | None = None
        self._before: _Counts | None = None
        self._before_ns = 0
        self.state = ""
        """Letter, as of the last look."""

    def close(self) -> None:
        for descriptor in (self._stat, self._io, self._tasks, self._interfaces):
            if descriptor >= 0:
                os.close(descriptor)
        self._stat = self._io = self._tasks = self._interfaces = -1

    def look(self, now_ns: int, carrier: bool | None) -> bytes | None:
        """A record without its number, of all since the last look; None: there is nothing to compare yet, or it has
        ended. `carrier`: of the interface of its traffic.
        """
        try:
            fields = os.pread(self._stat, 1024, 0).rpartition(b")")[2].split()
        except ProcessLookupError:
            fields = []
        if len(fields) < 18:
            return None
        self.state = fields[0].decode()
        threads = int(fields[17])
        ticks = int(fields[11]) + int(fields[12])
        cpu_us, delay_us = self._scheduled(now_ns, threads, ticks)
        read_bytes, wrote_bytes = self._storage()
        counts = _Counts(*self._groups.throttled(), int(fields[9]), read_bytes, wrote_bytes)
        before, self._before = self._before, counts
        dt_us, self._before_ns = (now_ns - self._before_ns) // 1000, now_ns
        if before is None:
            return None
        # a group's counts are another group's once the process has moved
        passed = _Counts(*(now - then if now >= then else 0 for now, then in zip(counts, before, strict=True)))
        return layout.HOST_STRUCT.pack(
            0, _HOST, 0, 0, 0, 0, self._device, self.rank, layout.NOBODY, 0, 0,
            now_ns, min(dt_us, layout.UNSEEN), min(threads, 0xFFFF), fields[0][0], self._groups.is_frozen(),
            cpu_us, delay_us, passed.throttled_us, passed.throttled,
            UNKNOWN_CARRIER if carrier is None else carrier, 0, 0,
            passed.faults, passed.read_bytes, passed.wrote_bytes, self._wire(now_ns),
        )[8:]  # fmt: skip

    def _scheduled(self, now_ns: int, threads: int, ticks: int) -> tuple[int, int]:
        """Microseconds that its threads ran, and that they waited for a processor, since this was last seen."""
        if threads > _MANY_THREADS and now_ns - self._threads_ns < _MANY_EVERY_NS:
            return layout.UNSEEN, layout.UNSEEN
        known, self._threads, self._threads_ns = self._threads, {}, now_ns
        ran, waited = 0, 0
        for name in _listed(self._tasks):
            seen = self._thread(name)
            if seen is None:
                continue
            self._threads[name] = seen
            # one that has begun since then has all of it to show; at the first look nobody can say
            before = known.get(name, (0, 0) if known else seen)
            ran += max(0, seen[0] - before[0])
            waited += max(0, seen[1] - before[1])
        if not self._threads:  # a kernel without these statistics
            passed = ticks - (self._ticks if self._ticks is not None else ticks)
            self._ticks = ticks
            return passed * _TICK_US, layout.UNSEEN
        return ran // 1000, waited // 1000

    def _thread(self, name: str) -> tuple[int, int] | None:
        try:
            descriptor = os.open(f"{name}/schedstat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._tasks)
        except OSError:
            return None
        try:
            ran, waited, _ = os.read(descriptor, 128).split()
            return int(ran), int(waited)
        except (OSError, ValueError):
            return None
        finally:
            os.close(descriptor)

    def _wire(self, now_ns: int) -> int:
        """Bytes that the interfaces of its network, but the loopback, have sent and received since they were read last;
        once a second: there may be hundreds of them."""
        if self._interfaces < 0 or now_ns - self._wire_ns < _WIRE_EVERY_NS:
            return 0
        try:
            lines = os.pread(self._interfaces, _MOST_INTERFACES, 0).splitlines()[2:]
            total = 0
            for line in lines:
                name, _, counts = line.partition(b":")
                if name.strip() != b"lo" and len(fields := counts.split()) > 8:
                    total += int(fields[0]) + int(fields[8])
        except (OSError, ValueError):
            return 0
        before, self._wire_bytes, self._wire_ns = self._wire_bytes, total, now_ns
        return max(0, total - before) if before >= 0 else 0

    def _storage(self) -> tuple[int, int]:
        """Bytes that it had read from storage and written there; 0 where that is not ours to see."""
        if self._io < 0:
            return 0, 0
        try:
            said = dict(line.split(b": ") for line in os.pread(self._io, 512, 0).splitlines())
            return int(said[b"read_bytes"]), int(said[b"write_bytes"])
        except (OSError, KeyError, ValueError):
            return 0, 0


def _opened(path: str, flags: int = 0) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    except OSError:
        return -1


def _listed(descriptor: int) -> list[str]:
    try:
        return os.listdir(descriptor) if descriptor >= 0 else []
    except OSError:
        return []
