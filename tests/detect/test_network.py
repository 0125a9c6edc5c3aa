"""When is a port in trouble, and which growth of its counters says nothing?"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from evertrain.detect.network import Ports, Resends
from evertrain.detect.readings import grade
from evertrain.model.sensing import PortReading, Sign

LOOK_S = 5.0
FINE = PortReading(name="eth0", is_up=True, carrier_changes=2, speed_mbps=100_000)


class Node:
    """One port, looked at every five seconds."""

    def __init__(self) -> None:
        self.ports = Ports()
        self.now = 1000.0
        self.reading = FINE

    def look(self, **changes: object) -> tuple[Sign, ...]:
        self.now += LOOK_S
        self.reading = replace(self.reading, **changes)
        return self.ports.judge([self.reading], self.now)

    def grow(self, **by: int) -> tuple[Sign, ...]:
        return self.look(**{name: getattr(self.reading, name) + number for name, number in by.items()})


def kinds(signs: Sequence[Sign]) -> list[str]:
    return [sign.kind for sign in signs]


def test_a_port_without_a_carrier_in_two_looks_is_down_as_one_event() -> None:
    node = Node()
    node.look()
    assert node.look(is_up=False) == ()
    (down,) = node.look()
    assert (down.kind, down.device, down.time, down.key) == ("nic_down", "eth0", 1010.0, "port:eth0:down:1010")
    assert grade(down.kind) == "network"
    assert [node.look() for _ in range(100)] == [(down,)] * 100
    assert node.look(is_up=True) == ()
    node.look(is_up=False)
    (again,) = node.look()
    assert again.key != down.key


def test_a_carrier_that_is_back_at_the_next_look_is_no_event() -> None:
    node = Node()
    node.look()
    for _ in range(20):
        assert node.look(is_up=False, carrier_changes=node.reading.carrier_changes) == ()
        assert node.look(is_up=True) == ()
        for _ in range(12):
            assert node.look() == ()


def test_three_changes_of_the_carrier_within_a_minute_are_a_flap() -> None:
    node = Node()
    node.look()
    assert node.grow(carrier_changes=2) == ()
    (flap,) = node.grow(carrier_changes=1)
    assert (flap.kind, flap.key) == ("link_flap", "port:eth0:flap:1010")
    assert "3 times within 60 s" in flap.evidence
    for _ in range(20):
        assert node.grow(carrier_changes=2) == (flap,), "it goes on: one event"
    while node.look():
        assert node.now < 1300.0
    (again,) = node.grow(carrier_changes=4)
    assert again.key != flap.key


def test_changes_that_no_look_has_seen_count_by_the_counter_and_without_one_by_the_looks() -> None:
    node = Node()
    node.look()
    assert kinds(node.grow(carrier_changes=4)) == ["link_flap"], "within five seconds"
    seen = Node()
    seen.look(carrier_changes=None)
    found = [kinds(seen.look(is_up=up)) for up in (False, True, False, True)]
    assert found == [[], [], ["link_flap"], ["link_flap"]]


def test_slow_changes_are_no_flap() -> None:
    node = Node()
    node.look()
    for _ in range(50):
        assert node.grow(carrier_changes=2) == ()
        for _ in range(12):
            assert node.look() == ()


@pytest.mark.parametrize("counter", ["errors", "dropped"])
def test_more_than_one_in_a_thousand_packets_is_a_loss(counter: str) -> None:
    node = Node()
    node.look()
    found = [node.grow(received_packets=2_000, sent_packets=1_000, **{counter: 90}) for _ in range(30)]
    (loss,) = found[0]
    assert (loss.kind, loss.key) == ("packet_loss", "port:eth0:loss:1005")
    assert loss.evidence == ("eth0: 90 packets of 3,000 were lost or damaged within 5 s (3.00%; the limit is 0.1%)")
    assert found == [(loss,)] * 30
    for _ in range(12):
        node.grow(received_packets=2_000)
    assert node.grow(received_packets=2_000) == (), "it is over"
    (again,) = node.grow(received_packets=2_000, **{counter: 100})
    assert again.key != loss.key


@pytest.mark.parametrize(
    ("packets", "lost"),
    [
        (100, 50),  # too few to say anything: 900 within the window
        (100_000, 99),  # 0.099 %
        (1_000, 1),  # one in a thousand, and very few
    ],
)
def test_what_is_no_loss(packets: int, lost: int) -> None:
    node = Node()
    node.look()
    spread = 1 if packets > 100 else 8
    for _ in range(60):
        assert node.grow(received_packets=packets, errors=lost) == ()
        for _ in range(spread - 1 if spread > 1 else 0):
            assert node.look() == ()


def test_packets_that_nobody_asked_for_are_no_loss_until_they_are_very_many() -> None:
    node = Node()
    node.look()
    for _ in range(30):
        assert node.grow(received_packets=500, unclaimed=40) == (), "8 a second: spanning tree, discovery, other VLANs"
    assert kinds(node.grow(received_packets=50_000, unclaimed=5_000)) == ["packet_loss"]


def test_counters_that_wrap_or_are_reset_say_nothing() -> None:
    node = Node()
    node.look(received_packets=2**32 - 500, errors=2**32 - 3, dropped=2**64 - 7, carrier_changes=2**32 - 1)
    assert node.look(received_packets=1500, errors=200) == (), "32 bits have wrapped"
    assert node.grow(received_packets=1500) == ()
    assert node.look(dropped=90_000) == (), "64 bits have wrapped"
    assert node.grow(received_packets=1500) == ()
    assert node.look(carrier_changes=1) == ()
    node.grow(received_packets=10**9, errors=10**4)
    assert node.look(received_packets=0, errors=0, dropped=0, sent_packets=0, carrier_changes=0) == ()
    assert node.grow(received_packets=5_000) == ()
    # a counter that some tool sets to the old value after a reset
    assert node.grow(received_packets=5_000, errors=2**32 - 1) == ()


def test_a_port_that_was_gone_has_not_lost_what_its_counters_say_when_it_is_back() -> None:
    node = Node()
    node.look(received_packets=10**6, errors=10**4)
    node.look(is_up=False, received_packets=0, errors=0)
    assert node.look(is_up=True, received_packets=10**6, errors=10**4) == ()
    assert node.grow(received_packets=10**4) == ()


def test_ports_are_judged_apart() -> None:
    ports = Ports()
    for number in range(6):
        down = replace(FINE, name="mlx5_1/1", is_up=number < 1)
        signs = ports.judge([FINE, down], 1000.0 + 5 * number)
    assert [(sign.kind, sign.device) for sign in signs] == [("nic_down", "mlx5_1/1")]


def test_everything_is_noticed_within_half_a_minute() -> None:
    for change in ({"is_up": False}, {"carrier_changes": 5}):
        node = Node()
        node.look()
        began = node.now
        while not node.look(**change):
            assert node.now - began < 30.0
    node = Node()
    node.look()
    began = node.now
    while not node.grow(received_packets=400, dropped=12):
        assert node.now - began < 30.0


def test_segments_that_are_sent_again_are_one_event_until_it_is_over() -> None:
    tcp = Resends()
    assert tcp.judge(0, 0, 0.0) == ()
    assert tcp.judge(900, 90, 5.0) == (), "too few to tell"
    (sign,) = tcp.judge(2_000, 120, 10.0)
    assert (sign.kind, sign.time) == ("tcp_resends", 0.0)
    assert "120 of 2,000 segments again within 10 s (6.0%" in sign.evidence
    assert tcp.judge(3_000, 150, 15.0) == (sign,)
    assert tcp.judge(3_000_000, 160, 20.0) == (), "a busy node sends a few again"
    assert tcp.judge(10, 0, 25.0) == (), "counters of a machine that was started again"
    assert tcp.judge(5_010, 49, 30.0) == ()


def test_segments_of_more_than_a_minute_ago_are_forgotten() -> None:
    tcp = Resends()
    for look in range(4):
        signs = tcp.judge(1_000 * look, 30 * look, 5.0 * look)
    assert len(signs) == 1
    assert tcp.judge(3_000, 90, 90.0) == ()
