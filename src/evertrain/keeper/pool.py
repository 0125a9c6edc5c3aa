"""Which processes are parked? One per rank of this node, spawned ahead, with all imports done."""

from __future__ import annotations

from collections.abc import Callable

from evertrain.keeper.children import Exit
from evertrain.keeper.lines import Message
from evertrain.keeper.loop import Deadline, Loop
from evertrain.keeper.waiting import Spawner, Waiting

REFILL_AFTER_S = 2.0
"""Ranks that have just been let go need the processors more than the next attempt does."""


class Pool:
    """Parked processes; those that are taken are replaced after a while."""

    def __init__(
        self,
        loop: Loop,
        spawner: Spawner,
        size: int,
        *,
        changed: Callable[[], None],
        refused: Callable[[str, str], None],
    ) -> None:
        self._loop = loop
        self._spawner = spawner
        self._size = size
        self._changed = changed
        self._refused = refused
        self._parked: list[Waiting] = []
        self._refill: Deadline | None = loop.after(0, self._fill)

    @property
    def is_ready(self) -> bool:
        return len(self._parked) == self._size and all(waiting.is_ready for waiting in self._parked)

    def take(self, number: int) -> list[Waiting]:
        """As many as there are, up to `number`; ready or still importing."""
        taken, self._parked = self._parked[:number], self._parked[number:]
        self._refill_later()
        return taken

    def close(self) -> None:
        if self._refill:
            self._refill.cancel()
        for waiting in self._parked:
            waiting.kill()

    def _refill_later(self) -> None:
        if self._refill is None:
            self._refill = self._loop.after(REFILL_AFTER_S, self._fill)

    def _fill(self) -> None:
        self._refill = None
        while len(self._parked) < self._size:
            try:
                waiting = self._spawner.spawn("parked")
            except OSError as error:
                return self._refused(f"no interpreter: {error}", "spawn")
            waiting.said = self._said
            waiting.ended = lambda exit, waiting=waiting: self._ended(waiting, exit)  # type: ignore[misc]
            self._parked.append(waiting)
        return None

    def _said(self, message: Message) -> None:
        if message["is"] == "refused":
            self._refused(message["reason"], message["instead"])
        else:
            self._changed()

    def _ended(self, waiting: Waiting, exit: Exit) -> None:
        self._parked.remove(waiting)
        waiting.line.close()
        if waiting.is_ready:
            self._refill_later()
            self._changed()
        else:
            self._refused(f"a parked process ended with {exit} while it imported", "spawn")
