"""Where do ranks come from? Forked from the zygote, parked ahead with all imports done, or spawned.

    zygote ──refused: threads, CUDA──▶ parked ──refused──▶ spawn
       └─────refused: the script's own environment or modules────▲

The first attempt waits for the zygote, because importing torch once is faster than once per rank. While a zygote that
died is being started again, attempts are spawned. What has been refused once is not tried again with the same code.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from evertrain.keeper.children import Children
from evertrain.keeper.lines import Message
from evertrain.keeper.log import log
from evertrain.keeper.loop import Loop
from evertrain.keeper.pool import Pool
from evertrain.keeper.waiting import Request, Spawner, Started
from evertrain.keeper.zygote import Zygote


class Starter:
    """Answers requests for waiting processes in the best way that is possible now."""

    def __init__(
        self, loop: Loop, children: Children, spawner: Spawner, spec: dict[str, Any], changed: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._children = children
        self._spawner = spawner
        self._size: int = spec["local_world_size"]
        self._changed = changed
        self._wanted: str = spec["start"]
        self._reason = ""
        self._zygote: Zygote | None = None
        self._pool: Pool | None = None
        self._is_program = spec["command"]["kind"] == "program"
        self._begin()

    def _begin(self) -> None:
        """Start as it is wanted."""
        self._reason = ""
        if self._is_program:
            self._reason = "" if self._wanted == "spawn" else "a program is always spawned"
        elif self._wanted == "zygote":
            self._zygote = self._new_zygote()
        elif self._wanted == "parked":
            self._pool = self._new_pool()

    @property
    def mode(self) -> str:
        return "zygote" if self._zygote else "parked" if self._pool else "spawn"

    @property
    def is_ready(self) -> bool:
        return all(source.is_ready for source in (self._zygote, self._pool) if source)

    def state(self) -> Message:
        return {
            "wanted": self._wanted,
            "mode": self.mode,
            "state": "ready" if self.is_ready else "starting",
            "reason": self._reason,
            "pid": self._zygote.pid if self._zygote else None,
        }

    def start(self, ranks: int, listener: socket.socket | None, done: Callable[[Started], None]) -> None:
        """Make `ranks` waiting processes, and one that serves the store on `listener`. `done` may be called at once."""
        request = Request(ranks, listener, done)
        if self._zygote and self._zygote.is_worth_waiting_for:
            self._zygote.fork(request)
        else:
            self._answer(request)

    def refused(self, reason: str, instead: str) -> None:
        """The zygote, or a process that waits, found that it must not become a rank; `instead` may work."""
        log(f"start by {self.mode} is refused: {reason}")
        self._reason = reason
        unanswered = self._zygote.close() if self._zygote else []
        self._zygote = None
        if instead == "parked" and not self._pool:
            self._pool = self._new_pool()
        elif self._pool:
            self._pool.close()
            self._pool = None
        for request in unanswered:
            self._answer(request)
        self._changed()

    def renew(self) -> None:
        """The environment is another one: what was imported with the old one is replaced, in the same mode."""
        if self._zygote:
            unanswered = self._zygote.close()
            self._zygote = self._new_zygote()
            for request in unanswered:
                self._zygote.fork(request)
        if self._pool:
            self._pool.close()
            self._pool = self._new_pool()
        self._changed()

    def begin_anew(self) -> None:
        """The code is another one: start as it is wanted, whatever was refused for the code before."""
        unanswered = self._zygote.close() if self._zygote else []
        if self._pool:
            self._pool.close()
        self._zygote = self._pool = None
        self._begin()
        for request in unanswered:
            self.start(request.ranks, request.listener, request.done)
        self._changed()

    def close(self) -> None:
        """End what has been started ahead."""
        if self._zygote:
            self._zygote.close()
        if self._pool:
            self._pool.close()

    def _new_zygote(self) -> Zygote:
        return Zygote(
            self._loop,
            self._children,
            self._spawner,
            ready=self._zygote_ready,
            refused=self.refused,
            died=self._zygote_died,
            unable=self._zygote_unable,
        )

    def _new_pool(self) -> Pool:
        return Pool(self._loop, self._spawner, self._size, changed=self._changed, refused=self.refused)

    def _zygote_ready(self) -> None:
        self._reason = ""
        self._changed()

    def _zygote_died(self, reason: str, unanswered: list[Request]) -> None:
        self._reason = reason
        for request in unanswered:
            self._answer(request)
        self._changed()

    def _zygote_unable(self, reason: str, request: Request) -> None:
        log(f"the zygote could not fork ({reason}), spawning instead")
        self._answer(request)

    def _answer(self, request: Request) -> None:
        """Serve a request without the zygote."""
        started = Started(self._pool.take(request.ranks) if self._pool else [])
        try:
            while len(started.ranks) < request.ranks:
                started.ranks.append(self._spawner.spawn("parked" if self._pool else "spawned"))
            if request.listener:
                started.store = self._spawner.spawn("store", request.listener)
        except OSError as error:
            started.error = f"no interpreter: {error}"
        request.done(started)
