"""Which other nodes can this one not reach any more? Those that have answered before, and missed twice in a row."""

from __future__ import annotations

from collections.abc import Sequence

from evertrain.model.sensing import PingReading

MISSES = 2


class Peers:
    """What has become of each peer that is tried."""

    def __init__(self) -> None:
        self._misses: dict[str, int] = {}
        """In a row, of those that have answered once: behind a firewall nobody is missed."""

    def judge(self, readings: Sequence[PingReading]) -> tuple[str, ...]:
        """Who cannot be reached now. Peers that are not tried any more are forgotten."""
        before, self._misses = self._misses, {}
        for reading in readings:
            if reading.seconds is not None:
                self._misses[reading.peer] = 0
            elif reading.peer in before:
                self._misses[reading.peer] = before[reading.peer] + 1
        return tuple(peer for peer, misses in self._misses.items() if misses >= MISSES)
