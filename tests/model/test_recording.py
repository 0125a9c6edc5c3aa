"""Operations are the same whether they were read here or came over a network."""

from __future__ import annotations

import msgspec

from evertrain.model.recording import Operation


def test_shapes_can_be_counted_after_a_journey() -> None:
    here = Operation("0", "all_reduce", 7, False, True, (((2, 3),), ((2, 3),), ("Float",), ("Float",)))
    there = msgspec.msgpack.decode(msgspec.msgpack.encode(here), type=Operation)
    assert there == here and len({here, there}) == 1
