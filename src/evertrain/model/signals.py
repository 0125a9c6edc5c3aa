"""What was collected of an incident? The only input of an explanation.

Empty means "not collected", never "clean".
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Signals(Struct, frozen=True, kw_only=True):
    logs: tuple[str, ...] = ()
    exitcode: int | None = None
    """As the launcher reports it: negative, killed by that signal; 128 + n, the same as a shell says it."""
    dmesg: tuple[str, ...] = ()
    stacks: dict[str, str] = {}
    """{rank or process: text of the dump}; the names are free."""
    metrics: dict[str, Any] = {}
    """Free facts: numbers, series, earlier attempts, states of tools."""
    flight_recorder: dict[str, Any] = {}
    ras: tuple[str, ...] = ()
    collected_from: dict[str, str] = {}
    """{"dmesg" or "logs": host}; without it the host must come from the lines, or stays unknown."""


class Line(Struct, frozen=True, kw_only=True):
    """A line that may matter, with what its prefix says about where it comes from."""

    text: str
    """Without the prefixes of collectors and ranks."""
    raw: str
    order: int
    """Position in what was read."""
    place: str = ""
    """`file:line`; empty where there is no file."""
    host: str | None = None
    rank: int | None = None
    clock: float | None = None
    """Seconds, comparable only within one source."""
    stream: str = ""
    """Lines of one writer carry the same: source and prefix."""

    def quoted(self) -> str:
        return f"{self.place}: {self.raw.strip()}" if self.place else self.raw.strip()
