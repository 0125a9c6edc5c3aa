"""What does the keeper do, and until when?

It starts ranks when the agent says so, tells the agent of every change, and holds out while agents come and go. It
ends everything and itself on `shutdown`, on SIGTERM, and when it has been alone for too long:

    `evertrain run` is there     no agent for `orphan_limit_s`
    `evertrain run` is gone      no agent for `grace_s` + 10, and in any case after `grace_s` + 20

After `shutdown` or SIGTERM nothing is left of it in shared memory. Alone it leaves the steps of its ranks there, as
nobody may have brought them to disk: the next `evertrain run` or `evertrain clean` does.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evertrain.keeper.attempts import Attempts, Refused
from evertrain.keeper.children import Children, boot_id, start_ticks
from evertrain.keeper.lines import Message
from evertrain.keeper.log import log
from evertrain.keeper.loop import Loop
from evertrain.keeper.server import Server
from evertrain.keeper.starter import Starter
from evertrain.keeper.waiting import Spawner

IDLE_TURN_S = 1.0
ALONE_MARGIN_S, HARD_MARGIN_S = 10.0, 20.0
LAST_WAIT_S = 5.0
"""So long the keeper waits for what it has killed before it goes without."""


class Keeper:
    """The parent of all ranks of one node."""

    def __init__(self, spec: dict[str, Any], *, environ: dict[str, str], stdin: int, log_fd: int) -> None:
        self._spec = spec
        self._folder = Path(spec["node_dir"])
        self._loop = Loop()
        self._children = Children(self._loop)
        self._spawner = spawner = Spawner(self._loop, self._children, spec, environ=environ, stdin=stdin, log=log_fd)
        # nothing is in more of a hurry than the import of torch
        self._starter = Starter(self._loop, self._children, spawner, spec, self._change)
        self._attempts = Attempts(self._loop, self._children, self._starter, self._change)
        self._server = Server(self._loop, self._folder, state=self._state, heard=self._heard)
        self._identity = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid()), "boot_id": boot_id()}
        self._term = 0
        self._changed = False
        self._stop_because = ""
        self._owner_left_time: float | None = None
        if spec["owner_fd"] is not None:
            self._loop.watch(spec["owner_fd"], self._owner_left)

    def run(self) -> None:
        """Keep until there is nothing more to keep."""
        may_be_needed = False
        while not self._stop_because:
            self._turn()
            if (end := self._end_time()) is not None and time.monotonic() > end:
                may_be_needed = self._has_steps()
                self.stop("alone for too long")
        log(f"shutting down: {self._stop_because}")
        self._shut_down()
        if not may_be_needed:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._clear_run_folder()

    def stop(self, because: str) -> None:
        self._stop_because = self._stop_because or because

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._loop.turn(0 if self._children.has_more_to_reap else IDLE_TURN_S)
        if self._changed:
            self._changed = False
            self._server.push()
        self._children.reap_orphans()

    def _change(self) -> None:
        self._changed = True

    def _owner_left(self) -> None:
        if os.read(self._spec["owner_fd"], 4096):
            return
        self._loop.unwatch(self._spec["owner_fd"])
        self._owner_left_time = time.monotonic()
        log("`evertrain run` is gone")
        self._change()

    def _end_time(self) -> float | None:
        return end_time(
            self._spec,
            owner_left=self._owner_left_time,
            agent_left=None if self._server.has_agent else self._server.agent_left_time,
        )

    def _shut_down(self) -> None:
        """Kill all there is, and wait for its end."""
        self._starter.close()
        self._attempts.end_all()
        deadline = time.monotonic() + LAST_WAIT_S
        while not self._children.none_left and time.monotonic() < deadline:
            self._children.kill_all()
            self._loop.turn(0.01)
            self._children.reap_orphans()
        self._server.close()

    def _has_steps(self) -> bool:
        return any((self._folder / "slots").glob("*/*"))

    def _clear_run_folder(self) -> None:
        """The last keeper of a run whose `evertrain run` is gone takes the run's folder with it."""
        run = self._folder.parent
        try:
            if self._is_owner_gone() and not any(entry.is_dir() for entry in run.iterdir()):
                shutil.rmtree(run, ignore_errors=True)
        except OSError:
            pass

    def _is_owner_gone(self) -> bool:
        """Also where it went while all was being shut down."""
        owner = self._spec["owner_fd"]
        if self._owner_left_time is not None or owner is None:
            return self._owner_left_time is not None
        return bool(select.select([owner], [], [], 0)[0])

    # -- the agent ---------------------------------------------------------------------------------------------------

    def _state(self) -> Message:
        return {
            "node": self._spec["node"],
            "keeper": self._identity,
            "starter": self._starter.state(),
            "env": self._spawner.env,
            "code": self._spawner.code,
            "owner_gone": self._owner_left_time is not None,
            "attempts": self._attempts.report(),
            "early": self._attempts.report_early(),
        }

    def _heard(self, command: Message) -> Message | None:
        """Do what the agent says; what speaks against it is the answer."""
        try:
            do = _COMMANDS[command["do"]]
            term = int(command.get("term", self._term))
            if term < self._term:
                raise Refused(f"term {term} is over, this is term {self._term}")
            self._term = term
            do(self, command)
        except Refused as reason:
            error = str(reason)
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            error = f"not understood: {problem!r}"
        else:
            return None
        log(f"refused {command.get('do')!r}: {error}")
        return {"do": command.get("do"), "attempt": command.get("attempt"), "error": error}

    def _prepare(self, command: Message) -> None:
        self._attempts.prepare(
            int(command["attempt"]),
            self._term,
            [int(rank) for rank in command["ranks"]],
            store=bool(command["store"]),
            store_port=int(command.get("store_port") or 0),
        )

    def _go(self, command: Message) -> None:
        self._attempts.go(int(command["attempt"]), dict(command["ranks"]), str(command.get("code") or ""))

    def _run_ahead(self, command: Message) -> None:
        asked = command["asked"]
        self._attempts.run_ahead(None if asked is None else {"ranks": asked["ranks"], "unknown": asked["unknown"]})

    def _end(self, command: Message) -> None:
        if command["signal"] not in (signal.SIGTERM, signal.SIGKILL):
            raise Refused(f"signal {command['signal']} is neither SIGTERM nor SIGKILL")
        self._attempts.end(int(command["attempt"]), command["signal"])

    def _forget(self, command: Message) -> None:
        self._attempts.forget(int(command["attempt"]))

    def _configure(self, command: Message) -> None:
        env = {str(name): str(value) for name, value in dict(command["env"]).items()}
        code = _read_code(command.get("code"))
        is_env_new, is_code_new = env != self._spawner.env, _place(code) != _place(self._spawner.code)
        if code != self._spawner.code:
            self._spawner.code = code
            self._change()
        self._spawner.env = env
        if is_env_new:
            log(f"from now on ranks get {', '.join(env) or 'nothing'} in addition to the environment of the job")
        if is_code_new:
            self._attempts.begin_anew()
            log(f"from now on ranks run {_name(code)}")
        elif is_env_new:
            self._attempts.renew()

    def _avoid_zygote(self, command: Message) -> None:
        if self._starter.mode != "spawn":
            self._attempts.refused(str(command["reason"]), "spawn")

    def _shutdown(self, _: Message) -> None:
        self.stop("the agent says so")


