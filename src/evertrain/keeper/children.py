"""Who of ours is alive, and how did the others end? Every child of the keeper, by pid and pidfd.

A rank that was forked from the zygote becomes the keeper's child when the process between them has ended, maybe
before the zygote has told its pid; orphans of ranks become the keeper's children too. So a dead child that is not
known is left alone while such an answer is open, and only then reaped as an orphan.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from evertrain.keeper.loop import Loop

CLEANER_LIMIT_S = 2.0
CLEANERS = (b"multiprocessing.resource_tracker", b"torch_shm_manager")
"""Helpers that Python and torch start beside a rank, to remove what it could not remove itself."""

send_signal = signal.pidfd_send_signal


@dataclass(frozen=True)
class Exit:
    """How and when a process ended."""

    status: int
    """Exit code, or the negative number of the signal that ended it."""
    time: float
    """When the keeper heard of it, by the machine's monotonic clock: nobody can set it."""
    core: bool
    """Whether it left a core dump."""

    def __str__(self) -> str:
        return f"exit code {self.status}" if self.status >= 0 else f"signal {signal_name(-self.status)}"


@dataclass(frozen=True)
class Child:
    """A process that is known. Its number cannot pass to another one while the descriptor is open."""

    pid: int
    pidfd: int
    start_ticks: int

    def send(self, signal_number: int) -> None:
        try:
            send_signal(self.pidfd, signal_number)
        except (ProcessLookupError, PermissionError):  # gone, or running as somebody else
            pass

    def send_group(self, signal_number: int) -> None:
        """To its whole process group, which it leads. Only before it is reaped: then the number is still its own."""
        try:
            os.killpg(self.pid, signal_number)
        except (ProcessLookupError, PermissionError):
            pass


class Children:
    """All child processes, each with what is to be done when it ends."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._known: dict[int, tuple[Child, Callable[[Exit], None]]] = {}
        self._cleaners: dict[int, float] = {}
        self.answers_open = 0
        """Fork requests whose pids are not told yet."""
        self._heard_signal, tell_signal = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(tell_signal, warn_on_full_buffer=False)
        self._look_again = False
        loop.watch(self._heard_signal, self._signalled)

    def adopt(self, pid: int, ended: Callable[[Exit], None]) -> Child:
        """Know `pid` from now on. `ended` is called before it is reaped, so its group can still be told apart."""
        child = Child(pid, os.pidfd_open(pid), start_ticks(pid))
        self._known[pid] = child, ended
        self._loop.watch(child.pidfd, lambda: self._died(child))
        return child

    def kill_orphans(self, is_doomed: Callable[[int, int], bool] = lambda pid, session: True) -> bool:
        """Kill those of `orphans()` that `is_doomed(pid, session)` names; whether there are any.

        Those that clean up behind dead processes get a moment to do so: otherwise semaphores and shared memory stay.
        """
        found, now = False, time.monotonic()
        cleaners, self._cleaners = self._cleaners, {}
        for pid, session in self.orphans():
            if is_doomed(pid, session):
                found = True
                if pid in cleaners or _cleans_up(pid):
                    self._cleaners[pid] = cleaners.get(pid, now + CLEANER_LIMIT_S)
                    if now < self._cleaners[pid]:
                        continue
                self._kill_orphan(pid)
        return found

    def _kill_orphan(self, pid: int) -> None:
        # nobody else reaps it, so its number is still its own
        try:
            os.kill(pid, signal.SIGKILL)
        except PermissionError:  # it runs as somebody else
            pass

    def kill_all(self) -> None:
        """Kill every child, known or not."""
        for child, _ in self._known.values():
            child.send(signal.SIGKILL)
        self.kill_orphans()

    @property
    def none_left(self) -> bool:
        return not self._known and not any(self.orphans())

    def reap_orphans(self) -> None:
        """Reap the dead that nobody knows. Called at the end of a turn: by then the known ones have been seen."""
        while self._look_again and not self.answers_open:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                found = None
            if found is None:
                self._look_again = False
            elif found.si_pid in self._known:
                return  # its pidfd is readable: the next turn records it
            else:
                os.waitid(os.P_PID, found.si_pid, os.WEXITED)

    @property
    def has_more_to_reap(self) -> bool:
        return self._look_again and not self.answers_open

    def orphans(self) -> Iterator[tuple[int, int]]:
        """Pid and session of every living child that nobody knows: what ranks have left behind."""
        if self.answers_open:
            return
        for pid in _children_of_this_process():
            if pid not in self._known and (session := session_of(pid)) is not None:
                yield pid, session

    def _signalled(self) -> None:
        try:
            os.read(self._heard_signal, 4096)
        except BlockingIOError:
            pass
        self._look_again = True

    def _died(self, child: Child) -> None:
        now = time.monotonic()
        how = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
        assert how is not None
        self._loop.unwatch(child.pidfd)
        ended = self._known[child.pid][1]
        status = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
        ended(Exit(status, now, core=how.si_code == os.CLD_DUMPED))
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        del self._known[child.pid]
        os.close(child.pidfd)


def start_ticks(pid: int) -> int:
    """When the process began, in clock ticks since boot: with the pid it names one process for ever."""
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def session_of(pid: int) -> int | None:
    """The session of a living process; None for one that has ended."""
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[3])


def _cleans_up(pid: int) -> bool:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(name in line for name in CLEANERS)


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from `state` on; the name before them may hold blanks and parentheses."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _children_of_this_process() -> list[int]:
    own = os.getpid()
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{own}/children").read_text().split()]
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
        return [pid for pid in pids if (fields := _stat(pid)) and int(fields[1]) == own]
