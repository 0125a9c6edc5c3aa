"""How does the output of the ranks reach the console? Their log files are followed and passed on, byte by byte.

    <log root>/attempt_<k>/<rank>/stdout.log, stderr.log

Bytes go through as they are, whether or not they are text. A line that is not finished waits a moment for its end, so
that lines of different ranks stay whole; a prompt or a progress bar that never ends its line is passed on then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path

from evertrain.cli.console import Console, Show, Stream

READ_BYTES = 256 * 1024
"""Of one file in one turn, so that a chatty rank does not silence the others."""
PATIENCE_S: dict[Show, float] = {Show.PLAIN: 0.1, Show.PREFIXED: 1.0}
"""So long an unfinished line waits."""
LINE_LIMIT_BYTES = 1 << 20
SETTLED_S = 5.0
"""Files of an earlier attempt are closed when they have been silent for so long."""
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")

Write = Callable[[Stream, bytes], None]


class Follower:
    """One stream of one rank of one attempt."""

    def __init__(self, handle: int, stream: Stream, show: Show, prefix: bytes, keep: Kept | None, write: Write) -> None:
        self._handle = handle
        self._stream: Stream = stream
        self._show = show
        self._prefix = prefix
        self._keep = keep
        self._write = write
        self._waiting = b""
        self._waiting_since = 0.0
        self._in_line = False
        self.quiet_since = time.monotonic()

    def pump(self) -> bool:
        """Pass on what is new; whether there was anything."""
        data = _read(self._handle)
        now = time.monotonic()
        if data:
            self.quiet_since = now
            whole, self._waiting = _split(self._waiting + data)
            if whole:
                self._pass(whole)
            self._waiting_since = now
        if self._waiting and (
            now - self._waiting_since > PATIENCE_S[self._show] or len(self._waiting) > LINE_LIMIT_BYTES
        ):
            self.flush()
        return bool(data)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, b""
        if waiting:
            self._pass(waiting)

    def close(self) -> None:
        self.flush()
        os.close(self._handle)

    def _pass(self, data: bytes) -> None:
        if self._keep is not None:
            self._keep.add(data)
        if self._show is Show.PLAIN:
            self._write(self._stream, data)
            return
        first, *rest = _lines(data)
        start = b"" if self._in_line else self._prefix
        self._write(self._stream, start + first + b"".join(self._prefix + line for line in rest))
        self._in_line = not data.endswith(b"\n")


def _node(folder: Path) -> str:
    """Where the rank runs, as its agent noted it before the first output; empty while it is not there."""
    try:
        return (folder / "node").read_text()
    except OSError:
        return ""


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, READ_BYTES)
    except OSError:
        return b""  # a network file system has its moments; the next turn tries again


def _split(data: bytes) -> tuple[bytes, bytes]:
    """Finished lines, and the rest."""
    end = data.rfind(b"\n") + 1
    return data[:end], data[end:]


def _lines(data: bytes) -> list[bytes]:
    # bytes.splitlines would break at a carriage return too
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


class Kept:
    """`--duplicate-stdout-filters`: teed lines that hold one of the words, in a file of the attempt."""

    def __init__(self, file: Path, words: tuple[bytes, ...]) -> None:
        self._file = file
        self._words = words

    def add(self, data: bytes) -> None:
        if found := [line for line in _lines(data) if any(word in line for word in self._words)]:
            try:
                with self._file.open("ab") as out:
                    out.writelines(found)
            except OSError:
                pass  # a full disk costs the copy, not the console


class Tail:
    """All streams of all attempts that begin after this was made."""

    def __init__(
        self,
        log_root: Path,
        console: Console,
        nproc: int,
        world_size: int,
        write: Write,
        nodes: Collection[str] | None = None,
    ) -> None:
        self._nodes = nodes
        """Only ranks of these; None: all."""
        self._log_root = log_root
        self._console = console
        self._nproc = nproc
        self._world_size = world_size
        self._write = write
        self._open: dict[tuple[int, int, Stream], Follower] = {}
        self._missing: dict[int, set[tuple[int, Stream]]] = {}
        self._newest_since = time.monotonic()
        # what lies here already is of earlier runs
        self._old = frozenset(self._listed())

    def pump(self) -> bool:
        """Pass on everything that is new; whether there was anything."""
        self._look_for_files()
        busy = [follower.pump() for follower in self._open.values()]
        if time.monotonic() - self._newest_since > SETTLED_S:
            self._leave_earlier_attempts()
        return any(busy)

    def drain(self) -> None:
        """To the last byte; the ranks have ended."""
        while self.pump():
            pass
        for follower in self._open.values():
            follower.close()
        self._open.clear()

    def _listed(self) -> list[int]:
        try:
            names = [entry.name for entry in os.scandir(self._log_root) if entry.name.startswith("attempt_")]
        except OSError:
            return []
        return sorted(int(number) for name in names if (number := name.removeprefix("attempt_")).isdigit())

    def _look_for_files(self) -> None:
        for attempt in self._listed():
            if attempt in self._old:
                continue
            if attempt not in self._missing:
                self._missing[attempt] = {(rank, stream) for rank in range(self._world_size) for stream in STREAMS}
                self._newest_since = time.monotonic()
            for rank, stream in sorted(self._missing[attempt]):
                if self._follow(attempt, rank, stream):
                    self._missing[attempt].discard((rank, stream))

    def _follow(self, attempt: int, rank: int, stream: Stream) -> bool:
        """Begin with one file; False while it is not there."""
        file = self._log_root / f"attempt_{attempt}" / str(rank) / f"{stream}.log"
        if self._nodes is not None:
            node = _node(file.parent)
            if node not in self._nodes:
                return node != ""
        show = self._console.show(rank % self._nproc, stream)
        if show is Show.HIDDEN:
            return True
        try:
            handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        words = self._console.kept(stream) if show is Show.PREFIXED else ()
        keep = Kept(file.parent.parent / f"filtered_{stream}.log", words) if words else None
        prefix = self._console.prefix(rank, rank % self._nproc)
        self._open[attempt, rank, stream] = Follower(handle, stream, show, prefix, keep, self._write)
        return True

    def _leave_earlier_attempts(self) -> None:
        newest = max(self._missing, default=0)
        now = time.monotonic()
        for attempt in self._missing:
            if attempt < newest:
                self._missing[attempt].clear()
        for key, follower in list(self._open.items()):
            if key[0] < newest and now - follower.quiet_since > SETTLED_S:
                follower.close()
                del self._open[key]
