"""A conductor that runs, with or without its port: two nodes with two ranks each, whose agents are the test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from evertrain.controller import conductor as conducting
from evertrain.controller import server
from evertrain.controller.conductor import Conductor
from evertrain.controller.store import EventStore
from evertrain.model.report import Desired
from support.world import World


async def until(condition: Callable[[], object], what: str, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.005)


class Conducted:
    """What the agents have been told last is in `orders`."""

    def __init__(self, world: World, conductor: Conductor) -> None:
        self.world, self.conductor = world, conductor
        self.orders: dict[str, Desired] = {}
        for node in world.nodes:
            conductor.connect(node, lambda order, node=node: self.orders.__setitem__(node, order))  # type: ignore[misc]


class Served(Conducted):
    """The same behind its port."""

    def __init__(self, world: World, conductor: Conductor, url: str, session: aiohttp.ClientSession) -> None:
        super().__init__(world, conductor)
        self.url, self.session = url, session

    async def ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
        async with self.session.request(method, f"{self.url}{path}", data=body) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await answer.json() if is_json else await answer.read()


@asynccontextmanager
async def conducted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[World, Conductor]]:
    """The job has done three steps; nothing of what follows may end its conductor."""
    monkeypatch.setattr(conducting, "_SILENT_HEARTBEATS", 1e6)
    world = World(mesh="dp=4")
    world.turns()
    world.train(3)
    world.turns()
    world.spec = replace(world.spec, run_dir=str(folder), database=str(folder / "events.db"), mesh="dp=4")
    store = EventStore(folder / "events.db")
    conductor = Conductor(world.spec, world.state, store)
    for node in world.nodes.values():
        assert node.heard is not None
        conductor._nodes[node.name] = replace(node.heard, connected=True)
        conductor._heard[node.name] = time.monotonic()
    running = asyncio.create_task(conductor.run())
    yield world, conductor
    assert not running.done(), "nothing of this may end the conductor"
    running.cancel()
    await asyncio.to_thread(store.close)


@asynccontextmanager
async def served(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[World, Conductor, str, aiohttp.ClientSession]]:
    async with conducted(folder, monkeypatch) as (world, conductor):
        app = server.build(world.spec, conductor, "secret")
        headers = {"Authorization": "Bearer secret"}
        async with TestServer(app) as port, aiohttp.ClientSession(headers=headers) as session:
            yield world, conductor, str(port.make_url("")).rstrip("/"), session
