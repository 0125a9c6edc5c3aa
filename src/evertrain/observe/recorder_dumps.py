"""What do the flight recorders of live ranks hold? Asked for from outside, also of a rank that no longer runs Python.

Torch's own server in the worker, in C++, answers at a unix socket while the GIL is held.

All reads are bounded in time and size. The server takes no parameter for less: an answer is about 500 bytes for each of
the last 2,000 operations, hence it is read into a `Recording` where it is fetched and the raw form stays there.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path

import msgspec

from evertrain.locate import recorder
from evertrain.model.recording import Recordings

_HANDLERS = ("fr_trace_json", "dump_nccl_trace_json")
"""Of CPU groups, and of NCCL's; a build without NCCL has the first only."""
_MOST_BYTES = 64 << 20


def fetch(socket_path: Path, rank: int, limit_s: float) -> Recordings:
    """What `rank` has recorded. Raises OSError or ValueError, with the reason in one line."""
    return recorder.read(fetch_raw(socket_path, limit_s), rank, time.time())


def fetch_raw(socket_path: Path, limit_s: float) -> bytes:
    """The same as JSON, as torch wrote it; with groups of both kinds, their entries in one list by time."""
    answers = _answers(socket_path, time.monotonic() + limit_s)
    return answers[0] if len(answers) == 1 else recorder.one_dump(answers)


def _answers(socket_path: Path, deadline: float) -> list[bytes]:
    """The dumps of all recorders that the process has."""
    offered = _ask(socket_path, "GET", "/handler/", deadline)
    try:
        handlers = msgspec.json.decode(offered, type=list[str])
    except msgspec.MsgspecError:
        raise ValueError(f"{socket_path}: no server of torch") from None
    asked = [one for one in _HANDLERS if one in handlers]
    if not asked:
        raise ValueError(f"{socket_path}: this torch offers no flight recorder, only {', '.join(handlers)[:200]}")
    return [_ask(socket_path, "POST", f"/handler/{one}", deadline) for one in asked]


def _ask(socket_path: Path, method: str, path: str, deadline: float) -> bytes:
    try:
        return _exchange(socket_path, method, path, deadline)
    except TimeoutError:
        raise TimeoutError(
            f"{socket_path}: no answer in time: the process is stopped, uninterruptible, or the machine overloaded"
        ) from None


def _exchange(socket_path: Path, method: str, path: str, deadline: float) -> bytes:
    """One HTTP request over a unix socket. The time limit holds for all of it, not for each read."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_left(deadline))
        peer.connect(str(socket_path))
        request = f"{method} {path} HTTP/1.1\r\nHost: worker\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        peer.sendall(request.encode())
        received = bytearray()
        while True:
            peer.settimeout(_left(deadline))
            if not (part := peer.recv(1 << 18)):
                break
            received += part
            if len(received) > _MOST_BYTES:
                raise ValueError(f"{socket_path}: an answer of more than {_MOST_BYTES >> 20} MiB")
    head, blank, body = bytes(received).partition(b"\r\n\r\n")
    status, _, told = head.partition(b"\r\n")
    if not blank or not status.startswith(b"HTTP/1."):
        raise ValueError(f"{socket_path}: the server broke off its answer to {path}")
    if status.split(b" ")[1:2] != [b"200"]:
        raise ValueError(f"{socket_path}: {path} answered {status[9:60].decode(errors='replace')}")
    for line in told.lower().split(b"\r\n"):
        if line.startswith(b"content-length:") and int(line[15:]) != len(body):
            raise ValueError(f"{socket_path}: the server broke off its answer to {path}")
    return body


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
