"""Who writes to the terminal? One thread: the output of the ranks, our own event lines, and the live line below them.

Everything goes through here, so that a terminal that is stopped (Ctrl-S) or a pipe that nobody reads holds up this
thread and never the one that watches over the job.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Protocol

from evertrain.cli.console import Stream
from evertrain.cli.plain import plain
from evertrain.cli.tail import Tail, Write

BUSY_S = 0.01
IDLE_S = 0.05
REDRAW_S = 0.2
_DESCRIPTOR = {"stdout": 1, "stderr": 2}
_ERASE = b"\r\x1b[2K"


class Terminal:
    """stdout and stderr, and the one line at the bottom that is ours."""

    def __init__(self, live: bool) -> None:
        self.live = live
        self._drawn = False
        self._at_line_start = {"stdout": True, "stderr": True}
        self._closed: set[Stream] = set()
        self._same = _same_file(1, 2)

    def write(self, stream: Stream, data: bytes) -> None:
        """Exactly these bytes; a reader that has gone away is not our trouble."""
        self.erase()
        self._put(stream, data)
        if data:
            self._at_line_start[stream] = data.endswith(b"\n")
            if self._same:
                self._at_line_start = dict.fromkeys(self._at_line_start, data.endswith(b"\n"))

    def say(self, text: str) -> None:
        """A line of our own, on a line of its own."""
        start = "" if self._at_line_start["stderr"] else "\n"
        line = f"{start}evertrain: {plain(text, kept='')}\n"
        self.write("stderr", line.encode(errors="backslashreplace"))

    def draw(self, line: str) -> None:
        """Show the live line, unless the ranks are in the middle of a line."""
        if self.live and all(self._at_line_start.values()):
            self._put("stderr", _ERASE + line.encode(errors="replace"))
            self._drawn = True

    def erase(self) -> None:
        if self._drawn:
            self._put("stderr", _ERASE)
            self._drawn = False

    def _put(self, stream: Stream, data: bytes) -> None:
        view = memoryview(data)
        while view and stream not in self._closed:
            try:
                view = view[os.write(_DESCRIPTOR[stream], view) :]
            except BlockingIOError:
                time.sleep(0.01)  # a terminal that somebody made non-blocking
            except OSError:
                self._closed.add(stream)


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False


class Live(Protocol):
    """What the live line says now."""

    def __call__(self) -> str: ...


class Output(threading.Thread):
    """Follows the ranks' files until it is told that they have ended, then drains them."""

    def __init__(self, terminal: Terminal, tail: Callable[[Write], Tail], live: Live) -> None:
        super().__init__(name="output", daemon=True)
        self._terminal = terminal
        self._tail = tail(terminal.write)
        self._live = live
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ended = threading.Event()

    def say(self, text: str) -> None:
        """Queue an event line; returns at once."""
        self._lines.put(text)

    def finish(self) -> None:
        """Show the rest and end; returns when all is written."""
        self._ended.set()
        self.join()

    def run(self) -> None:
        drawn = 0.0
        while not self._ended.is_set():
            busy = self._turn()
            if self._terminal.live and time.monotonic() - drawn > REDRAW_S:
                self._terminal.draw(self._live())
                drawn = time.monotonic()
            self._ended.wait(BUSY_S if busy else IDLE_S)
        self._turn()
        self._tail.drain()
        self._say_queued()
        self._terminal.erase()

    def _turn(self) -> bool:
        # what the ranks wrote before an event stands before its line
        busy = self._tail.pump()
        self._say_queued()
        return busy

    def _say_queued(self) -> None:
        while True:
            try:
                self._terminal.say(self._lines.get_nowait())
            except queue.Empty:
                return
