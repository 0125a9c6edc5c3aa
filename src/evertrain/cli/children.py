"""How are keepers, agents and the controller kept alive? Each is started again when it dies, later each time.

Those of a node that a drill has taken away stay away with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import BinaryIO

from evertrain.cli import places, processes

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
CLEAN_DELAY_S = 1.0
STEADY_S = 10.0
"""Who has lived for so long starts again without delay."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """One process of the job, however often it is started."""

    name: str
    argv: Sequence[str]
    spec: Path
    content: bytes
    """Of the spec; written at each start, since a drill or the keeper itself may have removed it."""
    log: Path
    environ: Mapping[str, str]
    descriptors: tuple[int, ...] = ()
    stale: tuple[Path, ...] = ()
    """What its predecessor, known to be dead, may have left in the way: a socket cannot be bound twice."""
    stdin: bool = False
    """Ranks read what the user pipes into the command, so their keeper inherits it."""


class Child:
    """A role and the process that plays it now."""

    def __init__(self, role: Role, record: Path) -> None:
        self.role = role
        self.failures = 0
        self._record = record
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._due: float | None = None
        self._away_until = 0.0
        self.pidfd: int | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        role = self.role
        role.spec.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in role.stale:
            leftover.unlink(missing_ok=True)
        places.write_private(role.spec, role.content)
        with _opened(role.log) as log:
            self._process = subprocess.Popen(
                role.argv,
                stdin=None if role.stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(role.environ),
                pass_fds=role.descriptors,
                start_new_session=True,
            )
        self._started, self._due = time.monotonic(), None
        self.pidfd = os.pidfd_open(self._process.pid)
        self._write_down(self._process.pid)

    def look(self) -> int | None:
        """The exit code of a process that has just ended; None otherwise."""
        if self._process is None or (status := self._process.poll()) is None:
            return None
        if self.pidfd is not None:
            os.close(self.pidfd)
        if time.monotonic() - self._started > STEADY_S:
            self.failures = 0
        # who left with 0 was told to: the job is over, and the result about to be there
        delay_s = min(FIRST_DELAY_S * 2**self.failures, LONGEST_DELAY_S) if status else CLEAN_DELAY_S
        self.failures += 1
        self.pidfd, self._process = None, None
        self._due = max(time.monotonic() + delay_s, self._away_until)
        return status

    def start_if_due(self) -> bool:
        if self._due is None or time.monotonic() < self._due:
            return False
        try:
            self.start()
        except OSError:
            # no room or no process to be had: the next try comes later
            self.failures += 1
            self._due = time.monotonic() + LONGEST_DELAY_S
            return False
        return True

    def _write_down(self, pid: int) -> None:
        if (me := processes.identify(pid)) is None:
            return
        try:
            places.write_json(self._record, me._asdict())
        except OSError:
            pass  # it runs all the same

    @property
    def is_away(self) -> bool:
        """Whether it is dead as its machine is, and not because something went wrong with it."""
        return time.monotonic() < self._away_until

    @property
    def is_gone(self) -> bool:
        """... and will be for ever."""
        return self._away_until == inf

    def take_away(self, away_s: float) -> None:
        """Kill it, and start it again after so long at the earliest."""
        self._away_until = time.monotonic() + away_s
        if self._due is not None:
            self._due = max(self._due, self._away_until)
        self.kill()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within this time."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True


def _opened(log: Path) -> BinaryIO:
    try:
        return log.open("ab")
    except OSError:
        # a full disk must not keep anything from being started again
        return open(os.devnull, "ab")
