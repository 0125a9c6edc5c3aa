"""What a command hears from whoever answers at the controller's address."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from evertrain.cli import client
from evertrain.model.errors import UsageError

LARGE = 20 << 20
"""More than a socket takes before somebody reads."""


@pytest.fixture
def hangs_up(tmp_path: Path) -> Iterator[Path]:
    """The run dir of a job whose server reads no more than the headers, says why, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))
    (tmp_path / "controller.json").write_text(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}))
    (tmp_path / "token").write_text("ordinary")
    body = b'{"error": "no", "token_file": "/far/code-token"}'

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                head += connection.recv(1)
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    thread = threading.Thread(target=serve)
    thread.start()
    yield tmp_path
    thread.join()
    listener.close()


def test_why_a_file_is_not_taken_is_heard_before_all_of_it_is_sent(hangs_up: Path) -> None:
    file = hangs_up / "code.tar.gz"
    with file.open("wb") as out:
        out.truncate(LARGE)
    with client.of_run_dir(hangs_up, 10.0, code=True) as controller, pytest.raises(client.Refused) as refused:
        controller.put("/v1/code/x", file)
    assert refused.value.status == 403
    assert "/far/code-token" in refused.value.reason and "EVERTRAIN_CODE_TOKEN" in refused.value.reason


def test_a_file_that_nobody_takes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(client.Unreachable) as away:
        client.Client(url, "t").put("/v1/code/x", tmp_path / "file")
    assert not isinstance(away.value, client.Refused)


def test_which_secret_goes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EVERTRAIN_CODE_TOKEN", raising=False)
    asked: list[dict[str, str]] = []

    def request(self: http.client.HTTPConnection, method: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        asked.append(headers)
        raise ConnectionRefusedError

    monkeypatch.setattr(http.client.HTTPConnection, "request", request)
    (tmp_path / "controller.json").write_text('{"url": "http://127.0.0.1:1"}')
    (tmp_path / "token").write_text("ordinary\n")

    def secret(*, code: bool) -> str:
        with pytest.raises(client.Unreachable):
            client.of_run_dir(tmp_path, code=code).get("/")
        return asked[-1]["Authorization"].removeprefix("Bearer ")

    assert (secret(code=False), secret(code=True)) == ("ordinary", "ordinary")
    assert asked[0].keys() == {"Authorization"} and asked[1]["X-Evertrain-Author"] == client.author()
    (tmp_path / "code-token").write_text("for code\n")
    assert (secret(code=False), secret(code=True)) == ("ordinary", "for code")
    monkeypatch.setenv("EVERTRAIN_CODE_TOKEN", "given")
    assert (secret(code=False), secret(code=True)) == ("ordinary", "given")
    monkeypatch.setenv("EVERTRAIN_CODE_TOKEN", "a\nb")
    with pytest.raises(UsageError, match="one line of printable ASCII"):
        client.of_run_dir(tmp_path, code=True)
