"""Archives come with the token that may change code, go out with any, and what is tried is written down."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from evertrain.agent.commands import NOT_READY
from evertrain.agent.versions import Versions
from evertrain.controller import server
from evertrain.controller.code_store import CodeStore
from evertrain.controller.conductor import Conductor
from evertrain.model.change_records import Audited
from evertrain.model.code import Code, CodeOrder
from evertrain.model.config import CodeConfig, Config
from evertrain.model.spec import AgentSpec, Command, ControllerSpec
from support import code

TOKEN, CODE_TOKEN = "secret", "more secret"


class Serving:
    """The controller's port, with archives in a folder."""

    def __init__(self, folder: Path, config: CodeConfig) -> None:
        self.spec = ControllerSpec(
            job="job", run_id="job-1", run_dir=str(folder), log_root="", database="", token_file="", listen_fd=0,
            url="", nodes=("gpu01",), nproc_per_node=1, command=Command(kind="script", target="train.py"),
            code_dir=str(folder / "code"), config=Config(code=config),
        )  # fmt: skip
        self.audited: list[Audited] = []
        self.store = CodeStore(self.spec, lambda: None)
        conducting = SimpleNamespace(code=self.store, audit=self.audited.append)
        self.app = server.build(self.spec, cast(Conductor, conducting), TOKEN, CODE_TOKEN)
        self.url = ""
        self.session: aiohttp.ClientSession

    async def put(
        self, digest: str, body: Any, token: str = CODE_TOKEN, author: str | None = None
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": f"Bearer {token}", **({"X-Evertrain-Author": author} if author else {})}
        async with self.session.put(
            f"{self.url}/v1/code/{digest}", data=io.BytesIO(body) if isinstance(body, bytes) else body, headers=headers
        ) as answer:
            return answer.status, await answer.json()

    async def get(self, digest: str, token: str = TOKEN) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.session.get(f"{self.url}/v1/code/{digest}", headers=headers) as answer:
            return answer.status, await answer.read()

    @property
    def seen(self) -> list[tuple[str, str, str]]:
        return [(one.act, one.outcome, one.author) for one in self.audited]


@pytest.fixture
async def serving(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Serving]:
    made = Serving(tmp_path, getattr(request, "param", CodeConfig()))
    async with TestServer(made.app) as port, aiohttp.ClientSession(auto_decompress=False) as session:
        made.url, made.session = str(port.make_url("")).rstrip("/"), session
        yield made


@pytest.fixture
def other(tmp_path: Path) -> tuple[Code, bytes]:
    return code.another(tmp_path)


async def test_an_archive_comes_and_goes_as_it_is(serving: Serving, other: tuple[Code, bytes]) -> None:
    made, content = other
    assert await serving.put(made.digest, content, author="ann@laptop") == (
        201,
        {"digest": made.digest, "files": made.files, "bytes": made.bytes},
    )
    for token in (TOKEN, CODE_TOKEN):
        assert await serving.get(made.digest, token) == (200, content)
    (audited,) = serving.audited
    assert (audited.act, audited.outcome, audited.author) == ("upload", "done", "ann@laptop")
    assert audited.address == "127.0.0.1" and audited.detail.startswith(made.digest)


async def test_an_archive_far_above_the_limit_of_other_requests_may_come(serving: Serving, tmp_path: Path) -> None:
    # what does not compress
    root = code.written(tmp_path / "large")
    (root / "table.py").write_bytes(b"#" + bytes(3 << 20).replace(b"\0", b"a"))
    noise = "".join(f"{hash((7, number)):x}" for number in range(200_000))
    (root / "noise.py").write_text(noise)
    large = code.packed(root, tmp_path / "large.tar.gz")
    assert large.archive_bytes > 1 << 20
    status, answer = await serving.put(large.digest, (tmp_path / "large.tar.gz").read_bytes())
    assert (status, answer.get("bytes")) == (201, large.bytes)


async def test_an_archive_that_is_not_what_it_should_be_is_refused_and_written_down(
    serving: Serving, other: tuple[Code, bytes]
) -> None:
    made, content = other
    status, answer = await serving.put("0" * 64, content, author="eve")
    assert status == 400 and answer["error"] and "\n" not in answer["error"]
    status, answer = await serving.put(made.digest, content[:-30], author="eve")
    assert status == 400
    assert serving.seen == [("upload", "refused", "eve")] * 2
    assert (await serving.get(made.digest))[0] == 404
    assert (await serving.put(made.digest, content))[0] == 201


@pytest.mark.parametrize("digest", ["0" * 63, "0" * 65, "A" * 64, "..%2F..%2Ftoken", "g" * 64, "%00"])
async def test_what_is_no_digest_is_no_path(serving: Serving, digest: str) -> None:
    assert (await serving.put(digest, b""))[0] in (400, 404)
    assert (await serving.get(digest))[0] in (400, 404)
    assert serving.audited == []


async def test_the_ordinary_token_brings_no_code(serving: Serving, other: tuple[Code, bytes]) -> None:
    made, content = other
    status, answer = await serving.put(made.digest, content, TOKEN, author="bob")
    assert status == 403
    where = f"{serving.spec.run_dir}/code-token"
    assert answer == {
        "error": f"this token may not change the code; the one that may lies in {where}, where the job was started",
        "token_file": where,
    }
    assert serving.seen == [("upload", "refused", "bob")] and serving.store.known(made.digest) is None


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + CODE_TOKEN])
async def test_without_a_token_nothing_goes_in_or_out(serving: Serving, other: tuple[Code, bytes], token: str) -> None:
    made, content = other
    await serving.put(made.digest, content)
    assert (await serving.put(made.digest, content, token))[0] == 401
    assert (await serving.get(made.digest, token))[0] == 401


