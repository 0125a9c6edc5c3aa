"""What is asked for is looked at once, and sent, whatever happens to ranks and controller."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from evertrain.agent import capturing
from evertrain.agent.capturing import Capturing
from evertrain.agent.node import NodeView
from evertrain.model.recording import Group
from evertrain.model.report import Desired
from evertrain.model.spec import AgentSpec
from evertrain.model.stacks import CaptureOrder, NodeCapture, RecorderDumps
from evertrain.observe import process_tree, recorder_dumps, stack_capture
from evertrain.worker import contact, page
from support import still

TOKEN = "secret"


@pytest.fixture
def start() -> Iterator[still.Start]:
    with still.processes() as start:
        yield start


class World:
    """A controller that takes captures, and a node with ranks 4 and 5."""

    def __init__(self, folder: Path, start: still.Start, url: str) -> None:
        self.folder = folder
        self.statuses: list[int] = []
        """Of the next answers; then 200."""
        self.came: list[NodeCapture] = []
        self.dumps: list[RecorderDumps] = []
        self.woken = 0
        self.processes = {rank: start(still.SLEEPER) for rank in (4, 5)}
        self.state: dict[str, Any] | None = {
            "attempts": {
                "2": {
                    "phase": "running",
                    "ranks": {str(rank): {"pid": one.pid, "state": "running"} for rank, one in self.processes.items()},
                }
            }
        }
        spec = AgentSpec(
            job="job", run_id="job-1", node="gpu02", node_dir=str(folder), disk_dir="", log_root="",
            controller_url=url, token_file="", fired_dir="",
        )  # fmt: skip
        self.view = NodeView(spec)
        self.writers = {}
        (folder / "pages").mkdir()
        for rank, one in self.processes.items():
            path = str(self.view.page_path(2, rank))
            page.create(path, job="job", term=1, attempt=2, rank=rank)
            writer = self.writers[rank] = page.PageWriter(path)
            writer.pid = one.pid
            writer.write()
            writer.write_collective(b"0", 7, b"allreduce", page.ENTERED)
        self.view.look(self.state)
        self.capturing = Capturing(spec, TOKEN, self.view, lambda: self.state, 1000.0, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    async def take(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        assert request.match_info["node"] == "gpu02"
        body = await request.read()
        if self.statuses and (status := self.statuses.pop(0)) != 200:
            return web.json_response({"error": "not now"}, status=status)
        capture = msgspec.msgpack.decode(body, type=NodeCapture)
        assert request.match_info["number"] == str(capture.number)
        self.came.append(capture)
        return web.json_response({})

    def ask(self, number: int, attempt: int = 2, **more: Any) -> None:
        order = CaptureOrder(number=number, attempt=attempt, **more)
        self.capturing.obey(Desired(job="job", term=1, capture=order))

    def note_groups(self, rank: int, *lines: dict[str, Any]) -> None:
        path = contact.groups_path(str(self.view.page_path(2, rank)))
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"name": "torn')


@pytest.fixture
async def world(tmp_path: Path, start: still.Start) -> AsyncIterator[World]:
    made: list[World] = []

    async def take(request: web.Request) -> web.Response:
        return await made[0].take(request)

    app = web.Application(client_max_size=64 << 20)

    async def take_dumps(request: web.Request) -> web.Response:
        made[0].dumps.append(msgspec.msgpack.decode(await request.read(), type=RecorderDumps))
        return web.json_response({})

    app.add_routes([web.put("/v1/captures/{number}/{node}", take)])
    app.add_routes([web.put("/v1/captures/{number}/{node}/recorders", take_dumps)])
    async with TestServer(app) as server:
        made.append(World(tmp_path, start, str(server.make_url("")).rstrip("/")))
        yield made[0]


async def until(is_so: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(30):
            while not is_so():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within 30 s: {what}") from None


async def test_stacks_activities_and_groups_of_all_ranks(world: World) -> None:
    default, pair = {"name": "0", "desc": "default_pg", "ranks": list(range(8))}, {"name": "3", "ranks": [4, 5]}
    world.note_groups(4, default, {**pair, "desc": "tp"})
    world.note_groups(5, default, {"blind": "flight recorder: no socket"})
    world.ask(1)
    await until(lambda: world.capturing.captured == 1, "it is over")
    (capture,) = world.came
    assert (capture.number, capture.attempt, capture.node) == (1, 2, "gpu02")
    assert capture.time > 1000.0
    (position,) = capture.positions
    assert sorted(member.rank for member in position.members) == [4, 5]
    assert position.frames[0].function == "wait_here" and position.kind == "trainer"
    assert sorted(one.rank for one in capture.activities) == [4, 5], "also those that have not stood still for long"
    assert all(one.inside is not None and one.inside.seq == 7 for one in capture.activities)
    assert {one.name: one for one in capture.groups} == {
        "0": Group("0", "default_pg"),
        "3": Group("3", "tp", (4, 5)),
    }, "nobody sends ten thousand ranks of the group of all"
    assert capture.blind == ("gpu02: rank 5: flight recorder: no socket",)
    assert world.woken == 1


async def test_once_for_each_number(world: World) -> None:
    for number in (1, 1, 3, 2, 3):
        world.ask(number)
        await until(lambda: world.capturing.captured >= number, "it is over")  # noqa: B023
    assert [one.number for one in world.came] == [1, 3]
    world.capturing.obey(Desired(job="job", term=1))
    assert world.capturing.captured == 3


async def test_the_newest_of_those_that_came_meanwhile(world: World) -> None:
    for number in (1, 2, 3):
        world.ask(number)
        await asyncio.sleep(0)
    await until(lambda: world.capturing.captured == 3, "they are over")
    assert [one.number for one in world.came] in ([1, 3], [3])


async def test_a_controller_that_is_started_again_gets_it_all_the_same(world: World) -> None:
    world.statuses = [503, 500]
    world.ask(1)
    await until(lambda: world.capturing.captured == 1, "it is over")
    assert [one.number for one in world.came] == [1]


async def test_what_nobody_wants_any_more_is_dropped(world: World) -> None:
    world.statuses = [410]
    world.ask(1)
    await until(lambda: world.capturing.captured == 1, "it is over")
    assert world.came == []


async def test_an_unreachable_controller_is_given_up_in_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "_SEND_S", 0.3)
    world.statuses = [503] * 50
    world.ask(1)
    await until(lambda: world.capturing.captured == 1, "it is over")
    world.statuses = []
    world.ask(2)
    await until(lambda: world.capturing.captured == 2, "the next is not hindered by it")


async def test_without_ranks_or_a_keeper_it_says_so(world: World) -> None:
    world.ask(1, attempt=9)
    await until(lambda: world.capturing.captured == 1, "it is over")
    world.state = None
    world.ask(2)
    await until(lambda: world.capturing.captured == 2, "it is over")
    assert [one.positions for one in world.came] == [(), ()]
    assert world.came[0].blind == ("gpu02: no rank of attempt 9 runs here",)
    assert world.came[1].blind == ("gpu02: the agent cannot reach its keeper",)


async def test_a_look_that_hangs_or_fails_is_told_of(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "_LIMIT_S", 0.3)
    free = threading.Event()
    monkeypatch.setattr(stack_capture, "look", lambda *_: free.wait(20) and ([], ()))
    world.note_groups(4, {"name": "3", "ranks": [4, 5]}, {"name": "0", "ranks": list(range(8))})
    world.ask(1)
    await until(lambda: world.capturing.captured == 1, "it is over")
    free.set()

    def fail(*_: Any) -> Any:
        raise RuntimeError("no stacks today")

    monkeypatch.setattr(stack_capture, "look", fail)
    world.ask(2)
    await until(lambda: world.capturing.captured == 2, "it is over")
    hung, failed = world.came
    assert hung.blind[0].startswith("gpu02: ranks 4-5: the look has not come to its end")
    assert {one.name for one in hung.groups} == {"0", "3"} and len(hung.activities) == 2, "what was found is sent"
    assert "no stacks today" in failed.blind[0]


async def test_a_stopped_rank(world: World) -> None:
    world.processes[5].send_signal(signal.SIGSTOP)
    pid = world.processes[5].pid
    await until(lambda: process_tree.own(5, pid).state == "stopped", "it is stopped")
    world.ask(1)
    await until(lambda: world.capturing.captured == 1, "it is over")
    by_rank = {member.rank: one for one in world.came[0].positions for member in one.members}
    assert by_rank[5].state == "stopped" and by_rank[4].state == ""
    assert {one.rank for one in world.came[0].activities if one.stopped} == {5}


async def test_recorders_are_asked_and_a_silent_one_is_not_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "_RECORDER_S", 0.5)
    path = contact.socket_path(str(world.view.page_path(2, 4)))
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        world.ask(1)
        await until(lambda: world.capturing.captured == 1, "it is over")
        assert any(line.startswith("gpu02: rank 4: no flight recorder:") for line in world.came[0].blind)
        world.ask(2, recorder=False)
        await until(lambda: world.capturing.captured == 2, "it is over")
        assert world.came[1].blind == ()


async def test_what_recorders_hold_is_sent_as_it_is_where_that_is_wanted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = b'{"entries": [], "version": "2.10"}'
    monkeypatch.setattr(recorder_dumps, "fetch_raw", lambda socket, limit_s: raw)
    Path(contact.socket_path(str(world.view.page_path(2, 4)))).touch()
    world.ask(1)
    await until(lambda: world.capturing.captured == 1, "it is over")
    assert world.dumps == []
    world.ask(2, dumps=True)
    await until(lambda: world.capturing.captured == 2, "it is over")
    (sent,) = world.dumps
    assert sent.node == "gpu02" and {rank: gzip.decompress(one) for rank, one in sent.dumps.items()} == {4: raw}
    assert [one.rank for one in world.came[1].recordings] == [4]
    raw = b"no dump"
    world.ask(3, dumps=True)
    await until(lambda: world.capturing.captured == 3, "it is over")
    assert world.dumps[-1].dumps == {}, "it would spoil the export of all others"
    assert any("rank 4: no flight recorder" in line for line in world.came[2].blind)


def test_groups_of_a_rank_that_has_written_none(tmp_path: Path) -> None:
    assert capturing.read_groups(tmp_path / "none") == ({}, [])
    (tmp_path / "groups").write_bytes(
        b'{"name":"1","ranks":[0,1]}\n{"name":"1","desc":"again","ranks":[2]}\n\xff\n{"na'
    )
    assert capturing.read_groups(tmp_path / "groups") == ({"1": Group("1", "again", (2,))}, [])
