"""Where does a rank wait that runs its script before anybody knows which rank it is?

On a standby, with `--standby-barrier init`: the script runs up to `evertrain.init()`, where the process waits until its
node takes over ranks. Then it is told all that a rank is told at its start, and goes on as one.

Nothing before that may depend on what is not known yet. Whoever asks for it, by the environment, torch.distributed or
another call of ours, gets no wrong answer: the process says why it cannot be ahead, and is ended. So is one whose files
have changed since it read them.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable
from typing import NoReturn

from evertrain.worker import disguise, freshness, script, session, talk

_LOOK_S = 1.0
"""Files of the script are looked at so often."""


class Barrier:
    """`evertrain.init()` of this process, before it has been reached."""

    def __init__(self, line: int, command: script.Command, unknown: Iterable[str], code_root: str = "") -> None:
        """`unknown`: the variables that a rank has and this process has not yet."""
        self._line = line
        self._command = command
        self._code_root = code_root
        self._unknown = frozenset(unknown)
        self._environment = session.import_time_environment()
        self.told: talk.Message | None = None
        """What the keeper has said at the end of the wait."""
        # of an outer launcher, maybe; each is set anew
        for name in self._unknown:
            os.environ.pop(name, None)
        os.environ.__class__ = _Watched

    def wait(self) -> None:
        """Until this process is a rank."""
        imported = freshness.Imported(self._command, self._code_root)
        talk.say(self._line, {"is": "at_barrier"})
        while not select.select([self._line], [], [], _LOOK_S)[0]:
            if file := imported.changed():
                self._leave(f"{file} has changed", stale=True)
        self.told = told = talk.hear(self._line)
        os.close(self._line)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        disguise.redirect_output(told["stdout"], told["stderr"])
        session.barrier = None
        os.environ.__class__ = os._Environ
        os.environ.update(told["env"])
        session.begin(told["session"], self._environment)

    def give_up(self, reason: str) -> NoReturn:
        """This script cannot be ahead of its start."""
        self._leave(reason, stale=False)

    def _leave(self, reason: str, *, stale: bool) -> NoReturn:
        talk.say(self._line, {"is": "cannot_wait", "reason": reason, "stale": stale})
        if os.read(self._line, 1 << 10):
            # let go in the same moment: a failed start is tried again, a rank with old code or without a number is not
            print(f"evertrain: this rank could not go on: {reason}", file=sys.stderr)
            os._exit(1)
        os._exit(0)

    def asks_for(self, name: str) -> None:
        """The script reads or sets a variable of the environment."""
        if name in self._unknown:
            self.give_up(f"the script needs {name} before it calls evertrain.init()")


class _Watched(os._Environ):  # type: ignore[type-arg]
    """The environment while some of it is not known yet: a default in its place would be a wrong answer."""

    def __getitem__(self, key: str) -> str:
        if session.barrier is not None:
            session.barrier.asks_for(key)
        found: str = super().__getitem__(key)
        return found

    def __setitem__(self, key: str, value: str) -> None:
        if session.barrier is not None:
            session.barrier.asks_for(key)
        super().__setitem__(key, value)
