"""Who cannot be reached any more?"""

from __future__ import annotations

from evertrain.detect.peers import Peers
from evertrain.model.sensing import PingReading


def seen(**seconds: float | None) -> list[PingReading]:
    return [PingReading(peer=peer, seconds=took) for peer, took in seconds.items()]


def test_two_misses_in_a_row_of_one_that_has_answered_before() -> None:
    peers = Peers()
    assert peers.judge(seen(a=0.001, b=0.002)) == ()
    assert peers.judge(seen(a=None, b=0.002)) == ()
    assert peers.judge(seen(a=None, b=None)) == ("a",)
    assert peers.judge(seen(a=None, b=0.002)) == ("a",)
    assert peers.judge(seen(a=0.5, b=None)) == ()
    assert peers.judge(seen(a=0.5, b=None)) == ("b",)


def test_one_that_never_answered_is_behind_a_firewall() -> None:
    peers = Peers()
    assert [peers.judge(seen(a=None)) for _ in range(5)] == [()] * 5


def test_who_is_not_tried_any_more_is_forgotten() -> None:
    peers = Peers()
    for took in (0.1, None, None):
        peers.judge(seen(a=took))
    assert peers.judge(()) == ()
    assert peers.judge(seen(a=None)) == ()
