"""How does a command talk to the controller? Plain HTTP on one kept connection, with the bearer token.

Two secrets: whoever knows the job's token may look, stop and restart; other code takes the code token.
"""

from __future__ import annotations

import getpass
import http.client
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self
from urllib.parse import urlsplit

from evertrain.model.errors import UsageError

CODE_TOKEN = "EVERTRAIN_CODE_TOKEN"
AUTHOR = "X-Evertrain-Author"
"""Of a file, which cannot say itself who sends it."""
JSON = {"Content-Type": "application/json"}


class Unreachable(Exception):
    """Nobody answers, or not in a way that makes sense. Says nothing about the job: training goes on without us."""


class Refused(Unreachable):
    """Somebody answers, but not what was asked."""

    def __init__(self, asked: str, status: int, content: bytes) -> None:
        self.status = status
        try:
            body = json.loads(content)
        except ValueError:
            body = {}
        self.body: dict[str, Any] = body if isinstance(body, dict) else {}
        self.reason = str(self.body.get("error") or f"the answer ({status}) is not one of evertrain's")
        if status == 403 and "token_file" in self.body:
            file = self.body["token_file"]
            self.reason = (
                f"to change what it runs takes the code token: {file} on the node that serves the job, or {CODE_TOKEN}"
            )
        super().__init__(f"{asked}: {status} {self.reason}")


class Client:
    """Not for several threads at once."""

    def __init__(self, url: str, token: str, timeout_s: float = 2.0, about: Mapping[str, str] | None = None) -> None:
        self.url = url
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
        self._headers = {"Authorization": f"Bearer {token}", **(about or {})}

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None)

    def get_bytes(self, path: str) -> bytes:
        """What is no JSON."""
        return self._exchange("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, json.dumps(body).encode())

    def put(self, path: str, file: Path) -> Any:
        """Send a file as it is."""
        with file.open("rb") as content:
            headers = {"Content-Type": "application/octet-stream", "Content-Length": str(file.stat().st_size)}
            return self._ask("PUT", path, content, headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, path: str, body: bytes | BinaryIO | None, about: Mapping[str, str] = JSON) -> Any:
        content = self._exchange(method, path, body, about)
        try:
            return json.loads(content)
        except ValueError as error:
            self._connection.close()
            raise Unreachable(f"{method} {path}: {error}") from error

    def _exchange(
        self, method: str, path: str, body: bytes | BinaryIO | None, about: Mapping[str, str] = JSON
    ) -> bytes:
        headers = self._headers if body is None else {**self._headers, **about}
        try:
            try:
                self._connection.request(method, path, body, headers)
            except (BrokenPipeError, ConnectionResetError):
                # who will not read all of a file may have said why before hanging up
                if self._connection.sock is None:
                    raise
            answer = self._connection.getresponse()
            content = answer.read()
            if answer.status >= 300:
                raise Refused(f"{method} {path}", answer.status, content)
            return content
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise Unreachable(f"{method} {path}: {error}") from error


def of_run_dir(run_dir: Path, timeout_s: float = 2.0, *, code: bool = False) -> Client:
    """The client for whoever serves the job of this folder now; `code`: to change what it runs."""
    try:
        url = json.loads((run_dir / "controller.json").read_bytes())["url"]
        token = code_token(run_dir)[0] if code else ""
        token = token or (run_dir / "token").read_text().strip()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{run_dir}: {error}") from error
    return Client(url, token, timeout_s, {AUTHOR: author().encode("ascii", "replace").decode()} if code else {})


def author() -> str:
    """As whoever asks is called on this machine; the token is what counts."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # nobody in the user database
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def code_token(run_dir: Path) -> tuple[str, str]:
    """The secret and where it is from; both empty where it is not known here."""
    if given := os.environ.get(CODE_TOKEN, "").strip():
        if not given.isascii() or not given.isprintable():
            raise UsageError(f"{CODE_TOKEN}: a token is one line of printable ASCII characters")
        return given, CODE_TOKEN
    file = run_dir / "code-token"
    try:
        return file.read_text(errors="replace").strip(), str(file)
    except OSError:
        return "", ""


def serving_pid(run_dir: Path) -> int | None:
    """The process that wrote last that it serves the job of this folder."""
    try:
        return int(json.loads((run_dir / "controller.json").read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
