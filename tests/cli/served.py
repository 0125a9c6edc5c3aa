"""A job whose controller is this test: it answers what it is told to, over HTTP, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cli.plans import known_job
from evertrain.cli import look

Json = dict[str, Any]
Answer = tuple[int, Any]


class Asked(NamedTuple):
    method: str
    path: str
    body: bytes
    token: str


class Served:
    """`answers["POST /v1/changes"]`: what comes to the first such request, to the second, …; the last one holds.

    A key stands for all paths that begin with it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.answers: dict[str, list[Answer]] = {}
        self.asked: list[Asked] = []
        self.is_alive = True

    def answer(self, method: str, path: str, body: bytes, token: str) -> Answer:
        self.asked.append(Asked(method, path, body, token))
        known = [key for key in self.answers if f"{method} {path}".startswith(key)]
        if not known:
            return 404, {"error": "unknown"}
        answers = self.answers[max(known, key=len)]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def of(self, method: str, path: str) -> list[Asked]:
        return [one for one in self.asked if one.method == method and one.path.startswith(path)]

    def wish(self, path: str) -> Json:
        """The last one that was posted there."""
        wish: Json = json.loads(self.of("POST", path)[-1].body)
        return wish


@contextmanager
def job(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "job") -> Iterator[Served]:
    """A job `name` below `folder`/runs that lives."""
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("EVERTRAIN_RUN_DIR", str(folder / "runs"))
    monkeypatch.delenv("EVERTRAIN_CODE_TOKEN", raising=False)
    monkeypatch.setattr(look, "POLL_S", 0.01)
    monkeypatch.setattr(look, "CONTROLLER_RETURNS_S", 0.05)
    monkeypatch.setattr(look, "CONTROLLER_BEGINS_S", 0.05)
    served = Served(known_job(folder / "runs", name))
    monkeypatch.setattr(look, "lives", lambda _: served.is_alive)

    class Api(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _all(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            token = self.headers["Authorization"].removeprefix("Bearer ")
            status, value = served.answer(self.command, self.path, body, token)
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = _all

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    (served.run_dir / "controller.json").write_text(json.dumps({"url": url}))
    (served.run_dir / "token").write_text("ordinary")
    (served.run_dir / "code-token").write_text("for code\n")
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def diff(**different: Any) -> Json:
    usual = {
        "added": [], "removed": [], "changed": ["model.py"], "files": 1, "lines_added": 12, "lines_removed": 4,
        "args": False, "env": [],
    }  # fmt: skip
    return {**usual, **different}


def change(**different: Any) -> Json:
    """As `GET /v1/changes/…` has it: an update to version 2 that is carried out."""
    usual = {
        "change": "c", "act": "update", "version": 2, "parent": 1, "urgent": True, "latest": 100.0, "time": 100.0,
        "author": "ann@box", "reason": "fix loss", "goes_back": False, "incident": None, "diff": diff(),
        "outcome": "applied", "because": "", "attempt": 4, "resume": 120,
        "resume_version": 1, "back": True, "seconds": 1.23, "applied_time": 101.0, "ended": None,
    }  # fmt: skip
    return {**usual, **different}


def version(number: int = 1, **different: Any) -> Json:
    """As `GET /v1/versions` has it: what the job began with, and runs."""
    usual = {
        "version": number, "digest": f"{number:x}" * 64, "files": 3, "bytes": 1000, "problem": "",
        "source": "/home/ann/train", "args": [], "env": [], "parent": number - 1 or None, "own": number == 1,
        "runs": number == 1, "proven": False, "proven_because": "", "attempts": [number], "first_step": 1,
        "last_step": 50, "time": 100.0, "author": "ann@box", "reason": "", "outcome": "",
    }  # fmt: skip
    return {**usual, **different}
