"""What does the live line at the bottom of the terminal show? State, step, speed, attempt, ETTR: one line, by rich."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from evertrain.cli.poll import Seen

WINDOW_S = 10.0
"""Steps per second are those of the last few seconds."""
COLOURS = {"running": "green", "recovering": "yellow", "starting": "cyan", "stopping": "yellow", "failed": "red"}
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LiveLine:
    """Renders the newest look at the job; asked by the thread that owns the terminal."""

    def __init__(self, job: str, newest: Callable[[], Seen | None]) -> None:
        self._job = job
        self._newest = newest
        self._steps: deque[tuple[float, int]] = deque()
        self._began = time.monotonic()

    def __call__(self) -> str:
        from rich.console import Console
        from rich.text import Text

        width = _width()
        console = Console(force_terminal=True, width=width, color_system="standard")
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        line.append(f"{_SPINNER[int(time.monotonic() * 5) % len(_SPINNER)]} {self._job} ", style="bold")
        for text, style in self._parts():
            line.append(f"  {text}", style=style)
        line.truncate(width - 1, overflow="ellipsis")
        with console.capture() as capture:
            console.print(line, end="")
        return capture.get()

    def _parts(self) -> list[tuple[str, str]]:
        seen = self._newest()
        if seen is None:
            return [("starting", COLOURS["starting"]), (f"{time.monotonic() - self._began:.0f} s", "dim")]
        status = seen.status
        parts = [(status["state"], COLOURS.get(status["state"], ""))]
        if status["step"] is not None:
            parts.append((f"step {status['step']}", ""))
        if (speed := self.speed(status["step"])) is not None:
            parts.append((f"{speed:.2f} steps/s" if speed < 10 else f"{speed:.0f} steps/s", ""))
        parts.append((f"attempt {status['attempt']}", "dim"))
        if status["ettr"] is not None:
            parts.append((f"ETTR {status['ettr']:.1%}", "dim"))
        return parts

    def speed(self, step: int | None) -> float | None:
        """Steps per second over the last seconds; None until there is something to compare."""
        now = time.monotonic()
        if step is None:
            return None
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()  # a new attempt began lower
        if not self._steps or step != self._steps[-1][1]:
            self._steps.append((now, step))
        while len(self._steps) > 2 and now - self._steps[0][0] > WINDOW_S:
            self._steps.popleft()
        (first_time, first), (last_time, last) = self._steps[0], self._steps[-1]
        return (last - first) / (last_time - first_time) if last > first and last_time > first_time else None


def _width() -> int:
    try:
        return max(20, os.get_terminal_size(2).columns)
    except OSError:
        return 80
