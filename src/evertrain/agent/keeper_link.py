"""How does the agent talk to its keeper? JSON lines on a unix socket; the keeper pushes its whole state.

The agent may die and come back, and so may the keeper (then with another identity and without ranks): the link
reconnects for ever and always knows whether what it holds is current.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

_RETRY_S = 0.05
_LINE_LIMIT_BYTES = 16 << 20


class KeeperLink:
    """The agent's end. `state` is None while there is no connection."""

    def __init__(self, path: str, on_change: Callable[[], None]) -> None:
        self._path = path
        self._on_change = on_change
        self._writer: asyncio.StreamWriter | None = None
        self.state: dict[str, Any] | None = None
        self.errors: list[str] = []

    async def run(self) -> None:
        """Stay connected; never returns."""
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path, limit=_LINE_LIMIT_BYTES)
            except OSError:
                await asyncio.sleep(_RETRY_S)
                continue
            try:
                while line := await reader.readline():
                    self._take(json.loads(line))
            except (OSError, ValueError) as error:
                _log.warning("lost the keeper: %s", error)
            self._writer.close()
            self._writer = None
            self.state = None
            self._on_change()
            await asyncio.sleep(_RETRY_S)

    def send(self, command: dict[str, Any]) -> None:
        """Send a command; one that is lost is found missing and sent again."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(command).encode() + b"\n")

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("is") == "state":
            self.state = message
            self._on_change()
        elif message.get("is") == "error":
            _log.error("the keeper refused a command: %s", message)
