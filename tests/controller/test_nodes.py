"""What is said of nodes, and what can be asked of them, over the controller's port and from its log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from evertrain.controller import node_views, server
from evertrain.controller.conductor import Conductor
from evertrain.controller.store import EventStore, read_log
from evertrain.decide.applying import apply, fold
from evertrain.decide.memory import Blocked, Eviction, Memory
from evertrain.decide.picture import NodePicture
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.report import Check, Desired, NodeReport, Report, SelfCheck
from support.waiting import eventually
from support.world import World

Json = dict[str, Any]
OUT = Blocked(since=1500.0, because="gpu lost", is_certain=True)


def training() -> World:
    """Two nodes and a standby."""
    world = World(3, standby=1)
    world.turns()
    world.train(3)
    world.turns()
    return world


def drained(world: World) -> None:
    """node-1 leaves, node-2 takes its place."""
    because = "drained: node-2 takes over its ranks"
    evict = d.Evict(because=because, nodes=("node-1",), replacements={"node-1": "node-2"}, evidence=(), planned=True)
    event = d.DrainRequested(time=world.now, node="node-1", because="")
    world.write(r.Decided(time=world.now, action="evict", because=because, event=event, actions=(evict,)))


def seen(world: World, node: str) -> Json:
    return next(one for one in node_views.nodes(world.state, world.picture(), world.now) if one["id"] == node)


# -- what is said ----------------------------------------------------------------------------------------------------


def test_nodes_that_take_part() -> None:
    world = training()
    nodes = node_views.nodes(world.state, world.picture(), world.now)
    states = [(one["id"], one["state"], one["ranks"]) for one in nodes]
    assert states == [("node-0", "active", [0, 1]), ("node-1", "active", [2, 3]), ("node-2", "standby", [])]
    assert seen(world, "node-0")["self_check"] is None and seen(world, "node-0")["returns"] == ""


def test_the_last_self_check() -> None:
    world = training()
    odd = Check(name="gpu", passed=True, is_odd=True, detail="GPU 3: 92 C")
    checks = (Check(name="memory", passed=True), odd, Check(name="disk", passed=False, detail="3 % free: make room"))
    report = NodeReport(node="node-2", self_check=SelfCheck(number=1, checks=checks))
    picture = replace(world.picture(), nodes={"node-2": NodePicture(report, True, 0.0)})
    found = node_views.nodes(world.state, picture, world.now)[2]["self_check"]
    failed, odd_ones = ["disk: 3 % free: make room"], ["gpu: GPU 3: 92 C"]
    assert found == {"passed": False, "checks": 3, "failed": failed, "odd": odd_ones}


def test_a_node_that_was_taken_out_is_out_when_training_is_back_without_it() -> None:
    world = training()
    assert not seen(world, "node-1")["is_out"]
    drained(world)
    node = seen(world, "node-1")
    assert (node["state"], node["ranks"]) == ("evicted", [])
    assert not node["is_out"], "its ranks are still there"
    assert node["answer"]["action"] == "evict" and node["because"] == "drained: node-2 takes over its ranks"
    assert node["returns"] == "by `evertrain node allow node-1` only: it was drained"
    assert seen(world, "node-2")["ranks"] == [2, 3]
    world.write(r.AttemptEnding(time=world.now, attempt=1, signal=9, because="", restart="drain"))
    world.turns()
    assert world.state.attempt is not None and world.state.attempt.started.placement[2] == "node-2"
    assert seen(world, "node-1")["is_out"]


@pytest.mark.parametrize(
    ("is_certain", "evicted_days_ago", "returns"),
    [
        (True, (0,), "by `evertrain node allow x` only: no test of ours can clear it"),
        (False, (6, 0), "by `evertrain node allow x` only: it was evicted 2 times within 7 days"),
        (
            False,
            (8, 0),
            "as a standby once it passes its test and nothing was seen of it for 600 s, or by `evertrain node allow x`",
        ),
    ],
)
def test_of_a_node_that_is_out_it_is_said_how_it_comes_back(
    is_certain: bool, evicted_days_ago: tuple[int, ...], returns: str
) -> None:
    world = training()
    evictions = tuple(
        Eviction(time=world.now - days * 86400, nodes=("x",), incident=None, counted=True) for days in evicted_days_ago
    )
    blocked = {"x": replace(OUT, is_certain=is_certain)}
    world.state = replace(world.state, memory=Memory(blocked=blocked, evictions=evictions))
    node = seen(world, "x")
    assert (node["state"], node["since"], node["because"], node["returns"]) == ("evicted", 1500.0, "gpu lost", returns)


def test_thousands_of_nodes_are_listed_at_once() -> None:
    world = World(1300, nproc=8, standby=20)
    picture, seconds = world.picture(), []
    for _ in range(3):
        began = time.process_time()
        nodes = node_views.nodes(world.state, picture, world.now)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.3, "the controller does nothing else meanwhile"
    assert nodes[-21]["ranks"] == [*range(1279 * 8, 1280 * 8)] and nodes[-20]["ranks"] == []


# -- what can be asked -----------------------------------------------------------------------------------------------


class Serving:
    def __init__(self, conductor: Conductor, url: str, session: aiohttp.ClientSession, database: Path) -> None:
        self.conductor, self.url, self.session, self.database = conductor, url, session, database

    async def post(self, path: str, body: Any = None) -> tuple[int, Json]:
        async with self.session.post(f"{self.url}{path}", json=body) as answer:
            return answer.status, await answer.json()

    async def nodes(self) -> list[Json]:
        async with self.session.get(f"{self.url}/v1/nodes") as answer:
            found: list[Json] = await answer.json()
            return found

    async def asked(self) -> list[r.AllowAsked | r.DrainAsked]:
        """What the log says, when it is there."""

        def found() -> list[r.AllowAsked | r.DrainAsked]:
            return [one for one in read_log(self.database) if isinstance(one, r.AllowAsked | r.DrainAsked)]

        return await asyncio.to_thread(eventually, found, "the wish is written down", within_s=10)


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    world = training()
    world.state = replace(world.state, memory=Memory(blocked={"old": OUT}))
    database = tmp_path / "events.db"
    store = EventStore(database)
    conductor = Conductor(replace(world.spec, database=str(database)), world.state, store)
    for node in world.nodes.values():
        assert node.heard is not None
        conductor._nodes[node.name] = replace(node.heard, connected=True)
        conductor._heard[node.name] = 1e12
    conducting = asyncio.create_task(conductor.run())
    headers = {"Authorization": "Bearer secret"}
    app = server.build(conductor._spec, conductor, "secret")
    async with TestServer(app) as port, aiohttp.ClientSession(headers=headers) as session:
        yield Serving(conductor, str(port.make_url("")).rstrip("/"), session, database)
    conducting.cancel()
    await asyncio.to_thread(store.close)


async def test_who_is_out_is_listed_as_well(serving: Serving) -> None:
    assert [one["id"] for one in await serving.nodes()] == ["node-0", "node-1", "node-2", "old"]


async def test_a_drain_is_noted_once(serving: Serving) -> None:
    status, answer = await serving.post("/v1/nodes/node-1/drain", {"because": "maintenance"})
    assert (status, answer["node"]) == (202, "node-1")
    assert (await serving.post("/v1/nodes/node-1/drain"))[0] == 202
    (asked,) = await serving.asked()
    assert isinstance(asked, r.DrainAsked) and (asked.node, asked.because) == ("node-1", "maintenance")
    assert asked.time <= answer["time"]
    node = next(one for one in await serving.nodes() if one["id"] == "node-1")
    assert (node["state"], node["asked"], node["answer"]["action"]) == ("evicted", None, "evict")
    status, answer = await serving.post("/v1/nodes/node-0/drain")
    assert status == 409 and answer["error"]


async def test_what_cannot_be_done_is_409_with_the_reason(serving: Serving) -> None:
    status, answer = await serving.post("/v1/nodes/node-9/drain")
    assert (status, answer["error"].partition(";")[0]) == (409, "node-9 is not part of this job")
    status, answer = await serving.post("/v1/nodes/node-1/allow")
    assert (status, answer["error"]) == (409, "node-1 is part of the job and nothing keeps it out")
    assert (await serving.post("/v1/nodes/node-1/drain", {"why": "x"}))[0] == 400


async def test_a_node_is_let_back(serving: Serving) -> None:
    assert (await serving.post("/v1/nodes/old/allow"))[0] == 202
    (asked,) = await serving.asked()
    assert isinstance(asked, r.AllowAsked) and asked.because == "asked for by the user"


async def test_tests_of_nodes_are_asked_for_and_looked_at(serving: Serving) -> None:
    status, answer = await serving.post("/v1/exams", {"nodes": ["node-1"]})
    assert status == 409 and "it trains on node-1" in answer["error"]
    assert (await serving.post("/v1/exams", {"suite": "everything"}))[0] == 400
    status, answer = await serving.post("/v1/exams", {"nodes": ["node-2"], "suite": "nan", "budget_s": 60})
    assert (status, answer) == (202, {"exam": 1})
    assert await serving.post("/v1/exams", {"nodes": ["node-2"], "suite": "nan", "budget_s": 60}) == (202, {"exam": 1})
    await asyncio.to_thread(eventually, lambda: serving.conductor.state.exams, "it is written down", within_s=10)
    async with serving.session.get(f"{serving.url}/v1/exams/1") as found:
        assert (await found.json())["nodes"] == ["node-2"]
    async with serving.session.get(f"{serving.url}/v1/exams/2") as found:
        assert found.status == 404


# -- without a controller --------------------------------------------------------------------------------------------


async def test_between_two_runs_the_wish_goes_into_the_log(tmp_path: Path) -> None:
    world = training()
    drained(world)
    world.write(r.JobEnded(time=world.now, state="stopped", exit_code=1, message=""))
    store = EventStore(tmp_path / "events.db")
    await store.append(world.log)
    await asyncio.to_thread(store.close)
    # the clock of this machine may be behind that of the run
    assert await asyncio.to_thread(node_views.allow_later, tmp_path / "events.db", "node-1", "new GPU", 5.0) == ""
    last = read_log(tmp_path / "events.db")[-1]
    assert last == r.AllowAsked(time=world.now, node="node-1", because="new GPU")
    state = apply(fold(read_log(tmp_path / "events.db")), replace(world.run, run_id="again", time=9e9))
    assert state.asked == (last,)
    why_not = await asyncio.to_thread(node_views.allow_later, tmp_path / "events.db", "node-0", "", 5.0)
    assert why_not == "node-0 is part of the job and nothing keeps it out"


async def test_a_node_that_is_out_is_heard_and_shown_with_its_reason(serving: Serving) -> None:
    state = serving.conductor.state
    evict = d.Evict(because="gpu lost", nodes=("node-1",), replacements={"node-1": "node-2"}, evidence=("Xid 79",))
    decided = r.Decided(time=9.0, action="evict", because="gpu lost", actions=(evict,))
    serving.conductor._state = apply(state, decided)
    async with serving.session.get(f"{serving.url}/v1/status") as answer:
        shown = (await answer.json())["nodes"]
    assert [one["id"] for one in shown] == ["node-0", "node-2", "node-1"]
    assert (shown[2]["state"], shown[2]["because"]) == ("evicted", "gpu lost")
    fault = {"kind": "network_alert", "node": "node-1", "evidence": "a link flaps"}
    assert (await serving.post("/v1/signals", fault))[0] == 202
    report = Report(job="job", run_id="job-1", term=0, time=1.0, report=NodeReport(node="node-1", problems=("here",)))
    async with serving.session.ws_connect(f"{serving.url}/v1/agent") as agent:
        await agent.send_bytes(msgspec.msgpack.encode(report))
        order = msgspec.msgpack.decode(await agent.receive_bytes(timeout=10.0), type=Desired)
    assert order.ranks == ()
    assert serving.conductor.picture.nodes["node-1"].report.problems == ("here",)
