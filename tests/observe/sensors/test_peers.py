"""What counts as an answer of another node?"""

from __future__ import annotations

import socket
import time

from evertrain.detect.peers import Peers
from evertrain.model.copies import Peer
from evertrain.observe.sensors.peers import PeersSensor, ping


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def silent() -> tuple[socket.socket, list[socket.socket]]:
    """A server whose queue is full: whoever connects hears nothing, as from a machine that is gone."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(0)
    waiting = []
    for _ in range(4):
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(server.getsockname())
    return server, waiting


def test_a_connection_and_a_refusal_are_answers_and_silence_is_none() -> None:
    quiet, waiting = silent()
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers = [
            Peer("there", "127.0.0.1", server.getsockname()[1]),
            Peer("agent-gone", "127.0.0.1", free_port()),
            Peer("silent", "127.0.0.1", quiet.getsockname()[1]),
            Peer("unknown", "no-such-host.invalid", 1),
        ]
        began = time.monotonic()
        readings = {one.peer: one.seconds for one in ping(peers, 0.3)}
        assert 0.29 < time.monotonic() - began < 5.0
    assert {name for name, seconds in readings.items() if seconds is not None} == {"there", "agent-gone"}
    for one in (quiet, *waiting):
        one.close()


def test_the_sensor_tells_who_cannot_be_reached_and_accuses_nobody() -> None:
    clock = [0.0]
    sensor = PeersSensor(Peers().judge, deadline_s=0.1, clock=lambda: clock[0])
    assert sensor.look(0.0).last == "nobody to try" and sensor.unreachable == ()
    with socket.create_server(("127.0.0.1", 0)) as server:
        sensor.obey((Peer("b", "127.0.0.1", server.getsockname()[1]),))
        assert sensor.look(0.0).last.startswith("1 of 1 peers answer within ")
    quiet, waiting = silent()
    sensor.obey((Peer("b", "127.0.0.1", quiet.getsockname()[1]),))
    assert sensor.look(5.0).last == "0 of 1 peers answer" and sensor.unreachable == ()
    seen = sensor.look(10.0)
    assert seen.last == "0 of 1 peers answer; b cannot be reached" and seen.signs == ()
    assert sensor.unreachable == ("b",)
    clock[0] = 15.1
    assert sensor.unreachable == (), "the next look has not come back: what it would see is not known"
    for one in (quiet, *waiting):
        one.close()


def test_a_look_costs_little() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=200) as server:
        sensor = PeersSensor(Peers().judge)
        sensor.obey(tuple(Peer(name, "127.0.0.1", server.getsockname()[1]) for name in "abc"))
        costs = []
        for number in range(20):
            began = time.thread_time()
            sensor.look(5.0 * number)
            costs.append(time.thread_time() - began)
    assert sorted(costs)[10] < 0.01
