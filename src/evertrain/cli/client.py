"""How does a command talk to the controller? Plain HTTP on one kept connection, with the bearer token."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


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
        super().__init__(f"{asked}: {status} {self.reason}")


class Client:
    """Not for several threads at once."""

    def __init__(self, url: str, token: str, timeout_s: float = 2.0) -> None:
        self.url = url
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout_s)
        self._headers = {"Authorization": f"Bearer {token}"}

    def get(self, path: str) -> Any:
        return self._ask("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask("POST", path, json.dumps(body).encode())

    def close(self) -> None:
        self._connection.close()

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            content = answer.read()
            if answer.status >= 300:
                raise Refused(f"{method} {path}", answer.status, content)
            return json.loads(content)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise Unreachable(f"{method} {path}: {error}") from error


def of_run_dir(run_dir: Path, timeout_s: float = 2.0) -> Client:
    """The client for whoever serves the job of this folder now."""
    try:
        url = json.loads((run_dir / "controller.json").read_bytes())["url"]
        token = (run_dir / "token").read_text().strip()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Unreachable(f"{run_dir}: {error}") from error
    return Client(url, token, timeout_s)


def serving_pid(run_dir: Path) -> int | None:
    """The process that wrote last that it serves the job of this folder."""
    try:
        return int(json.loads((run_dir / "controller.json").read_bytes())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
