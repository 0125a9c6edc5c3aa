"""What rings hold is read and sent once for each order, whatever they look like and whoever answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from evertrain.agent.rings import Rings
from evertrain.agent.windowing import Windowing
from evertrain.model.report import Desired
from evertrain.model.spec import AgentSpec
from evertrain.model.windows import NodeWindow, WindowOrder, unpack
from support import traced


class Controller:
    def __init__(self, folder: Path) -> None:
        self.came: list[NodeWindow] = []
        self.status = 200
        self.spec = AgentSpec(
            job="job", run_id="job-1", node="node-0", node_dir=str(folder), disk_dir="", log_root="",
            controller_url="", token_file="", fired_dir="",
        )  # fmt: skip
        self.folder = folder

    async def take(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer secret"
        window = unpack(await request.read())
        assert request.match_info["number"] == str(window.number) and request.match_info["node"] == window.node
        self.came.append(window)
        return web.Response(status=self.status)

    def agent(self) -> Windowing:
        page_path = lambda attempt, rank: self.folder / "pages" / f"a{attempt}-r{rank}"  # noqa: E731
        return Windowing(self.spec, "secret", Rings(self.spec), page_path, zero=0.0)

    async def has_come(self, count: int) -> None:
        deadline = time.monotonic() + 20.0
        while len(self.came) < count:
            assert time.monotonic() < deadline, f"{count} windows"
            await asyncio.sleep(0.01)


@pytest.fixture
async def controller(tmp_path: Path) -> AsyncIterator[Controller]:
    made = Controller(tmp_path)
    app = web.Application()
    app.add_routes([web.put("/v1/windows/{number}/{node}", made.take)])
    async with TestServer(app) as port:
        made.spec = replace(made.spec, controller_url=str(port.make_url("")).rstrip("/"))
        yield made


def order(*numbers: int, attempt: int = 1) -> Desired:
    windows = tuple(WindowOrder(number=number, attempt=attempt, seconds=60.0) for number in numbers)
    return Desired(job="job", term=1, windows=windows)


async def test_each_order_is_obeyed_once_and_several_at_a_time(controller: Controller, tmp_path: Path) -> None:
    traced.job(tmp_path)
    agent = controller.agent()
    agent.obey(order(7))
    agent.obey(order(7, 8))
    await controller.has_come(2)
    agent.obey(order(7, 8))
    agent.obey(order(9))
    await controller.has_come(3)
    assert sorted(window.number for window in controller.came) == [7, 8, 9]
    window = controller.came[0]
    assert len(window.rings) == 8 and {ring.writer for ring in window.rings} == {"hook", "agent"}
    assert [group.desc for group in window.groups] == ["default_pg"] and len(window.ends) == 8


async def test_a_refusal_is_no_trouble(controller: Controller, tmp_path: Path) -> None:
    controller.status = 410
    traced.job(tmp_path, ranks=(0,))
    agent = controller.agent()
    agent.obey(order(7))
    await controller.has_come(1)
    controller.status = 200
    agent.obey(order(8))
    await controller.has_come(2)


def test_another_attempt_and_a_damaged_ring_are_told_apart(controller_free: Controller, tmp_path: Path) -> None:
    traced.job(tmp_path, attempt=1)
    traced.job(tmp_path, attempt=2, ranks=(0,))
    (tmp_path / "trace" / "a2-r1-hook.ring").write_bytes(b"nonsense")
    window = controller_free.agent().read(WindowOrder(number=1, attempt=2, seconds=60.0))
    assert [(ring.rank, ring.writer, bool(ring.problem)) for ring in window.rings] == [
        (0, "agent", False), (0, "hook", False), (1, "hook", True),
    ]  # fmt: skip


def test_of_some_writers_only(controller_free: Controller, tmp_path: Path) -> None:
    traced.job(tmp_path, attempt=1, ranks=(0,))
    window = controller_free.agent().read(WindowOrder(number=1, attempt=1, seconds=60.0, writers=("hook",)))
    assert [ring.writer for ring in window.rings] == ["hook"] and window.ends == ()


@pytest.fixture
def controller_free(tmp_path: Path) -> Controller:
    return Controller(tmp_path)


def test_a_node_without_rings_has_nothing_to_say(controller_free: Controller) -> None:
    window = controller_free.agent().read(WindowOrder(number=1, attempt=1, seconds=1.0))
    assert (window.rings, window.groups, window.ends) == ((), (), ())
