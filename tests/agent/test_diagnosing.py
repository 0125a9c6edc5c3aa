"""A stopped node tests itself when it is told to, with the ranks' interpreter, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from evertrain.agent.diagnosing import Diagnosing, State
from evertrain.model.diagnosis import Inspected, InspectOrder
from evertrain.model.report import Desired
from support import processes

LIMIT_S = 90.0


class Node:
    """An agent's end, without the agent."""

    def __init__(self, folder: Path, python: str = sys.executable) -> None:
        self.state: State | None = {"attempts": {}}
        self.log = folder / "tests.log"
        self.woken = asyncio.Event()
        self.diagnosing = Diagnosing("node-1", python, folder / "scratch", self.log, lambda: self.state, self.woken.set)

    def order(self, order: InspectOrder | None) -> None:
        self.diagnosing.obey(Desired(job="job", term=1, inspect=order))

    async def ask(self, number: int, program: str, *, budget_s: float = 60.0, **parameters: Any) -> Inspected:
        self.order(InspectOrder(number=number, ranks=1, program=program, parameters=parameters, budget_s=budget_s))
        return await self.answer(number)

    async def answer(self, number: int) -> Inspected:
        async with asyncio.timeout(LIMIT_S):
            while (found := self.diagnosing.inspected) is None or found.number != number:
                self.woken.clear()
                await self.woken.wait()
        return found

    @property
    def pid(self) -> int | None:
        server = self.diagnosing._server
        return server._process.pid if server is not None else None


def _children(pid: int) -> list[int]:
    return [one.pid for one in psutil.Process(pid).children(recursive=True)]


def on_a_node(folder: Path, test: Callable[[Node], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        node = Node(folder, **options)
        try:
            await test(node)
        finally:
            await node.diagnosing.close()

    asyncio.run(run())


def test_one_test_after_the_other_by_one_process_that_ends_when_none_is_wanted(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        first = await node.ask(1, "compute", size=32, dtypes=["float32"])
        assert first.outcome == "passed", first
        assert [(one.rank, one.name, one.unit, one.ok) for one in first.readings] == [
            (0, "matmul float32 whole", "GFLOP/s", True),
            (0, "matmul float32 fraction", "GFLOP/s", True),
        ]
        pid = node.pid
        assert pid is not None and processes.identify(pid)
        node.order(InspectOrder(number=1, ranks=1))  # it is noted; the next one cannot begin yet
        assert node.diagnosing.inspected is None, "so it is not sent again"
        second = await node.ask(2, "alignment", repeats=2)
        assert second.readings[0].detail["setting"]["threads"] == 1
        assert node.pid == pid, "the same one"
        node.order(InspectOrder(number=3, ranks=1, program="compute", parameters={"colour": "red"}))
        assert node.diagnosing.inspected is None, "who is asked the next thing has been heard"
        refused = await node.answer(3)
        assert refused.outcome == "refused" and "colour" in refused.because
        late = await node.ask(4, "memory", budget_s=0.01, size_bytes=1 << 28, rounds=100)
        assert late.outcome in ("late", "passed")
        node.order(None)
        assert node.diagnosing.inspected is None
        await node.diagnosing.close()
        assert not processes.identify(pid)

    on_a_node(tmp_path, test)


def test_while_ranks_run_nothing_is_tested(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        node.state = {"attempts": {"2": {"phase": "running", "ranks": {"0": {"state": "running"}}}}}
        found = await node.ask(1, "compute")
        assert (found.outcome, found.because, node.pid) == ("refused", "ranks of attempt 2 run here", None)
        node.state = None
        found = await node.ask(2, "compute")
        assert (found.outcome, found.because) == ("refused", "the agent cannot reach its keeper")

    on_a_node(tmp_path, test)


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "ended by themselves"), ("echo '{}'; exec cat", "nothing of use"), ("echo hello", "hello")],
)
def test_an_interpreter_that_cannot_test_accuses_nobody(tmp_path: Path, script: str, said: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)

    async def test(node: Node) -> None:
        found = await node.ask(1, "compute")
        assert found.outcome == "absent" and said in found.because, found

    on_a_node(tmp_path, test, python=str(python))


def test_no_interpreter_at_all(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        found = await node.ask(1, "compute")
        assert found.outcome == "absent" and "cannot be started" in found.because

    on_a_node(tmp_path, test, python=str(tmp_path / "nothing"))


def test_what_is_no_longer_wanted_is_ended_in_the_middle(tmp_path: Path) -> None:
    async def test(node: Node) -> None:
        await node.ask(1, "compute", size=8, dtypes=["float32"], rounds=1)
        pid = node.pid
        assert pid is not None
        node.order(InspectOrder(number=2, ranks=1, program="alignment", parameters={"repeats": 10**6}, budget_s=60.0))
        async with asyncio.timeout(LIMIT_S):
            while not (children := _children(pid)):
                await asyncio.sleep(0.01)
        node.order(None)
        async with asyncio.timeout(LIMIT_S):
            while any(map(processes.identify, (pid, *children))):
                await asyncio.sleep(0.01)
        found = await node.ask(3, "compute", size=8, dtypes=["float32"], rounds=1)
        assert found.outcome == "passed", "and the next one finds another process"

    on_a_node(tmp_path, test)


def test_what_a_test_has_started_ends_with_it(tmp_path: Path) -> None:
    program = tmp_path / "dcgmi"
    told = tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ > {told}.new; mv {told}.new {told}\nexec sleep 600\n")
    program.chmod(0o700)

    async def test(node: Node) -> None:
        order = InspectOrder(number=1, ranks=1, program="vendor", parameters={"dcgmi": str(program)}, budget_s=60.0)
        node.order(order)
        async with asyncio.timeout(LIMIT_S):
            while not told.exists():
                await asyncio.sleep(0.01)
        pid = int(told.read_text())
        assert processes.identify(pid)
        await node.diagnosing.close()
        async with asyncio.timeout(LIMIT_S):
            while processes.identify(pid):
                await asyncio.sleep(0.01)

    on_a_node(tmp_path, test)