async def test_what_somebody_calls_themselves_can_be_printed(serving: Serving) -> None:
    await serving.put("0" * 64, b"", author="eve\u202e" + "x" * 999)
    (audited,) = serving.audited
    assert audited.author == "eve?" + "x" * 96


async def test_a_disk_that_takes_nothing_is_said_to_whoever_brings_something(
    serving: Serving, other: tuple[Code, bytes]
) -> None:
    made, content = other
    Path(serving.spec.code_dir).write_text("no folder")
    status, answer = await serving.put(made.digest, content)
    assert status == 507 and answer["error"].startswith("the archive cannot be kept: ")
    assert (await serving.get(made.digest))[0] == 404
    assert serving.audited == []


async def test_who_breaks_off_troubles_nobody(serving: Serving, other: tuple[Code, bytes]) -> None:
    made, content = other
    _, writer = await asyncio.open_connection("127.0.0.1", int(serving.url.rpartition(":")[2]))
    writer.write(
        f"PUT /v1/code/{made.digest} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {CODE_TOKEN}\r\n"
        f"Content-Length: {len(content)}\r\n\r\n".encode()
        + content[:100]
    )
    await writer.drain()
    folder = Path(serving.spec.code_dir)
    async with asyncio.timeout(20):
        while not (folder.exists() and list(folder.iterdir())):
            await asyncio.sleep(0.005)
        writer.close()
        await writer.wait_closed()
        while list(folder.iterdir()):
            await asyncio.sleep(0.005)
    assert (await serving.put(made.digest, content))[0] == 201


@pytest.mark.parametrize("serving", [CodeConfig(most_bytes=10, most_files=1)], indirect=True)
async def test_no_more_than_the_limit_is_taken_in(serving: Serving, other: tuple[Code, bytes]) -> None:
    made, content = other
    status, answer = await serving.put(made.digest, content)
    assert status == 400 and answer["error"]

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield bytes(1 << 20)

    try:
        status, answer = await serving.put(made.digest, endless())
    except aiohttp.ClientConnectionError:
        pass  # the answer may come before all has been sent
    else:
        assert status == 400 and "larger than" in answer["error"]
    assert [outcome for _, outcome, _ in serving.seen] == ["refused"] * 2
    assert "larger than" in serving.audited[-1].detail


async def test_what_a_command_brings_comes_to_the_nodes(
    serving: Serving, other: tuple[Code, bytes], tmp_path: Path
) -> None:
    made, content = other
    await serving.put(made.digest, content)
    spec = AgentSpec(
        job="job", run_id="job-1", node="gpu02", node_dir="", disk_dir="", log_root="", controller_url=serving.url,
        token_file="", fired_dir="", code_root=str(tmp_path / "another"), code_dir=str(tmp_path / "node" / "code"),
    )  # fmt: skip
    node = Versions(spec, TOKEN, lambda: None)
    node.obey(CodeOrder(version=2, digest=made.digest, archive_bytes=made.archive_bytes))
    async with asyncio.timeout(20):
        while node.code == NOT_READY:
            assert not node.problem
            await asyncio.sleep(0.005)
    assert isinstance(node.code, dict)
    assert (Path(node.code["folder"]) / "train.py").read_text() == "import model\nprint()\n"


# --- other changes of the code


@pytest.mark.parametrize("kind", ["update", "rollback"])
async def test_the_ordinary_token_asks_for_no_change(serving: Serving, kind: str) -> None:
    body = {"change": "c1", "kind": kind, "author": "bob", "digest": "0" * 64}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with serving.session.post(f"{serving.url}/v1/changes", json=body, headers=headers) as answer:
        status, said = answer.status, await answer.json()
    assert status == 403 and said["token_file"] == f"{serving.spec.run_dir}/code-token"
    assert serving.seen == [(kind, "refused", "bob")]


@pytest.mark.parametrize("change", [{"args": []}, {"env": {"A": "1"}}, {"digest": "0" * 64}])
async def test_the_ordinary_token_restarts_nothing_but_what_runs(serving: Serving, change: dict[str, Any]) -> None:
    body = {"restart": "r1", "author": "bob", **change}
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with serving.session.post(f"{serving.url}/v1/restart", json=body, headers=headers) as answer:
        assert answer.status == 403
        assert (await answer.json())["error"].startswith("this token may not change the code; ")
    assert serving.seen == [("restart", "refused", "bob")]
