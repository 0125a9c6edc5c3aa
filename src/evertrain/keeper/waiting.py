"""What is a rank before it is one? A child of the keeper that waits on its line for `go`.

Forked, parked or spawned, it says `ready` when nothing but `go` is missing (or `refused`, with a reason), and exits in
silence when the line ends.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evertrain.keeper import interpreter
from evertrain.keeper.children import Child, Children, Exit
from evertrain.keeper.lines import Lines, Message, pair
from evertrain.keeper.loop import Loop


class Waiting:
    """One such process. Whoever owns it sets `said` and `ended`."""

    def __init__(self, loop: Loop, children: Children, pid: int, sock: socket.socket, *, digest: str) -> None:
        self.digest = digest
        """The code that it was started for; empty: the user's own files."""
        self.said: Callable[[Message], None] = lambda _: None
        self.ended: Callable[[Exit], None] = lambda _: None
        self.is_ready = False
        self.early: Message | None = None
        """What it was told when it was sent ahead of its start; None: it has not begun its script."""
        self.child: Child = children.adopt(pid, lambda exit: self.ended(exit))
        # a line that ends says nothing that the end of the process does not say better
        self.line = Lines(loop, sock, self._heard, lambda: None)

    def _heard(self, message: Message | None) -> None:
        if message is not None:
            self.is_ready = self.is_ready or message.get("is") == "ready"
            self.said(message)

    def kill(self) -> None:
        """End it, and hear no more of it."""
        self.said = lambda _: None
        self.ended = lambda _: None
        self.line.close()
        self.child.send(9)


@dataclass
class Request:
    """So many waiting ranks, and with a listening socket a process that serves the store on it."""

    ranks: int
    listener: socket.socket | None
    done: Callable[[Started], None]


@dataclass
class Started:
    """The answer to a request."""

    ranks: list[Waiting]
    store: Waiting | None = None
    error: str = ""


class Spawner:
    """Starts interpreters that wait."""

    def __init__(
        self, loop: Loop, children: Children, spec: dict[str, Any], *, environ: dict[str, str], stdin: int, log: int
    ) -> None:
        self._loop = loop
        self._children = children
        self._environ = environ
        self.env: dict[str, str] = {}
        """What a restart has added to the user's environment."""
        self.code: Message | None = None
        """The version folder that ranks run from; None: the user's own files."""
        self._stdin = stdin
        self._log = log
        self._python, self._command = spec["python"], spec["command"]
        self._given = {
            "keeper": os.getpid(),
            "python": self._python,
            "command": self._command,
            "preload": spec["preload"],
            "code_root": spec.get("code_root", ""),
        }

    @property
    def digest(self) -> str:
        """Of the code that what is started now will run."""
        return str(self.code["digest"]) if self.code else ""

    def spawn(self, role: str, listener: socket.socket | None = None) -> Waiting:
        """Start an interpreter in one of the roles of worker/: zygote, parked, spawned, store."""
        ours, theirs = pair()
        shared = {"channel": theirs.fileno(), "stdin": self._stdin}
        if listener:
            shared["listener"] = listener.fileno()
        try:
            environ = {**self._environ, **self.env}
            given = {**self._given, "code": self.code}
            pid = interpreter.start(role, self._argv(), given, shared=shared, environ=environ, log=self._log)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return self.adopt(pid, ours)

    def adopt(self, pid: int, sock: socket.socket) -> Waiting:
        """Take over a process that has been started for the code of now, by this or by the zygote."""
        return Waiting(self._loop, self._children, pid, sock, digest=self.digest)

    def _argv(self) -> list[str]:
        if self._command["kind"] == "program":
            # it replaces the interpreter as a whole, so nothing needs to look like it before
            return [self._python, "-u", "-"]
        command = interpreter.moved(self._command, self.code) if self.code else self._command
        return interpreter.disguised(interpreter.command_line(self._python, command))
