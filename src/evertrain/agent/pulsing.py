"""How do the collectives of a few ranks go, second by second? For the ranks of this node that the controller watches.

Read once a second, in a thread, from the ring and the table that the rank's hook writes; a rank that is not watched
costs nothing. One that has just come to be watched brings its last half minute along.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from evertrain.agent.aside import aside
from evertrain.agent.rings import Rings
from evertrain.agent.watch import BASE_PHASES
from evertrain.model.collectives import Pulse, Watch
from evertrain.model.report import Desired
from evertrain.observe import pages

if TYPE_CHECKING:
    from evertrain.trace.reading import Array, Reader
    from evertrain.trace.summary import Pulses

_log = logging.getLogger(__name__)

EVERY_S = 1.0
PAST_S = 30
"""So much of the past is told of a rank that has not been watched before."""
_AGAIN = 3
"""A second is told in so many reports: some may be lost."""


class Pulsing:
    def __init__(self, rings: Rings, page_path: Callable[[int, int], Path], wake: Callable[[], None]) -> None:
        self._rings, self._page_path, self._wake = rings, page_path, wake
        self._watch: Watch | None = None
        self._ranks: dict[tuple[int, int], _Rank] = {}
        self.pulses: tuple[Pulse, ...] = ()
        """To be told now."""

    def obey(self, order: Desired) -> None:
        self._watch = order.watch

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            if self._watch is not None or self._ranks:
                try:
                    self.pulses = await aside("pulses", self.look, self._watch, time.monotonic_ns())
                except Exception:  # a bug of ours; the agent lives on
                    _log.exception("pulses")
                self._wake()
            await asyncio.sleep(max(0.05, EVERY_S - (time.monotonic() - began)))

    def look(self, watch: Watch | None, now_ns: int) -> tuple[Pulse, ...]:
        """Close the second that is over."""
        wanted = {(watch.attempt, rank) for rank in watch.ranks} if watch is not None else set()
        for key in self._ranks.keys() - wanted:
            self._ranks.pop(key).close()
        found: list[Pulse] = []
        for attempt, rank in sorted(wanted):
            known = self._ranks.get((attempt, rank))
            try:
                if known is None:
                    known = _Rank(
                        self._rings.path(attempt, rank, "hook"), self._page_path(attempt, rank), attempt, rank
                    )
                    self._ranks[attempt, rank] = known
                known.look(now_ns)
            except (OSError, ValueError):
                continue  # it has none: said elsewhere
            found += known.told()
        return tuple(found)


class _Rank:
    """One that is watched."""

    def __init__(self, hook: Path, page: Path, attempt: int, rank: int) -> None:
        """Raises OSError or ValueError."""
        from evertrain.trace.reading import Reader
        from evertrain.trace.summary import Pulses

        self._reader: Reader = Reader(hook)
        self._page = page
        self._pulses: Pulses = Pulses(rank, attempt)
        self._last = 0
        self._until_ns = 0
        self._kept: deque[Pulse] = deque(maxlen=PAST_S + 1)
        self._looks = 0

    def close(self) -> None:
        self._reader.close()

    def told(self) -> list[Pulse]:
        kept = list(self._kept)
        return kept if self._looks <= _AGAIN else kept[-_AGAIN:]

    def look(self, now_ns: int) -> None:
        self._looks += 1
        if not self._until_ns:
            self._begin(now_ns)
        else:
            seen = self._reader.since(self._last)
            self._last = seen.last
            view, _ = pages.read(self._page)
            phase = view.phase if view is not None and view.phase not in BASE_PHASES else ""
            self._take(seen.operations, self._reader.table(), self._until_ns, now_ns, phase)
        self._until_ns = now_ns

    def _begin(self, now_ns: int) -> None:
        second_ns = int(EVERY_S * 1e9)
        start_ns = max(0, now_ns - PAST_S * second_ns)
        seen = self._reader.window(start_ns, now_ns)
        self._last = seen.last
        done = seen.operations
        nothing = done[:0]
        for start in range(start_ns, now_ns - second_ns + 1, second_ns):
            # what was in flight is not known of the past
            end = start + second_ns
            self._take(done[(done["t_done"] > start) & (done["t_done"] <= end)], nothing, start, end, "")

    def _take(self, operations: Array, table: Array, start_ns: int, end_ns: int, phase: str) -> None:
        from evertrain.trace import layout
        from evertrain.trace.summary import empty

        done = operations[operations["kind"] == layout.KINDS["done"]]
        records = empty()._replace(done=done, table=table)
        self._kept.append(self._pulses.take(records, start_ns, end_ns, phase))
