"""Windows of trace rings: asked for, collected until a deadline, handed on, and kept for incidents within a limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from evertrain.controller import window_files, windows
from evertrain.model.windows import JobWindow, NodePart, NodeWindow, WindowOrder, decode, pack, unpack
from support.conducted import Served, served, until


class Serving(Served):
    async def ordered(self, wish: bytes = b"{}") -> WindowOrder:
        """What the agents are told, once both are."""
        status, answer = await self.ask("POST", "/v1/windows", wish)
        assert status == 202, answer
        await until(lambda: all(self.told(answer["window"])), "the agents are told")
        return next(filter(None, self.told(answer["window"])))

    def told(self, number: int) -> list[WindowOrder | None]:
        return [
            next((one for one in self.orders[node].windows if one.number == number), None)
            if node in self.orders
            else None
            for node in self.world.nodes
        ]

    async def send(self, number: int, node: str, **different: Any) -> tuple[int, Any]:
        window = NodeWindow(number=number, attempt=1, node=node, monotonic_ns=5, zero=1.0, **different)
        return await self.ask("PUT", f"/v1/windows/{number}/{node}", pack(window))

    async def over(self, number: int) -> JobWindow:
        deadline = time.monotonic() + 20.0
        while True:
            status, answer = await self.ask("GET", f"/v1/windows/{number}")
            if status == 200:
                return decode(answer)
            assert status == 202 and time.monotonic() < deadline, (status, answer)
            await asyncio.sleep(0.01)


@pytest.fixture
async def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Serving]:
    async with served(tmp_path, monkeypatch) as parts:
        yield Serving(*parts)


async def test_what_all_nodes_send_comes_back_as_it_was(serving: Serving) -> None:
    serving.conductor.windows.note_offset("node-1", 2.5)
    order = await serving.ordered(b'{"seconds": 7, "brief": true, "writers": ["nccl"]}')
    assert (order.attempt, order.seconds, order.brief, order.writers) == (1, 7.0, True, ("nccl",))
    assert (await serving.ask("GET", f"/v1/windows/{order.number}"))[0] == 202
    for node in ("node-0", "node-1"):
        assert (await serving.send(order.number, node))[0] == 200
    found = await serving.over(order.number)
    assert [unpack(part.packed).node for part in found.parts] == ["node-0", "node-1"]
    assert [part.offset_s for part in found.parts] == [0.0, 2.5] and found.missing == ()
    await until(lambda: not any(serving.told(order.number)), "nobody is asked any more")


async def test_who_sends_nothing_is_named_and_nobody_waits_for_it(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "COLLECT_S", 0.5)
    order = await serving.ordered()
    await serving.send(order.number, "node-0")
    found = await serving.over(order.number)
    assert (len(found.parts), found.missing) == (1, ("node-1",))
    assert (await serving.send(order.number, "node-1"))[0] == 410


async def test_the_same_wish_is_asked_for_once_and_too_many_are_not_taken(serving: Serving) -> None:
    first = await serving.ordered()
    assert (await serving.ordered()).number == first.number
    for seconds in (b"1", b"2", b"3"):
        await serving.ordered(b'{"seconds": %s}' % seconds)
    assert (await serving.ask("POST", "/v1/windows", b'{"seconds": 4}'))[0] == 503


async def test_what_does_not_belong_there_is_refused(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    order = await serving.ordered()
    assert (await serving.send(order.number, "node-9"))[0] == 403
    assert (await serving.send(order.number + 1, "node-0"))[0] == 410
    monkeypatch.setattr(windows, "MOST_BYTES", 10)
    assert (await serving.send(order.number, "node-0"))[0] == 413
    for wish in (b'{"seconds": 0}', b'{"seconds": 1e9}', b'{"minutes": 1}', b"no"):
        assert (await serving.ask("POST", "/v1/windows", wish))[0] == 400
    assert (await serving.ask("GET", "/v1/windows/12345"))[0] == 404


async def test_the_seconds_before_an_incident_are_kept(serving: Serving, tmp_path: Path) -> None:
    await until(lambda: len(serving.orders) == 2, "orders")
    serving.conductor.raise_signal("node-1", "gpu_lost", "a test")
    incident = windows.INCIDENT_S

    def told() -> WindowOrder | None:
        orders = [one for order in serving.orders.values() for one in order.windows]
        return next((one for one in orders if one.seconds == incident), None)

    await until(told, "the agents are asked by themselves")
    order = told()
    assert order is not None
    for node in ("node-0", "node-1"):
        assert (await serving.send(order.number, node))[0] == 200
    await until(lambda: window_files.incidents(tmp_path) == [1], "it is kept")
    kept = window_files.read(tmp_path, 1)
    assert kept is not None and len(kept.parts) == 2 and kept.attempt == 1
    assert window_files.read(tmp_path, 2) is None


def test_the_oldest_go_when_they_are_too_much_together(tmp_path: Path) -> None:
    def window(number: int, size: int) -> JobWindow:
        part = NodePart(node="node-0", packed=bytes(size))
        return JobWindow(job="job", number=number, attempt=1, seconds=1.0, time=0.0, parts=(part,))

    for number in (1, 2, 3):
        window_files.write(tmp_path, number, window(number, 400), most_bytes=1200)
    assert window_files.incidents(tmp_path) == [2, 3]
    window_files.write(tmp_path, 4, window(4, 4000), most_bytes=1200)
    assert window_files.incidents(tmp_path) == [2, 3], "one that is too much alone takes nobody's place"
    (tmp_path / "traces" / "incident-3.window").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"incident-3\.window"):
        window_files.read(tmp_path, 3)
