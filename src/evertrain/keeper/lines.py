"""How do keeper, agent, zygote and waiting ranks talk? One JSON object a line, over a socket that never blocks."""

from __future__ import annotations

import json
import socket
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from evertrain.keeper.loop import Loop

SEND_BUFFER_BYTES = 1 << 20
LONGEST_LINE_BYTES = 16 << 20
"""Nothing that belongs here is longer: the other end is confused, and is let go."""

Message = dict[str, Any]


def pair() -> tuple[socket.socket, socket.socket]:
    """Our end and their end of a new line. Neither passes to other processes by accident."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    return ours, theirs


class Lines:
    """Our end of such a socket.

    `heard` gets every message, and None for a line that is not one; `ended` is called once, when the other end is
    gone, but not after `close()`. What the socket does not take at once is sent when it does.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        heard: Callable[[Message | None], None],
        ended: Callable[[], None],
    ) -> None:
        self.heard = heard
        self.ended = ended
        self.caught_up: Callable[[], None] = lambda: None
        """Called when the other end has taken everything, after it had been behind."""
        self._loop = loop
        self._socket: socket.socket | None = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._waits_to_write = False
        self._closing = False
        sock.setblocking(False)
        loop.watch(sock.fileno(), readable=self._read)

    @property
    def is_behind(self) -> bool:
        """Whether something said earlier still waits to be sent."""
        return bool(self._outgoing)

    def say(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send one message, with copies of open descriptors where the other end is another process of ours."""
        if self._socket is None:
            return None
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        if not descriptors:
            self._outgoing += line
            return self._write()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
        try:
            sent = self._socket.sendmsg([line], rights)
        except OSError:
            return self._lost()
        self._outgoing += line[sent:]
        return self._write()

    def close(self) -> None:
        """Hang up now."""
        if self._socket is not None:
            self._loop.unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def close_when_sent(self) -> None:
        """Hang up as soon as the last word is out; from here on nobody listens."""
        self._closing = True
        self._write()

    def _read(self) -> None:
        assert self._socket is not None
        try:
            received = self._socket.recv(1 << 18)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            received = b""
        self._incoming += received
        if not received or len(self._incoming) > LONGEST_LINE_BYTES:
            return self._lost()
        if b"\n" not in received:
            return None
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            if self._socket is not None and not self._closing:
                self.heard(_message(line))
        return None

    def _write(self) -> None:
        if self._socket is None:
            return None
        was_behind = self._waits_to_write
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            return self._lost()
        if self._closing and not self._outgoing:
            return self.close()
        if self.is_behind != was_behind:
            self._waits_to_write = self.is_behind
            self._loop.watch(self._socket.fileno(), self._read, self._write if self.is_behind else None)
            if was_behind:
                self.caught_up()
        return None

    def _lost(self) -> None:
        self.close()
        if not self._closing:
            self.ended()


def _message(line: bytes | bytearray) -> Message | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
