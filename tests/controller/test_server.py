"""The controller's port: who gets a seat in a job on several machines, and whose agents are heard."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp.test_utils import TestServer
from yarl import URL

from evertrain.agent.controller_link import ControllerLink
from evertrain.controller import __main__ as controller
from evertrain.controller import conductor as conducting
from evertrain.controller import scopes, server
from evertrain.controller.conductor import Conductor
from evertrain.controller.store import EventStore, read_log
from evertrain.model import version
from evertrain.model.change_records import Audited
from evertrain.model.config import AgentConfig, Config
from evertrain.model.records import NodeJoined, NodesSettled
from evertrain.model.report import DISMISSED, Desired, NodeReport, Report, SelfCheck
from evertrain.model.spec import Command, ControllerSpec, Seats

TOKEN, CODE_TOKEN = "secret", "another secret"


def spec(folder: Path, **different: Any) -> ControllerSpec:
    usual: dict[str, Any] = {
        "job": "job", "run_id": "job-1", "run_dir": str(folder), "log_root": str(folder / "logs"),
        "database": str(folder / "events.db"), "token_file": "", "run_folder": "", "listen_fd": 0, "url": "",
        "nodes": ("gpu01",), "seats": Seats(2, 2), "nproc_per_node": 2,
        "command": Command(kind="script", target="t.py"),
    }  # fmt: skip
    return ControllerSpec(**{**usual, **different})


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, f"not within 10 s: {what}"
        await asyncio.sleep(0.005)


class Serving:
    """A controller with its conductor at work, behind a real port."""

    def __init__(self, spec: ControllerSpec, conductor: Conductor, url: str, session: aiohttp.ClientSession) -> None:
        self.spec = spec
        self.conductor = conductor
        self.url = url
        self.session = session

    async def post(self, path: str, body: Any, token: str | None = TOKEN) -> tuple[int, dict[str, Any]]:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with self.session.post(self.url + path, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def join(self, host: str = "gpu02", **different: Any) -> tuple[int, dict[str, Any]]:
        wish = {"host": host, "instance": f"call on {host}", "nproc_per_node": 2, "version": version.own()}
        return await self.post("/v1/join", {**wish, **different})

    def agent(self) -> Any:
        """A WebSocket as an agent opens it."""
        return self.session.ws_connect(f"{self.url}/v1/agent", headers={"Authorization": f"Bearer {TOKEN}"})

    @property
    def heard(self) -> set[str]:
        return {node for node, seen in self.conductor.picture.nodes.items() if seen.connected}

    @property
    def log(self) -> list[Any]:
        return list(read_log(Path(self.spec.database)))


@pytest.fixture
async def serving(tmp_path: Path) -> AsyncIterator[Serving]:
    made = spec(tmp_path)
    store = EventStore(Path(made.database))
    conductor = Conductor(made, await controller._take_over(made, store), store)
    running = asyncio.create_task(conductor.run())
    async with TestServer(server.build(made, conductor, TOKEN, CODE_TOKEN)) as port, aiohttp.ClientSession() as session:
        yield Serving(made, conductor, str(port.make_url("")).rstrip("/"), session)
    running.cancel()
    store.close()


def report(node: str = "gpu01", **different: Any) -> Report:
    usual: dict[str, Any] = {"job": "job", "run_id": "job-1", "term": 0, "time": 1.0, "report": NodeReport(node=node)}
    return Report(**{**usual, **different})


WELL = SelfCheck(number=-1, checks=())


def frame(node: str = "gpu01", **different: Any) -> bytes:
    return msgspec.msgpack.encode(report(node, **different))


@pytest.mark.parametrize("least", [None, 1])
async def test_how_few_nodes_may_go_on_is_written_down(tmp_path: Path, least: int | None) -> None:
    made = spec(tmp_path, least=least)
    store = EventStore(Path(made.database))
    state = await controller._take_over(made, store)
    await asyncio.to_thread(store.close)
    assert state.run is not None and state.run.least == least


# --- a seat


@pytest.mark.parametrize("token", [None, "", "other"])
async def test_without_the_token_there_is_no_seat_and_the_answer_says_where_it_lies(
    serving: Serving, token: str | None
) -> None:
    status, answer = await serving.post("/v1/join", {}, token)
    assert (status, answer) == (
        401,
        {"error": "wrong or missing token", "token_file": f"{serving.spec.run_dir}/token"},
    )
    assert serving.conductor.state.joined == {}


async def test_whoever_asks_whether_a_job_is_served_here_needs_no_token(serving: Serving) -> None:
    async with serving.session.get(f"{serving.url}/healthz") as answer:
        assert await answer.json() == {"job": "job", "state": "starting"}


async def test_a_seat_is_written_down_before_it_is_given(serving: Serving) -> None:
    status, answer = await serving.join("gpu02.cluster", node_rank=1)
    assert (status, answer) == (200, {"job": "job", "run_id": "job-1", "node": "gpu02", "next_attempt": 1})
    (joined,) = [record for record in serving.log if isinstance(record, NodeJoined)]
    assert (joined.node, joined.instance, joined.node_rank) == ("gpu02", "call on gpu02.cluster", 1)


async def test_asking_twice_is_one_seat(serving: Serving) -> None:
    assert await serving.join() == await serving.join()
    assert len([record for record in serving.log if isinstance(record, NodeJoined)]) == 1


async def test_two_that_ask_at_once_get_two_seats_or_one_is_told(serving: Serving) -> None:
    answers = await asyncio.gather(serving.join("gpu02"), serving.join("gpu03"))
    assert sorted(status for status, _ in answers) == [200, 409]
    (refused,) = [answer["error"] for status, answer in answers if status == 409]
    assert refused == f"job job has its 2 nodes: {', '.join(serving.conductor.state.known_nodes())}"


@pytest.mark.parametrize(
    ("different", "because"),
    [
        ({"version": "0.0"}, f"evertrain {version.own()} serves job job; this node has 0.0"),
        ({"job": "other"}, "job job is served here, not other"),
        ({"node_rank": 7}, "--node-rank 7: nodes are numbered 0 to 1"),
    ],
)
async def test_who_does_not_fit_is_told_why(serving: Serving, different: dict[str, Any], because: str) -> None:
    assert await serving.join(**different) == (409, {"error": because})


@pytest.mark.parametrize("body", [{"host": "gpu02"}, {"wish": 1}, []])
async def test_what_is_no_wish_is_refused_and_troubles_nobody_else(serving: Serving, body: Any) -> None:
    status, answer = await serving.post("/v1/join", body)
    assert status == 400 and answer["error"]
    assert (await serving.join())[0] == 200


async def test_a_job_that_is_ending_gives_no_seat(serving: Serving) -> None:
    await serving.post("/v1/stop", {"signal": 15, "reason": "asked to"})
    await until(lambda: serving.conductor.state.stop, "the stop is noted")
    status, answer = await serving.join()
    assert status == 409 and "is ending" in answer["error"]


# --- what a token is good for


@pytest.fixture
def audited(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> list[Audited]:
    written: list[Audited] = []
    monkeypatch.setattr(serving.conductor, "audit", written.append)
    return written


async def test_the_token_for_code_is_good_for_everything(serving: Serving, audited: list[Audited]) -> None:
    headers = {"Authorization": f"Bearer {CODE_TOKEN}"}
    async with serving.session.get(f"{serving.url}/v1/status", headers=headers) as answer:
        assert answer.status == 200
    assert (await serving.post("/v1/stop", {"reason": "asked to"}, CODE_TOKEN))[0] == 202
    assert audited == []


async def test_the_ordinary_token_is_good_for_everything_but_code(serving: Serving, audited: list[Audited]) -> None:
    where = f"{serving.spec.run_dir}/code-token"
    for path, body in (
        ("/v1/restart", {"restart": "r1", "args": ["--lr", "1"], "author": "bob"}),
        ("/v1/restart", {"restart": "r2", "env": {"A": "1"}, "author": "bob"}),
        ("/v1/restart", {"restart": "r3", "digest": "0" * 64, "author": "bob"}),
        ("/v1/changes", {"change": "c1", "kind": "update", "author": "bob"}),
        ("/v1/changes", {"change": "c2", "kind": "rollback", "author": "bob"}),
        ("/v1/changes", ["no change at all"]),
    ):
        status, answer = await serving.post(path, body)
        assert (status, answer["token_file"]) == (403, where), path
        assert answer["error"].startswith("this token may not change the code; ")
    assert [(one.act, one.author, one.outcome) for one in audited] == [
        ("restart", "bob", "refused"),
        ("restart", "bob", "refused"),
        ("restart", "bob", "refused"),
        ("update", "bob", "refused"),
        ("rollback", "bob", "refused"),
        ("update", "", "refused"),
    ]
    assert {one.address for one in audited} == {"127.0.0.1"}
    assert (await serving.post("/v1/stop", {"reason": "asked to"}))[0] == 202


@pytest.mark.parametrize("path", ["/v1/%63hanges", "/v1//changes", "/v1/changes/", "/v1/x/../changes"])
async def test_no_other_way_to_write_the_path_leads_past_that(
    serving: Serving, audited: list[Audited], path: str
) -> None:
    url = URL(serving.url + path, encoded=True)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with serving.session.post(url, json={"change": "c1", "kind": "update"}, headers=headers) as answer:
        assert answer.status in (403, 404)


@pytest.mark.parametrize("given", ["", TOKEN])
async def test_without_a_token_for_code_nobody_changes_it(serving: Serving, given: str) -> None:
    app = server.build(serving.spec, serving.conductor, TOKEN)
    headers = {"Authorization": f"Bearer {given}"}
    async with (
        TestServer(app) as port,
        serving.session.put(port.make_url(f"/v1/code/{'0' * 64}"), data=b"", headers=headers) as answer,
    ):
        assert answer.status == (403 if given else 401)


def test_the_token_for_code_is_read_where_it_lies(tmp_path: Path) -> None:
    file = tmp_path / "code-token"
    file.write_text(" abc\n")
    assert scopes.code_token(spec(tmp_path, code_token_file=str(file))) == "abc"
    file.write_bytes(b"\xff")
    assert scopes.code_token(spec(tmp_path, code_token_file=str(file))) == ""
    file.unlink()
    assert scopes.code_token(spec(tmp_path, code_token_file=str(file))) == "", "a controller starts all the same"
    assert scopes.code_token(spec(tmp_path)) == ""


# --- whose agents are heard


async def test_nodes_are_settled_when_the_agents_of_all_seats_have_spoken(serving: Serving) -> None:
    await serving.join()
    async with serving.agent() as first, serving.agent() as second:
        await first.send_bytes(frame("gpu01", report=NodeReport(node="gpu01", self_check=WELL)))
        await until(lambda: serving.heard == {"gpu01"}, "the first node is heard")
        assert not serving.conductor.state.roster
        await second.send_bytes(frame("gpu02", report=NodeReport(node="gpu02", self_check=WELL)))
        await until(lambda: serving.conductor.state.roster, "the nodes are settled")
        assert [record.nodes for record in serving.log if isinstance(record, NodesSettled)] == [("gpu01", "gpu02")]
        async with asyncio.timeout(10.0):
            while (order := msgspec.msgpack.decode(await second.receive_bytes(), type=Desired)).ranks == ():
                pass
        assert order.ranks == (2, 3)
    await until(lambda: not serving.heard, "both have hung up")


async def test_a_node_without_a_seat_is_not_heard(serving: Serving) -> None:
    async with serving.agent() as socket:
        await socket.send_bytes(frame("gpu02"))
        message = await socket.receive(timeout=10.0)
    assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED) and socket.close_code == DISMISSED
    assert serving.heard == set()


async def test_faults_of_nodes_that_joined_are_noted_and_of_strangers_refused(serving: Serving) -> None:
    fault = {"kind": "gpu_lost", "node": "gpu02", "evidence": "drill"}
    assert (await serving.post("/v1/signals", fault))[0] == 404
    await serving.join()
    assert (await serving.post("/v1/signals", fault))[0] == 202


async def test_an_agent_of_andismissed_is_sent_away_for_good(serving: Serving) -> None:
    async with serving.agent() as socket:
        await socket.send_bytes(frame("gpu01", run_id="job-0"))
        await socket.receive(timeout=10.0)
    assert socket.close_code == DISMISSED == 4409
    assert serving.heard == set()


@pytest.mark.parametrize(("run_id", "other"), [("job-0", True), ("job-1", False)])
async def test_the_agent_understands_that_its_run_is_over(serving: Serving, run_id: str, other: bool) -> None:
    orders: list[Desired] = []
    link = ControllerLink(serving.url, TOKEN, "job", orders.append)
    linking = asyncio.create_task(link.run(lambda: report(run_id=run_id)))
    try:
        await until(lambda: link.dismissed or orders, "an answer")
        assert link.dismissed is other
        assert bool(orders) is not other
    finally:
        linking.cancel()


# --- a connection that is there and silent


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(conducting, "time", clock)
    monkeypatch.setattr(conducting, "_TICK_S", 0.01)
    return clock


def _nowhere(order: Desired) -> None:
    """What agents are told is of no interest here."""


class Listening:
    """A conductor at work, that is told what its agents say."""

    def __init__(self, conductor: Conductor, clock: Clock) -> None:
        self.conductor = conductor
        self._clock = clock

    def connected(self, node: str) -> bool:
        return self.conductor.picture.connected(node)

    def hang_up(self, node: str) -> None:
        self.conductor.disconnect(node, _nowhere)

    async def turns(self) -> None:
        """So long that the conductor has looked around again."""
        enough = self._clock.looks + 20
        await until(lambda: self._clock.looks > enough, "the conductor looks at its clock, again and again")


@pytest.fixture
async def listening(tmp_path: Path, clock: Clock, request: pytest.FixtureRequest) -> AsyncIterator[Listening]:
    config = Config(agent=AgentConfig(heartbeat_s=getattr(request, "param", 1.0)))
    made = spec(tmp_path, nodes=("gpu01", "gpu02"), seats=None, config=config)
    store = EventStore(Path(made.database))
    conductor = Conductor(made, await controller._take_over(made, store), store)
    running = asyncio.create_task(conductor.run())
    for node in made.nodes:
        conductor.connect(node, _nowhere)
        conductor.hear(report(node))
    yield Listening(conductor, clock)
    assert not running.done()
    running.cancel()
    store.close()


async def test_five_heartbeats_of_silence_are_as_good_as_no_connection(listening: Listening, clock: Clock) -> None:
    clock.seconds += 4.9
    listening.conductor.hear(report("gpu02"))
    await listening.turns()
    assert listening.connected("gpu01") and listening.connected("gpu02")
    clock.seconds += 0.2
    await until(lambda: not listening.connected("gpu01"), "the silent one counts as not connected")
    assert listening.connected("gpu02")
    silent_s = listening.conductor.now() - listening.conductor.picture.nodes["gpu01"].since
    assert silent_s == pytest.approx(5.1, abs=0.5), "from when it was heard last, not from when that was noticed"


async def test_a_connection_that_breaks_after_a_silence_does_not_begin_it_anew(
    listening: Listening, clock: Clock
) -> None:
    clock.seconds += 60.0
    await until(lambda: not listening.connected("gpu01"), "the silent one counts as not connected")
    since = listening.conductor.picture.nodes["gpu01"].since
    clock.seconds += 30.0
    listening.hang_up("gpu01")
    assert listening.conductor.picture.nodes["gpu01"].since == since


async def test_whoever_speaks_again_is_there_again(listening: Listening, clock: Clock) -> None:
    clock.seconds += 60.0
    await until(lambda: not listening.connected("gpu01"), "the silent one counts as not connected")
    clock.seconds += 1.0
    listening.conductor.hear(report("gpu01"))
    await listening.turns()
    assert listening.connected("gpu01")
    here_s = listening.conductor.now() - listening.conductor.picture.nodes["gpu01"].since
    assert here_s == pytest.approx(0.0, abs=0.5), "from when on it is there again"


@pytest.mark.parametrize("listening", [10.0], indirect=True)
async def test_who_speaks_seldom_is_given_more_time(listening: Listening, clock: Clock) -> None:
    clock.seconds += 49.0
    await listening.turns()
    assert listening.connected("gpu01")
    clock.seconds += 2.0
    await until(lambda: not listening.connected("gpu01"), "five of its own heartbeats")
