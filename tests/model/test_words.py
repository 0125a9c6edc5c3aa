"""A number of things, as a person says it."""

from __future__ import annotations

from evertrain.model.words import counted


def test_only_one_is_singular() -> None:
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
    assert counted(1, "other rank") == "1 other rank"
