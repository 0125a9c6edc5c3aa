"""How does a process that waits talk to its keeper? JSON lines, both ways, over the descriptor that it was given."""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn

Message = dict[str, Any]


def say(channel: int, message: Message) -> None:
    try:
        os.write(channel, json.dumps(message).encode() + b"\n")
    except OSError:  # the keeper is gone, and so is this process in a moment
        pass


def hear(channel: int) -> Message:
    """The next thing that the keeper says. Without a keeper there is nothing to wait for."""
    line = bytearray()
    while not line.endswith(b"\n"):
        try:
            received = os.read(channel, 1 << 16)
        except ConnectionResetError:  # the other end was closed with something of ours unread
            received = b""
        if not received:
            os._exit(0)
        line += received
    heard: Message = json.loads(line)
    return heard


def refuse(channel: int, reason: str, instead: str) -> NoReturn:
    """Say that this process must not become a rank, and wait for its end."""
    last_words(channel, {"is": "refused", "reason": reason, "instead": instead})


def last_words(channel: int, message: Message) -> NoReturn:
    """Say something and wait to be killed: the news of an end may overtake what was said before it."""
    say(channel, message)
    while os.read(channel, 1 << 10):
        pass
    os._exit(0)