_COMMANDS: dict[str, Callable[[Keeper, Message], None]] = {
    "prepare": Keeper._prepare,
    "go": Keeper._go,
    "run_ahead": Keeper._run_ahead,
    "end": Keeper._end,
    "forget": Keeper._forget,
    "configure": Keeper._configure,
    "avoid_zygote": Keeper._avoid_zygote,
    "shutdown": Keeper._shutdown,
}


def _read_code(given: Message | None) -> Message | None:
    if given is None:
        return None
    code = {name: given[name] for name in ("digest", "root", "folder")}
    is_text = all(isinstance(value, str) and value for value in code.values())
    if not is_text or not os.path.isabs(code["root"]) or not os.path.isabs(code["folder"]):
        raise ValueError(f"code without a digest, or whose folders are not absolute: {given}")
    return {"version": int(given["version"]), **code}


def _place(code: Message | None) -> Message | None:
    """All but the number: two versions may have the same files and differ in arguments."""
    return code and {**code, "version": None}


def _name(code: Message | None) -> str:
    if code is None:
        return "the user's own files"
    return f"version {code['version']} ({code['digest'][:12]}) from {code['folder']}"


def end_time(spec: dict[str, Any], *, owner_left: float | None, agent_left: float | None) -> float | None:
    """When the keeper gives up waiting; None while somebody is there to tell it."""
    if owner_left is None:
        return None if agent_left is None else agent_left + float(spec["orphan_limit_s"])
    hard = owner_left + float(spec["grace_s"]) + HARD_MARGIN_S
    if agent_left is None:
        return hard
    return min(hard, max(owner_left, agent_left) + float(spec["grace_s"]) + ALONE_MARGIN_S)
