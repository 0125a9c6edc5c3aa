"""Is this machine well? A stopped node tests itself when it is told to (`Desired.inspect`), and says what it found.

The test programs run in a process of the ranks' interpreter (`evertrain.diagnose`) that gives way to others, serves one
test after the other, and ends when it is no longer needed, or with this agent. No test begins while ranks run here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from evertrain.keeper.interpreter import PACKAGE_PARENT
from evertrain.model.diagnosis import Inspected, InspectOrder, Outcome, Reading
from evertrain.model.report import Desired

_log = logging.getLogger(__name__)

PROGRAM = Path(PACKAGE_PARENT) / "evertrain" / "diagnose" / "__main__.py"
START_S = 60.0
"""For an interpreter to come up with torch."""
BESIDE_S = 5.0
"""Beyond its budget: a test that is late is ended and told of by its own server, which is given so long for it."""
END_S = 1.0
"""For its server to end by itself, once nothing more is asked; while it still imports torch it does not listen."""
_NICE = 5
_LINE_BYTES = 64 << 20

State = dict[str, Any]


class Trouble(Exception):
    """Nothing can be tested, or the test said nothing; one line for the user."""


class Server:
    """One process that runs test programs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, python: str, given: dict[str, Any], log: Path) -> Server:
        """Have one that is ready. Raises Trouble."""
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            Path(given["folder"]).mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    python,
                    "-I",
                    str(PROGRAM),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                    limit=_LINE_BYTES,
                )
        except OSError as error:
            raise Trouble(f"the test programs cannot be started: {error}") from error
        server = cls(process)
        try:
            with suppress(ProcessLookupError):  # what is wrong is heard below
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            server.say(given)
            line = await asyncio.wait_for(server.hear(), START_S)
            if line.get("is") != "ready":
                raise Trouble(f"the test programs cannot run here: {line.get('because') or 'they say nothing of use'}")
        except TimeoutError:
            await server.close()
            raise Trouble(f"the test programs were not ready within {START_S:.0f} s; see {log}") from None
        except (OSError, Trouble) as error:
            await server.close()
            raise Trouble(f"{error}; see {log}") from error
        except BaseException:
            await server.close()
            raise
        return server

    def say(self, line: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(line).encode() + b"\n")

    async def hear(self) -> dict[str, Any]:
        """The next line. Raises Trouble where there is none any more."""
        assert self._process.stdout is not None
        try:
            text = await self._process.stdout.readline()
        except ValueError as error:
            raise Trouble("the test programs said more than can be read") from error
        if not text:
            raise Trouble("the test programs have ended by themselves")
        try:
            line: dict[str, Any] = json.loads(text)
        except ValueError as error:
            raise Trouble(f"the test programs said something else than they should: {text[:60]!r}") from error
        return line

    async def test(self, order: InspectOrder) -> Inspected:
        """Run one test. Raises Trouble, after which this server is of no use any more."""
        test = {"id": order.number, "program": order.program, "budget_s": order.budget_s}
        self.say({**test, "parameters": order.parameters})
        readings: list[Reading] = []
        try:
            async with asyncio.timeout(order.budget_s + BESIDE_S):
                while (line := await self.hear())["is"] == "reading":
                    readings.append(_reading(line))
        except TimeoutError:
            raise Trouble(f"no end within {order.budget_s:g} s") from None
        return Inspected(
            number=order.number,
            outcome=line["outcome"],
            because=line["because"],
            seconds=line["seconds"],
            readings=tuple(readings),
        )

    async def close(self) -> None:
        """End it and what it has started; a process inside a dead driver is left behind."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(TimeoutError):
            # it ends what its ranks have started, which would outlive them
            await asyncio.wait_for(self._process.wait(), END_S)
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its ranks end with it
        try:
            await asyncio.wait_for(self._process.wait(), BESIDE_S)
        except TimeoutError:
            _log.error("the process of the test programs (pid %d) cannot be killed", self._process.pid)


def _reading(line: dict[str, Any]) -> Reading:
    value = line["value"]
    kept = {**line, "value": value if value is None or math.isfinite(value) else None}
    return msgspec.convert({name: kept[name] for name in Reading.__struct_fields__ if name in kept}, Reading)


class Diagnosing:
    """Obeys the newest order."""

    def __init__(
        self,
        node: str,
        python: str,
        folder: Path,
        log: Path,
        keeper: Callable[[], State | None],
        wake: Callable[[], None],
    ) -> None:
        """`folder`: node-local, for scratch files; `log`: where the programs' errors go."""
        self._node, self._python, self._folder, self._log = node, python, folder, log
        self._keeper = keeper
        self._wake = wake
        self._wanted: InspectOrder | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._found: Inspected | None = None
        """By the newest test that is over."""

    @property
    def inspected(self) -> Inspected | None:
        """What came of the test that is asked for. Thousands of hashes: nothing that the controller has noted."""
        wanted, found = self._wanted, self._found
        is_asked = wanted is not None and found is not None and wanted.program and wanted.number == found.number
        return found if is_asked else None

    def obey(self, order: Desired) -> None:
        """Test, if that is asked. An order that was obeyed changes nothing."""
        before, self._wanted = self._wanted, order.inspect
        if self._wanted != before:
            self._changed.set()
            if self._task is None and self._wanted is not None:
                self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        """Leave nothing behind."""
        self._wanted = None
        self._changed.set()
        while self._task is not None:
            await self._task

    async def _serve(self) -> None:
        """Until nothing is wanted any more."""
        while (order := self._wanted) is not None:
            self._changed.clear()
            if not order.program or self.inspected is not None:
                await self._changed.wait()
                continue
            found = await self._unless_changed(order)
            if found is None:
                await self._end_server()
            else:
                self._found = found
                self._wake()
        await self._end_server()
        # what was asked for while the server ended
        self._task = asyncio.create_task(self._serve()) if self._wanted is not None else None

    async def _unless_changed(self, order: InspectOrder) -> Inspected | None:
        """What comes of it; None: something else is wanted meanwhile, or nothing, and the test was given up."""
        testing = asyncio.create_task(self._inspect(order))
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait((testing, changed), return_when=asyncio.FIRST_COMPLETED)
        for task in (testing, changed):
            task.cancel()
        await asyncio.wait((testing, changed))
        return None if testing.cancelled() else testing.result()

    async def _inspect(self, order: InspectOrder) -> Inspected:
        began = time.monotonic()
        outcome: Outcome = "absent"
        try:
            if because := self._is_busy():
                return Inspected(number=order.number, outcome="refused", because=because)
            if self._server is None:
                given = {"node": self._node, "ranks": order.ranks, "folder": str(self._folder)}
                self._server = await Server.start(self._python, given, self._log)
            outcome = "late"
            return await self._server.test(order)
        except Trouble as error:
            await self._end_server()
            seconds = round(time.monotonic() - began, 3)
            return Inspected(number=order.number, outcome=outcome, because=str(error), seconds=seconds)
        except Exception as error:  # a bug of ours; the agent lives on, and this node is not to blame
            _log.exception("test %d", order.number)
            await self._end_server()
            return Inspected(number=order.number, outcome="absent", because=f"{type(error).__name__}: {error}")

    def _is_busy(self) -> str:
        """Why no test may begin here; empty: one may."""
        state = self._keeper()
        if state is None:
            return "the agent cannot reach its keeper"
        for number, attempt in state["attempts"].items():
            if attempt["phase"] == "running" and any(one["state"] == "running" for one in attempt["ranks"].values()):
                return f"ranks of attempt {number} run here"
        return ""

    async def _end_server(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            await server.close()
