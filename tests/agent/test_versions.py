"""A version comes to a node whole or not at all, whatever happens on its way."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from evertrain.agent import versions
from evertrain.agent.commands import NOT_READY
from evertrain.agent.versions import Versions
from evertrain.model.code import Code, CodeOrder
from evertrain.model.config import CodeConfig
from evertrain.model.spec import AgentSpec
from support import code

TOKEN = "secret"
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def until(is_so: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not is_so():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within 20 s: {what}") from None


class World:
    """A controller that gives out archives, and nodes that share a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = code.written(folder / "project")
        self.code_dir = folder / "code"
        self.archives: dict[str, Path] = {}
        self.url = ""
        self.answers: list[Answer] = []
        """For the next requests; afterwards as usual."""
        self.asked: list[str] = []
        self.hanging = 0
        self.woken = 0
        self.first = self.version(1)
        (self.root / "train.py").write_text("import model  # better\n")
        self.second = self.version(2)

    def version(self, number: int) -> Code:
        path = self.folder / "controller" / f"{number}.tar.gz"
        made = code.packed(self.root, path)
        self.archives[made.digest] = path
        return made

    async def give(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        digest = request.match_info["digest"]
        self.asked.append(digest)
        if self.answers:
            return await self.answers.pop(0)(request)
        if digest not in self.archives:
            return web.json_response({"error": "unknown"}, status=404)
        return web.FileResponse(self.archives[digest])

    async def break_off(self, request: web.Request) -> web.StreamResponse:
        """The controller dies in the middle."""
        await self._half(request)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def hang(self, request: web.Request) -> web.StreamResponse:
        answer = await self._half(request)
        self.hanging += 1
        await asyncio.sleep(60)
        return answer

    async def other(self, request: web.Request) -> web.StreamResponse:
        """Not what was asked for."""
        others = [path for digest, path in self.archives.items() if digest != request.match_info["digest"]]
        return web.FileResponse(others[0])

    async def _half(self, request: web.Request) -> web.StreamResponse:
        whole = self.archives[request.match_info["digest"]].read_bytes()
        answer = web.StreamResponse(headers={"Content-Length": str(len(whole))})
        await answer.prepare(request)
        await answer.write(whole[: len(whole) // 2])
        return answer

    def spec(self, node: str = "gpu01", **different: Any) -> AgentSpec:
        usual: dict[str, Any] = {
            "job": "job", "run_id": "job-1", "node": node, "node_dir": "", "disk_dir": "", "log_root": "",
            "controller_url": self.url, "token_file": "", "fired_dir": "", "code_root": str(self.root),
            "code_dir": str(self.code_dir),
        }  # fmt: skip
        return AgentSpec(**{**usual, **different})

    def node(self, node: str = "gpu01", **different: Any) -> Versions:
        return Versions(self.spec(node, **different), TOKEN, self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def kept(self, made: Code) -> Path:
        return self.code_dir / f"{made.digest}.tar.gz"

    @property
    def partial(self) -> list[Path]:
        return list(self.code_dir.glob("*.partial"))

    async def tidy(self) -> None:
        await until(lambda: not self.partial, "nothing half is left")


def order(made: Code, version: int = 2) -> CodeOrder:
    return CodeOrder(version=version, digest=made.digest, archive_bytes=made.archive_bytes)


def folder_of(node: Versions) -> Path:
    assert isinstance(node.code, dict)
    return Path(node.code["folder"])


@pytest.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(versions, "_LAST_RETRY_S", 0.2)
    made = World(tmp_path)
    app = web.Application()
    app.add_routes([web.get("/v1/code/{digest}", made.give)])
    async with TestServer(app, shutdown_timeout=0.1) as server:
        made.url = str(server.make_url("")).rstrip("/")
        yield made


async def test_a_version_comes_and_is_said_to_be_there_when_it_is(world: World) -> None:
    node = world.node()
    assert node.code is None
    ordered = order(world.first)
    node.obey(ordered)
    assert node.code == NOT_READY
    await until(lambda: node.code != NOT_READY, "it is there")
    assert isinstance(node.code, dict)
    assert node.code == {
        "version": 2,
        "digest": world.first.digest,
        "root": str(world.root),
        "folder": str(folder_of(node)),
    }
    assert folder_of(node).parent == world.code_dir
    assert (folder_of(node) / "train.py").read_text() == "import model\n", "as captured, not as it is now"
    assert world.kept(world.first).read_bytes() == world.archives[world.first.digest].read_bytes()
    assert (world.asked, world.woken, node.problem) == ([world.first.digest], 1, "")
    node.obey(replace(ordered))
    assert node.code != NOT_READY, "the same order again"
    node.obey(None)
    assert node.code is None
    await world.tidy()


async def test_what_is_not_what_was_ordered_is_fetched_once_more_and_then_a_problem(world: World) -> None:
    world.answers = [world.other] * 2
    node = world.node()
    node.obey(order(world.first))
    await until(lambda: node.problem, "it is told")
    assert node.problem.startswith("gpu01 cannot have version 2 of the code: ") and "\n" not in node.problem
    assert len(world.asked) == 2 and node.code == NOT_READY and world.woken == 1
    assert not world.kept(world.first).exists()
    await until(lambda: node.code != NOT_READY, "it is tried again all the same")
    assert node.problem == "" and world.woken == 2
    await world.tidy()


async def test_one_damaged_archive_is_no_problem(world: World) -> None:
    world.answers = [world.other]
    node = world.node()
    node.obey(order(world.first))
    await until(lambda: node.code != NOT_READY, "it is there")
    assert len(world.asked) == 2 and world.woken == 1, "nobody has read of a problem"


async def test_a_controller_that_dies_in_the_middle_is_asked_again(world: World) -> None:
    world.answers = [world.break_off] * 3
    node = world.node()
    node.obey(order(world.first))
    await until(lambda: node.code != NOT_READY, "it is there")
    assert len(world.asked) == 4 and world.woken == 1, "nobody has read of a problem"
    await world.tidy()


async def test_a_controller_that_stays_away_is_a_problem_after_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "PATIENCE_S", 0.5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        node = world.node(controller_url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        node.obey(order(world.first))
        began = asyncio.get_running_loop().time()
        await until(lambda: node.problem, "it is told")
    assert asyncio.get_running_loop().time() - began >= 0.5
    assert "its archive has not come" in node.problem and world.woken == 1
    node.obey(None)
    assert node.problem == ""


async def test_a_controller_that_does_not_have_it_is_a_problem(world: World) -> None:
    node = world.node()
    node.obey(CodeOrder(version=3, digest="0" * 64))
    await until(lambda: node.problem, "it is told")
    assert "the controller does not give out its archive (HTTP 404)" in node.problem


async def test_no_more_comes_than_was_announced(world: World) -> None:
    node = world.node()
    node.obey(replace(order(world.first), archive_bytes=world.first.archive_bytes - 1))
    await until(lambda: node.problem, "it is told")
    assert "larger than the" in node.problem
    await world.tidy()


async def test_what_is_too_large_is_no_version_whatever_its_digest(world: World) -> None:
    node = world.node()
    node.obey(replace(order(world.first), config=CodeConfig(most_files=1)))
    await until(lambda: node.problem, "it is told")
    assert "more than 1 files" in node.problem
    node.obey(replace(order(world.first), config=CodeConfig(most_files=2)))
    await until(lambda: node.code != NOT_READY, "what the controller lets in comes here as well")


async def test_a_node_sends_its_token_nowhere_else(world: World) -> None:
    async def elsewhere(request: web.Request) -> web.StreamResponse:
        raise web.HTTPFound(f"/v1/code/{world.second.digest}")

    world.answers = [elsewhere]
    node = world.node()
    node.obey(order(world.first))
    await until(lambda: node.code != NOT_READY, "it is there")
    assert set(world.asked) == {world.first.digest}


async def test_two_agents_of_one_machine_share_what_they_have(world: World) -> None:
    nodes = [world.node("gpu01"), world.node("gpu02")]
    for node in nodes:
        node.obey(order(world.first))
    await until(lambda: all(node.code != NOT_READY for node in nodes), "both have it")
    assert folder_of(nodes[0]) == folder_of(nodes[1])
    before = len(world.asked)
    third = world.node("gpu03")
    third.obey(order(world.first))
    await until(lambda: third.code != NOT_READY, "the third has it")
    assert folder_of(third) == folder_of(nodes[0]) and len(world.asked) == before, "without a download"
    await world.tidy()


async def test_a_damaged_archive_that_lies_here_is_fetched_anew(world: World) -> None:
    world.code_dir.mkdir()
    world.kept(world.first).write_bytes(world.archives[world.first.digest].read_bytes()[:-20])
    node = world.node()
    node.obey(order(world.first))
    await until(lambda: node.code != NOT_READY, "it is there")
    assert len(world.asked) == 1 and world.woken == 1
    assert world.kept(world.first).read_bytes() == world.archives[world.first.digest].read_bytes()


async def test_what_the_controllers_config_excludes_is_taken_from_the_original_place(world: World) -> None:
    (world.root / "secret.py").write_text("KEY = 7\n")
    node = world.node()
    node.obey(order(world.first))
    await until(lambda: node.code != NOT_READY, "it is there")
    assert not (folder_of(node) / "secret.py").exists()
    node.obey(replace(order(world.first), config=CodeConfig(exclude=("secret.py",))))
    await until(lambda: node.code != NOT_READY, "it is there")
    assert (folder_of(node) / "secret.py").is_symlink()


async def test_each_new_order_verifies_what_is_here(world: World) -> None:
    node = world.node()
    node.obey(order(world.first))
    await until(lambda: node.code != NOT_READY, "it is there")
    path = folder_of(node) / "train.py"
    path.chmod(0o600)
    path.write_text("import madness\n")
    node.obey(order(world.first, version=3))
    assert node.code == NOT_READY
    await until(lambda: node.code != NOT_READY, "it is there again")
    assert (folder_of(node) / "train.py").read_text() == "import model\n"
    # and so does an agent that was started again
    again = world.node()
    (folder_of(node) / "train.py").unlink()
    again.obey(order(world.first, version=3))
    await until(lambda: again.code != NOT_READY, "it is there again")
    assert (folder_of(again) / "train.py").read_text() == "import model\n"


async def test_a_later_order_takes_the_place_of_one_that_is_under_way(world: World) -> None:
    world.answers = [world.hang]
    node = world.node()
    node.obey(order(world.first))
    await until(lambda: world.hanging, "the first one has begun")
    node.obey(order(world.second, version=3))
    await until(lambda: node.code != NOT_READY, "the second one is there")
    assert isinstance(node.code, dict) and (node.code["version"], node.code["digest"]) == (3, world.second.digest)
    assert (folder_of(node) / "train.py").read_text() == "import model  # better\n"
    assert not world.kept(world.first).exists()
    await world.tidy()


async def test_what_is_unpacked_for_an_outdated_order_counts_for_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    build = versions.folder.build
    built: list[str] = []

    def slow(archive: Path, digest: str, *rest: Any) -> Path:
        built.append(digest)
        if digest == world.first.digest:
            begun.set()
            assert may_go_on.wait(20)
        return build(archive, digest, *rest)

    monkeypatch.setattr(versions.folder, "build", slow)
    node = world.node()
    node.obey(order(world.first))
    await until(begun.is_set, "the first one is being unpacked")
    node.obey(order(world.second, version=3))
    node.obey(order(world.first, version=4))
    node.obey(order(world.second, version=5))
    await until(lambda: world.kept(world.second).exists(), "the archive of the second one is here")
    assert node.code == NOT_READY and built == [world.first.digest], "one after the other"
    may_go_on.set()
    await until(lambda: node.code != NOT_READY, "the second one is there")
    assert isinstance(node.code, dict) and node.code["version"] == 5
    assert built == [world.first.digest, world.second.digest]


async def test_a_node_without_a_folder_of_code_says_so(world: World) -> None:
    node = world.node(code_root="")
    node.obey(order(world.first))
    await until(lambda: node.problem, "it is told")
    assert "--code DIR" in node.problem and world.asked == []


async def test_a_bug_is_a_problem_and_not_the_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Path:
        raise LookupError("nobody thought of this")

    with monkeypatch.context() as patched:
        patched.setattr(versions.folder, "build", broken)
        node = world.node()
        node.obey(order(world.first))
        await until(lambda: node.problem, "it is told")
    assert "LookupError: nobody thought of this" in node.problem
    await until(lambda: node.code != NOT_READY, "it is tried again")


# --- another process, which can be killed or limited

_PROGRAM = """\
import asyncio, json, resource, sys
import msgspec
from evertrain.agent.versions import Versions
from evertrain.model.code import CodeOrder
from evertrain.model.config import CodeConfig
from evertrain.model.spec import AgentSpec

async def main():
    spec, order, limit = sys.argv[1:]
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
    node = Versions(msgspec.json.decode(spec, type=AgentSpec), "secret", lambda: None)
    node.obey(msgspec.json.decode(order, type=CodeOrder))
    while not node.problem and not isinstance(node.code, dict):
        await asyncio.sleep(0.01)
    print(json.dumps(node.problem), flush=True)
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    while not isinstance(node.code, dict):
        await asyncio.sleep(0.01)
    print(json.dumps(node.problem), flush=True)

asyncio.run(main())
"""


def _process(world: World, made: Code, limit: int = 0) -> subprocess.Popen[str]:
    spec = msgspec.json.encode(world.spec()).decode()
    given = [spec, msgspec.json.encode(order(made)).decode(), str(limit)]
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, *given], stdout=subprocess.PIPE, text=True)


async def test_what_a_killed_agent_has_left_is_removed_and_its_version_comes(world: World) -> None:
    world.answers = [world.hang]
    with _process(world, world.first) as process:
        await until(lambda: world.hanging and world.partial, "it is in the middle")
        process.send_signal(signal.SIGKILL)
    (left,) = world.partial
    others = left.with_name(left.name.replace(".gpu01.", ".gpu02."))
    others.write_bytes(b"another agent is at it")
    node = world.node()
    node.obey(order(world.first))
    await until(lambda: node.code != NOT_READY, "it is there")
    await until(lambda: world.partial == [others], "only what another agent writes is left")


async def test_a_full_disk_is_a_problem_at_once_and_healed_when_there_is_room(world: World) -> None:
    chaos = random.Random(1)
    (world.root / "large.py").write_text("".join(chaos.choice("abcdefgh\n") for _ in range(200_000)))
    large = world.version(3)
    with _process(world, large, limit=8192) as process:
        said = [json.loads(line) for line in (await asyncio.to_thread(process.communicate, timeout=60))[0].splitlines()]
    assert "File too large" in said[0] and "gpu01 cannot have version 2 of the code" in said[0]
    assert said[1] == ""
    await world.tidy()
