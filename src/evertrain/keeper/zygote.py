"""How does the keeper get ranks from the zygote, and what if there is none just now?

A zygote that died is started again, at once the first time, then with growing pauses. Until the next one is there,
requests are answered without it. Ranks that it had forked are the keeper's children and live on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from evertrain.keeper.children import Children, Exit
from evertrain.keeper.lines import Message, pair
from evertrain.keeper.log import log
from evertrain.keeper.loop import Deadline, Loop
from evertrain.keeper.waiting import Request, Spawner, Started, Waiting

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
IMPORT_LIMIT_S = 300.0
"""A zygote that is not ready after so long is given up for good."""
FORK_LIMIT_S = 10.0
"""One that has not forked after so long is ended, and started again."""
MOST_RANKS = 250
"""The kernel passes no more descriptors at once."""


class Zygote:
    """The process with all imports done, or the pause until there is one again."""

    def __init__(
        self,
        loop: Loop,
        children: Children,
        spawner: Spawner,
        *,
        ready: Callable[[], None],
        refused: Callable[[str, str], None],
        died: Callable[[str, list[Request]], None],
        unable: Callable[[str, Request], None],
    ) -> None:
        self._loop = loop
        self._children = children
        self._spawner = spawner
        self._ready = ready
        self._refused = refused
        self._died = died
        self._unable = unable
        self._process: Waiting | None = None
        self._pause: Deadline | None = None
        self._limit: Deadline | None = None
        self._deaths = 0
        self._last_words = ""
        self._queue: list[Request] = []
        self._asked: list[tuple[Request, list[socket.socket]]] = []
        self.start()

    @property
    def pid(self) -> int | None:
        return self._process.child.pid if self._process else None

    @property
    def is_ready(self) -> bool:
        return self._process is not None and self._process.is_ready

    @property
    def is_worth_waiting_for(self) -> bool:
        """Four imports beside each other take longer than the rest of one; but one that died may do so again."""
        return self.is_ready or self._deaths == 0

    def start(self) -> None:
        self._pause = None
        try:
            self._process = self._spawner.spawn("zygote")
        except OSError as error:
            # the caller is being built, or a deadline: tell it in a turn of its own
            reason = f"no interpreter: {error}"
            self._pause = self._loop.after(0, lambda: self._refused(reason, "spawn"))
            return
        self._process.said = self._said
        self._process.ended = self._ended
        self._limit = self._loop.after(IMPORT_LIMIT_S, self._never_ready)

    def fork(self, request: Request) -> None:
        if request.ranks > MOST_RANKS:
            return self._unable(f"{request.ranks} ranks are more than it can be asked for", request)
        self._queue.append(request)
        if self.is_ready:
            self._ask()
        return None

    def close(self) -> list[Request]:
        """End it; what it had not answered yet comes back."""
        if self._pause:
            self._pause.cancel()
        self._within(None)
        if self._process:
            self._process.kill()
            self._process = None
        return self._unanswered()

    def _said(self, message: Message) -> None:
        assert self._process is not None
        match message["is"]:
            case "ready":
                self._within(None)
                self._deaths = 0
                self._ready()
                self._ask()
            case "refused":
                self._refused(message["reason"], message["instead"])
            case "forked":
                self._forked(message)
            case "stale":
                self._last_words = message["reason"]
                self._process.child.send(9)

    def _ask(self) -> None:
        assert self._process is not None
        queue, self._queue = self._queue, []
        for request in queue:
            pairs = [pair() for _ in range(request.ranks + (request.listener is not None))]
            theirs = [their for _, their in pairs]
            self._asked.append((request, [our for our, _ in pairs]))
            self._within(FORK_LIMIT_S)
            self._children.answers_open += 1
            passed = [*theirs, request.listener] if request.listener else theirs
            fork = {"do": "fork", "ranks": request.ranks, "code": self._spawner.digest}
            self._process.line.say(fork, [sock.fileno() for sock in passed])
            for sock in theirs:
                sock.close()

    def _forked(self, message: Message) -> None:
        request, ours = self._asked.pop(0)
        self._within(FORK_LIMIT_S if self._asked else None)
        pids = message["pids"]
        if len(pids) < len(ours):
            # those that were forked see the end of their lines, and go
            for sock in ours:
                sock.close()
            self._children.answers_open -= 1
            return self._unable(message["error"], request)
        waiting = [self._spawner.adopt(pid, sock) for pid, sock in zip(pids, ours, strict=True)]
        self._children.answers_open -= 1
        store = waiting.pop() if request.listener else None
        request.done(Started(waiting, store))
        return None

    def _within(self, limit_s: float | None) -> None:
        """The answer that is waited for next has to come within so long."""
        if self._limit:
            self._limit.cancel()
        self._limit = self._loop.after(limit_s, self._too_slow) if limit_s is not None else None

    def _never_ready(self) -> None:
        self._refused(f"the zygote was not ready after {IMPORT_LIMIT_S:g} s", "spawn")

    def _too_slow(self) -> None:
        assert self._process is not None
        self._last_words = f"it had not forked after {FORK_LIMIT_S:g} s"
        self._process.child.send(9)

    def _ended(self, exit: Exit) -> None:
        self._within(None)
        self._process = None
        self._deaths += 1
        pause_s = 0 if self._deaths == 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._deaths - 2))
        self._pause = self._loop.after(pause_s, self.start)
        reason = f"the zygote is being started again: {self._last_words or f'it ended with {exit}'}"
        self._last_words = ""
        log(reason)
        self._died(reason, self._unanswered())

    def _unanswered(self) -> list[Request]:
        asked, self._asked = self._asked, []
        queue, self._queue = self._queue, []
        for _, ours in asked:
            self._children.answers_open -= 1
            for sock in ours:
                sock.close()
        return [request for request, _ in asked] + queue
