"""Where do new nodes come from? A platform is asked for some; whoever it brings joins as any other node does."""

from __future__ import annotations

from typing import Protocol


class Platform(Protocol):
    """Never waited for: a job waits for nodes, not for the platform's answer."""

    def request(self, nodes: int, because: str) -> str:
        """Ask for so many nodes more; a line for the user that says what was done, or what to do. Returns at once."""

    @property
    def problem(self) -> str:
        """What became of the last request, where that was nothing good; else empty."""

    def close(self) -> None:
        """Nothing that was begun here is left behind."""
