"""NCCL's log lines say which interface a channel uses."""

from __future__ import annotations

import pytest

from evertrain.locate.nccl_routes import routes

HEAD = "gpu02:811:933 [1] NCCL INFO "


@pytest.mark.parametrize(
    ("line", "channel", "ends", "side", "transport", "device"),
    [
        ("Channel 03/0 : 9[1] -> 17[1] [send] via NET/IB/2/GDRDMA", 3, (9, 17), "send", "ib", 2),
        ("Channel 00/0 : 7[7] -> 8[0] [receive] via NET/Socket/0", 0, (7, 8), "receive", "socket", 0),
        ("Channel 12/1 : 3[901d0] -> 4[101c0] [send] via NET/IB/5(4)/GDRDMA", 12, (3, 4), "send", "ib", None),
        ("Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM", 0, (1, 0), "send", None, None),
        ("Channel 01 : 0[0] -> 1[1] via SHM/direct/direct", 1, (0, 1), "send", None, None),
    ],
)
def test_a_line(
    line: str, channel: int, ends: tuple[int, int], side: str, transport: str | None, device: int | None
) -> None:
    (route,) = routes([HEAD + line])
    assert (route.channel, (route.source, route.target), route.side) == (channel, ends, side)
    assert (route.transport, route.device) == (transport, device)
    assert route.via == line.rpartition(" ")[2]


def test_other_lines_are_passed_over() -> None:
    said = ("Connected all rings", "Channel 00/16 :    0   1   2   3", "Trees [0] 1/-1/-1->0->-1", "")
    assert not list(routes([HEAD + line for line in said]))
