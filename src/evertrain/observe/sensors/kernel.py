"""What has the kernel said? /dev/kmsg, read without waiting, from now on.

After a restart of the agent it goes on where it was: the kernel numbers its messages, and the number of the last one
that was looked at is kept in a file. What had been told before is read again, marked so: it may give later lines their
meaning. A look without news costs one system call, a message some microseconds.
"""

from __future__ import annotations

import json
import os
import re
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from evertrain.model.sensing import KernelMessage, Seen, Sign
from evertrain.model.words import counted

VARIABLE = "EVERTRAIN_KMSG"
"""Names another file or fifo to read, for drills and tests: lines as `dmesg` prints them, or as /dev/kmsg has them."""
REMEMBERED_S = 600.0
"""Older messages are of no interest, whether they were told or not."""
_RECORD = 16_384
"""Larger than any record of the kernel's."""
_MAX_RECORDS = 2_000
"""In one look; the rest waits for the next one."""
_MAX_LINE = 4_096
_KERNELS = re.compile(r"(\d+),(\d+),(\d+),[^;]*;(.*)", re.DOTALL)
_MORE = re.compile(r" [A-Z_]+=")
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})")

Rules = Callable[[Sequence[KernelMessage]], Sequence[Sign]]


class KernelSensor:
    """`rules` say which messages are signs; `memory` is the file that outlives the agent (None: nothing does)."""

    name = "kernel"
    period_s = 0.5
    limit_s = 5.0

    def __init__(
        self, rules: Rules, *, memory: Path | None = None, environ: Mapping[str, str] = os.environ, boot_id: str = ""
    ) -> None:
        self._rules = rules
        self._path = Path(environ.get(VARIABLE) or "/dev/kmsg")
        self._memory = memory
        self._boot_id = boot_id or Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        remembered = _remembered(memory, self._boot_id)
        self._last = self._saved = remembered or 0
        """Number of the last message that was read."""
        self._is_first = remembered is None
        """What is there now is from before anybody looked."""
        self._log: _Device | _Text | None = None
        self._read = 0

    def look(self, now: float) -> Seen:
        # what the last look gave has been told by now; after a sudden end it is read again, and has the same keys
        self._save()
        try:
            self._log = self._log or self._open()
            messages = [one for one in map(self._message, self._log.read(now)) if now - one.time <= REMEMBERED_S]
            lost, is_at_end = self._log.lost, self._log.is_at_end
        except OSError as error:
            self.close()
            if isinstance(error, FileNotFoundError):
                self._is_first = False  # when it comes, all that it holds is new
            return Seen(blind=_what_to_do(self._path, error))
        self._is_first = self._is_first and not is_at_end
        signs = tuple(self._rules(messages)) if messages else ()
        overwritten = f"; {lost} times some were overwritten unread" if lost else ""
        return Seen(signs=signs, last=f"{counted(self._read, 'message')}{overwritten}")

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log.fd)
        self._log = None

    def _open(self) -> _Device | _Text:
        mode = os.stat(self._path).st_mode
        # a fifo that is open for writing too has no end, whoever comes and goes at its other side
        fd = os.open(self._path, (os.O_RDWR if stat.S_ISFIFO(mode) else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISCHR(mode):
            return _Device(fd)
        if stat.S_ISFIFO(mode):
            self._is_first = False  # it keeps nothing that has been read
        return _Text(fd, self._last if stat.S_ISFIFO(mode) else 0)

    def _message(self, read: _Read) -> KernelMessage:
        number, written, is_own, text = read
        is_told = self._is_first or number <= self._last
        self._last = max(number, self._last)
        self._read += not is_told
        key = f"kernel:{self._boot_id}:{number}"
        return KernelMessage(key=key, time=written, text=text[:_MAX_LINE], is_own=is_own, is_told=is_told)

    def _save(self) -> None:
        if self._memory is None or self._is_first or self._last == self._saved:
            return
        try:
            fresh = self._memory.with_name(f"{self._memory.name}.new")
            fresh.write_text(json.dumps({"boot_id": self._boot_id, "sequence": self._last}))
            fresh.replace(self._memory)
            self._saved = self._last
        except OSError:
            pass  # the folder has others who watch it; without this file a restart begins with what comes then


_Read = tuple[int, float, bool, str]
"""Number, time, whether the kernel itself wrote it, text."""


class _Device:
    """The kernel's log: one record a read, numbered, the oldest first."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.lost = 0
        self.is_at_end = False

    def read(self, now: float) -> list[_Read]:
        booted = now - time.monotonic()
        read: list[_Read] = []
        self.is_at_end = False
        while len(read) < _MAX_RECORDS:
            try:
                record = os.read(self.fd, _RECORD).decode(errors="replace")
            except BlockingIOError:
                self.is_at_end = True
                break
            except BrokenPipeError:
                self.lost += 1  # overwritten; the kernel goes on with the oldest that it still has
                continue
            if found := _KERNELS.match(record):
                written = min(now, booted + int(found[3]) / 1e6)
                read.append((int(found[2]), written, *_content(found)))
        return read


class _Text:
    """A file or fifo with lines; their numbers are counted."""

    def __init__(self, fd: int, count: int) -> None:
        self.fd = fd
        self.lost = 0
        self.is_at_end = True
        self._count = count
        self._rest = b""

    def read(self, now: float) -> list[_Read]:
        read: list[_Read] = []
        for line in self._lines():
            self._count += 1
            found = _KERNELS.match(line)
            if found or not _MORE.match(line):
                read.append((self._count, now, *(_content(found) if found else (True, line))))
        return read

    def _lines(self) -> list[str]:
        data = self._rest
        state = os.fstat(self.fd)
        if stat.S_ISREG(state.st_mode) and state.st_size < os.lseek(self.fd, 0, os.SEEK_CUR):
            os.lseek(self.fd, 0, os.SEEK_SET)  # written anew
            data = b""
        try:
            while block := os.read(self.fd, _RECORD):
                data += block
        except BlockingIOError:
            pass
        *lines, self._rest = data.split(b"\n")
        return [line.decode(errors="replace") for line in lines]


def _content(found: re.Match[str]) -> tuple[bool, str]:
    """Whether the kernel itself wrote a record, and the text as `dmesg` prints it."""
    text = _ESCAPED.sub(lambda code: chr(int(code[1], 16)), found[4].partition("\n")[0])
    return int(found[1]) >> 3 == 0, f"[{int(found[3]) / 1e6:12.6f}] {text}"


def _remembered(memory: Path | None, boot_id: str) -> int | None:
    """What an earlier run of the agent has read last, since this machine was started."""
    if memory is None:
        return None
    try:
        content = json.loads(memory.read_bytes())
        # what a machine says while it starts is not meant: a new boot is a new beginning
        return int(content["sequence"]) if content["boot_id"] == boot_id else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _what_to_do(path: Path, error: OSError) -> str:
    if isinstance(error, PermissionError):
        return (
            f"{path} may not be read: give the agent CAP_SYSLOG, or set kernel.dmesg_restrict=0; "
            "in a container it needs the device too"
        )
    if isinstance(error, FileNotFoundError):
        return f"{path} is not there: a container must be given the device (docker run --device=/dev/kmsg)"
    return f"{path}: {error.strerror or error}"
