"""Connections by what the kernel says of them: each is somebody's, and what counts up is told as what has come."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evertrain.trace import flows, layout, sockets
from evertrain.trace.flows import Flows, Pair
from evertrain.trace.sockets import Namespace


def read(told: dict[int, list[bytes]], rank: int = 0) -> list[Any]:
    whole = b"".join(bytes(8) + one + bytes(8) for one in told.get(rank, []))
    return list(np.frombuffer(whole, layout.dtype("flow")))


class Line:
    """A connection with both ends in this process, and a clock of the test's own."""

    def __init__(self, family: socket.AddressFamily = socket.AF_INET) -> None:
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
        with socket.create_server((host, 0), family=family) as server:
            self.near = socket.create_connection(server.getsockname()[:2])
            self.far, _ = server.accept()
        self.inode = os.fstat(self.near.fileno()).st_ino
        self.far_inode = os.fstat(self.far.fileno()).st_ino
        self.flows = Flows()
        self.now_ns = 10**12

    def look(self, after_s: float = 0.1, told: tuple[int, ...] = (0,), **options: Any) -> dict[int, Any]:
        """By inode."""
        self.now_ns += int(after_s * 1e9)
        found = read(self.flows.look(self.now_ns, {0: os.getpid()}, told, **options))
        return {int(one["inode"]): one for one in found}

    def close(self) -> None:
        self.flows.close()
        self.near.close()
        self.far.close()


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.close()


def test_what_has_come_since_the_record_before(line: Line) -> None:
    assert line.look() == {}, "nothing to compare with yet"
    line.near.sendall(bytes(5000))
    seen = line.look(0.2)
    assert (int(seen[line.inode]["sent"]), int(seen[line.inode]["dt_us"])) == (5000, 200_000)
    assert (int(seen[line.far_inode]["sent"]), int(seen[line.far_inode]["rqueue"])) == (0, 5000)
    line.far.recv(5000)
    line.near.sendall(bytes(7))
    assert int(line.look(0.1)[line.inode]["sent"]) == 7


def test_what_is_quiet_is_told_once_a_second(line: Line) -> None:
    line.look()
    for _ in range(9):
        assert line.inode not in line.look(0.1)
    quiet = line.look(0.2)[line.inode]
    assert int(quiet["dt_us"]) == 1_100_000 and int(quiet["sent"]) == 0


def test_what_was_not_wanted_is_part_of_the_next_record(line: Line) -> None:
    line.look()
    line.near.sendall(bytes(100))
    line.far.recv(100)
    assert line.look(0.5, told=()) == {}
    seen = line.look(0.5)[line.inode]
    assert (int(seen["sent"]), int(seen["dt_us"])) == (100, 1_000_000)


def test_the_group_that_a_socket_was_opened_for(line: Line) -> None:
    group_of = lambda rank, inode: 77 if (rank, inode) == (0, line.inode) else 0  # noqa: E731
    line.look()
    line.near.sendall(b"x")
    seen = line.look(group_of=group_of)
    assert (int(seen[line.inode]["comm"]), int(seen[line.far_inode]["comm"])) == (77, 0)


def test_new_connections_are_found_and_old_ones_forgotten(line: Line) -> None:
    line.look()
    other = Line()
    try:
        line.look(1.1)
        other.near.sendall(b"x")
        assert other.inode in line.look(0.1)
    finally:
        other.close()
    assert other.inode not in line.look(1.1) and other.inode not in line.look(1.1)


def test_a_number_that_is_used_again_begins_anew(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.near.sendall(bytes(5000))
    line.look()
    again = Namespace.again

    def another(self: Namespace, known: list[sockets.Connection]) -> list[sockets.Connection]:
        return [one._replace(sent=3, acked=3) if one.inode == line.inode else one for one in again(self, known)]

    monkeypatch.setattr(Namespace, "again", another)
    assert line.inode not in line.look(0.1), "what counts up never counts down"
    assert int(line.look(1.2)[line.inode]["sent"]) == 0


def test_version_6_and_its_own_addresses() -> None:
    try:
        line = Line(socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    try:
        line.look()
        line.near.sendall(bytes(10))
        assert int(line.look()[line.inode]["sent"]) == 10
        pair = next(one for one in line.flows.take_pairs() if one.inode == line.inode)
        assert pair.peer == f"[::1]:{line.far.getsockname()[1]}"
    finally:
        line.close()


def test_a_process_that_is_gone_costs_nothing_but_its_records(line: Line) -> None:
    assert line.flows.look(1, {0: os.getpid(), 1: 2**22 - 1}, (0, 1)) == {}
    assert line.flows.blind == {}


def test_a_namespace_that_may_not_be_entered_is_said(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sockets, "of_process", refuse)
    line.look()
    assert line.flows.blind == {0: "the network of its container cannot be looked at from here: Permission denied"}


def test_addresses_are_written_down_once_and_read_back(line: Line, tmp_path: Path) -> None:
    line.look()
    pairs = [one for one in line.flows.take_pairs() if one.inode in (line.inode, line.far_inode)]
    path = tmp_path / "flows"
    flows.append_pairs(path, pairs)
    with path.open("a") as file:
        file.write('{"inode": 5, "own"')  # it is being written
    assert flows.read_pairs(path, 0) == pairs
    assert flows.read_pairs(tmp_path / "none", 0) == []


def test_both_ends_name_each_other() -> None:
    pairs = [Pair(0, 5, "10.0.0.1:1", "10.0.0.2:2"), Pair(3, 9, "10.0.0.2:2", "10.0.0.1:1"), Pair(0, 6, "a:1", "b:2")]
    assert flows.paired(pairs) == {(0, 5): 3, (3, 9): 0}


def test_all_of_a_look_is_cheap(line: Line) -> None:
    """Fifty connections, both ends here: what a rank of a large group has."""
    lines = [Line() for _ in range(50)]
    try:
        line.look()
        began = time.thread_time()
        for _ in range(10):
            line.look()
        assert (time.thread_time() - began) / 10 < 0.02
    finally:
        for one in lines:
            one.close()
