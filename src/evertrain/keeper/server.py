"""Who listens to the keeper? One agent at a time, on a unix socket; a newer one takes the place of an older one.

The agent is told the whole state at once and after every change. If it is slow it misses intermediate states, never
the last one.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from evertrain.keeper.lines import SEND_BUFFER_BYTES, Lines, Message
from evertrain.keeper.log import log
from evertrain.keeper.loop import Loop


class Server:
    """The keeper's socket and the agent at its other end."""

    def __init__(
        self, loop: Loop, folder: Path, *, state: Callable[[], Message], heard: Callable[[Message], Message | None]
    ) -> None:
        self._loop = loop
        self._state = state
        self._heard = heard
        self._agent: Lines | None = None
        self._version = 0
        self.agent_left_time: float = time.monotonic()
        """When the last agent went, on the monotonic clock; the start of the keeper where there was none yet."""
        self._listener = socket.socket(socket.AF_UNIX)
        # of a keeper that was killed
        (folder / "keeper.sock").unlink(missing_ok=True)
        # by way of the open folder: a long job name must not exceed the 107 bytes of a socket's address
        directory = os.open(folder, os.O_PATH | os.O_DIRECTORY)
        self._listener.bind(f"/proc/self/fd/{directory}/keeper.sock")
        os.chmod(folder / "keeper.sock", 0o600)
        os.close(directory)
        self._listener.listen()
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), self._accept)

    @property
    def has_agent(self) -> bool:
        return self._agent is not None

    def push(self) -> None:
        """Tell the agent how things are now."""
        self._version += 1
        if self._agent and not self._agent.is_behind:
            self._agent.say({"is": "state", "version": self._version, **self._state()})

    def close(self) -> None:
        self._loop.unwatch(self._listener.fileno())
        self._listener.close()
        if self._agent:
            self._agent.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if self._agent:
            log("a newer agent takes over")
            self._agent.close()
        agent = self._agent = Lines(self._loop, connection, self._message, self._left)
        agent.caught_up = self.push
        self.push()

    def _message(self, message: Message | None) -> None:
        error = self._heard(message) if message is not None else {"error": "not a JSON object"}
        if error and self._agent and not self._agent.is_behind:
            self._agent.say({"is": "error", **error})

    def _left(self) -> None:
        self._agent = None
        self.agent_left_time = time.monotonic()
