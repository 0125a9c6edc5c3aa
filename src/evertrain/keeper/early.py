"""Which processes of this node run ahead of their start, and how far are they?

    (none) ──asked──▶ starting ──each waits in `evertrain.init()`──▶ waiting ──an attempt is prepared──▶ (its ranks)
                         └────────the script cannot──────▶ failed: attempts are prepared in the usual way

A standby is asked to have them while it waits. They belong to no attempt: their ends are nobody's, and they are killed
when they are no longer wanted.
"""

from __future__ import annotations

from collections.abc import Callable

from evertrain.keeper.children import Exit
from evertrain.keeper.lines import Message
from evertrain.keeper.log import log
from evertrain.keeper.loop import Deadline, Loop
from evertrain.keeper.starter import Starter
from evertrain.keeper.waiting import Started, Waiting

LIMIT_S = 1800.0
"""So long may a script take to get to `evertrain.init()`."""
AGAIN_S = 1.0
"""Before they are started again because a file has changed: more may be being changed."""


class Early:
    """The ranks of this node before they have numbers."""

    def __init__(
        self, loop: Loop, starter: Starter, *, changed: Callable[[], None], end: Callable[[Waiting], None]
    ) -> None:
        """`end`: kills a process that has begun its script, with all that it has started."""
        self._loop = loop
        self._starter = starter
        self._changed = changed
        self._end = end
        self._asked: Message | None = None
        self._processes: list[Waiting] = []
        self._there: set[int] = set()
        """Pids of those that wait in `evertrain.init()`."""
        self._state = ""
        self._reason = ""
        self._round = 0
        self._limit: Deadline | None = None

    def report(self) -> Message:
        return {"asked": self._asked, "state": self._state, "reason": self._reason, "pids": sorted(self.pids)}

    @property
    def pids(self) -> set[int]:
        return {waiting.child.pid for waiting in self._processes}

    def want(self, asked: Message | None) -> None:
        """Have one such process for each of `asked["ranks"]`; None: have none."""
        if asked != self._asked:
            self._drop()
            self._asked = asked
            self._begin()

    def renew(self) -> None:
        """Their environment no longer holds, or they must be started in another way."""
        if self._asked is not None:
            self._drop()
            self._begin()

    def take(self, number: int) -> list[Waiting]:
        """Processes to become the `number` ranks of an attempt; none where they are not there yet. None is left."""
        is_whole = self._state == "waiting" and len(self._processes) == number
        taken = list(self._processes) if is_whole else []
        if is_whole:
            self._processes, self._there = [], set()
        self.want(None)
        return taken

    def _begin(self) -> None:
        self._changed()
        if self._asked is None:
            return
        self._state, self._round = "starting", self._round + 1
        self._limit = self._loop.after(LIMIT_S, self._too_late)
        number, orders = self._round, self._asked
        self._starter.start(len(orders["ranks"]), None, lambda made: self._started(number, orders, made))

    def _started(self, number: int, orders: Message, made: Started) -> None:
        if number != self._round or self._state != "starting":
            for waiting in made.ranks:
                waiting.kill()
            return
        self._processes = made.ranks
        if made.error:
            self._fail(made.error)
            return
        for waiting, order in zip(made.ranks, orders["ranks"].values(), strict=True):
            waiting.early = {**order, "unknown": orders["unknown"]}
            waiting.said = lambda message, waiting=waiting: self._said(waiting, message)  # type: ignore[misc]
            waiting.ended = lambda exit, waiting=waiting: self._ended(waiting, exit)  # type: ignore[misc]
            if waiting.is_ready:
                waiting.line.say(waiting.early)

    def _said(self, waiting: Waiting, message: Message) -> None:
        match message["is"]:
            case "ready":
                assert waiting.early is not None
                waiting.line.say(waiting.early)
            case "at_barrier":
                self._there.add(waiting.child.pid)
                if self._there == self.pids:
                    self._state = "waiting"
                    self._within_limit()
                    self._changed()
            case "cannot_wait" if message["stale"]:
                log(f"ranks ahead of their start begin again: {message['reason']}")
                self._drop()
                self._state, number = "starting", self._round
                self._loop.after(AGAIN_S, lambda: self._again(number))
            case "cannot_wait" | "refused":
                self._fail(message["reason"])

    def _again(self, number: int) -> None:
        if number == self._round and self._state == "starting":
            self._begin()

    def _ended(self, waiting: Waiting, exit: Exit) -> None:
        place = "in" if waiting.child.pid in self._there else "before"
        self._fail(f"a process ended with {exit} {place} evertrain.init()")

    def _too_late(self) -> None:
        self._fail(f"the script had not called evertrain.init() after {LIMIT_S:g} s")

    def _fail(self, reason: str) -> None:
        log(f"no rank can be ahead of its start: {reason}")
        self._drop()
        self._state, self._reason = "failed", reason

    def _within_limit(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _drop(self) -> None:
        """Kill what there is; an answer that is on its way comes too late."""
        self._within_limit()
        gone, self._processes, self._there = self._processes, [], set()
        for waiting in gone:
            self._end(waiting)
        self._state = self._reason = ""
        self._round += 1
        self._changed()
