"""What the agent may say, how often, and what the keeper makes of nonsense."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress

import pytest

from keeper.node import Node

StartNode = Callable[..., Node]

SLEEPER = "import time; time.sleep(600)"


def test_the_same_command_again_changes_nothing(start_node: StartNode) -> None:
    node = start_node(SLEEPER, nproc=2)
    node.prepare(1, store=True)
    prepared = node.attempt(1)
    node.prepare(1, store=True)
    node.go(1)
    running = node.wait_for(lambda state: node.phase(1) == "running")["attempts"]
    node.go(1)
    node.prepare(1, store=True, wait=False)
    node.send(do="forget", term=1, attempt=99)
    node.send(do="end", term=1, attempt=99, signal=9)
    node.connect()
    assert node.state["attempts"] == running
    assert [rank["pid"] for rank in prepared["ranks"].values()] == [node.rank(1, rank)["pid"] for rank in range(2)]
    assert node.errors == []


def test_ended_attempts_stay_until_they_are_forgotten(start_node: StartNode) -> None:
    node = start_node(SLEEPER)
    node.prepare(1)
    node.send(do="forget", term=1, attempt=1)
    assert "has not ended but is prepared" in node.wait_for_error()
    node.send(do="end", term=1, attempt=1, signal=9)
    node.wait_for(lambda state: node.phase(1) == "ended")
    node.send(do="forget", term=1, attempt=1)
    node.wait_for(lambda state: state["attempts"] == {})


def test_a_term_that_is_over_is_refused(start_node: StartNode) -> None:
    node = start_node(SLEEPER)
    node.prepare(1, term=3)
    node.send(do="end", term=2, attempt=1, signal=9)
    assert node.wait_for_error() == "term 2 is over, this is term 3"
    node.prepare(2, term=4)
    assert (node.phase(1), node.attempt(1)["term"], node.attempt(2)["term"]) == ("prepared", 3, 4)


def test_go_needs_prepared_ranks_and_an_order_for_each(start_node: StartNode) -> None:
    node = start_node(SLEEPER, nproc=2)
    node.send(do="go", term=1, attempt=1, ranks={})
    assert node.wait_for_error() == "attempt 1 is not prepared but unknown"
    node.prepare(1)
    node.send(do="go", term=1, attempt=1, ranks={"0": {}})
    assert "without orders for ranks [1]" in node.wait_for_error()
    assert node.phase(1) == "prepared"


def test_an_attempt_is_not_prepared_twice_for_different_ranks(start_node: StartNode) -> None:
    node = start_node(SLEEPER, nproc=2)
    node.prepare(1)
    node.send(do="prepare", term=1, attempt=1, ranks=[5, 6], store=False)
    assert "has been prepared for ranks [0, 1]" in node.wait_for_error()


def test_an_attempt_can_be_ended_before_it_is_prepared(start_node: StartNode) -> None:
    node = start_node(SLEEPER, nproc=2, start="zygote")
    node.prepare(1, store=True, wait=False)
    node.send(do="end", term=1, attempt=1, signal=9)
    node.wait_for(lambda state: node.phase(1) == "ended")
    node.wait_for(lambda state: state["starter"]["state"] == "ready")
    assert node.attempt(1)["ranks"] == {}
    node.prepare(2)
    assert node.phase(2) == "prepared"


@pytest.mark.parametrize(
    "line",
    [b"\n", b"nonsense\n", b"[1]\n", b"{}\n", b"\xff\xfe\n", b'{"do":"dance"}\n', b'{"do":"prepare","term":1}\n',
     b'{"do":"prepare","term":"x","attempt":1,"ranks":[0],"store":true}\n', b"[" * 100_000 + b"\n",
     b'{"do":"prepare","term":1,"attempt":1,"ranks":["a"],"store":true}\n', b'{"do":"end","attempt":1,"signal":1}\n'],
)  # fmt: skip
def test_garbage_is_answered_and_harms_nothing(start_node: StartNode, line: bytes) -> None:
    node = start_node(SLEEPER)
    node.send_bytes(line)
    assert node.wait_for_error()
    node.prepare(1)


def test_an_endless_line_costs_the_connection_only(start_node: StartNode) -> None:
    node = start_node(SLEEPER)
    with pytest.raises(ConnectionError):
        node.send_bytes(b"x" * (64 << 20))
    node.connect()
    node.prepare(1)


def test_an_agent_that_does_not_listen_is_overtaken_by_the_next(start_node: StartNode) -> None:
    node = start_node(SLEEPER)
    deaf = node._socket
    assert deaf
    node._socket = None
    deaf.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            deaf.send(b"nonsense\n" * 1000)
    node.connect()
    node.prepare(1)
    deaf.close()


def test_a_newer_agent_replaces_the_older(start_node: StartNode) -> None:
    node = start_node(SLEEPER)
    older, node._socket = node._socket, None
    assert older
    node.connect()
    older.settimeout(5)
    while older.recv(1 << 16):
        pass
    older.close()
    node.prepare(1)


def test_a_wanted_port_is_taken_or_said_to_be_taken(start_node: StartNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        node = start_node(SLEEPER)
        port = taken.getsockname()[1]
        node.prepare(1, store=True, store_port=port, wait=False)
        node.wait_for(lambda state: node.phase(1) == "ended")
        assert f"no port for the store ({port}): Address already in use" in node.attempt(1)["error"]
    node.prepare(2, store=True, store_port=port)
    assert node.attempt(2)["store_port"] == port
