"""How a replay is told on the terminal."""

from __future__ import annotations

from typing import Any

from evertrain.cli import replays


def group(*nodes: str, digest: str | None = "a", differs: bool = False, because: str = "") -> dict[str, Any]:
    named = {"phase": "horizontal", "number": 0, "nodes": list(nodes)}
    return {**named, "digest": digest, "differs": differs, "because": because}


def told(*groups: dict[str, Any], because: str = "", seconds: float | None = 2.04) -> list[str]:
    rounds = [{"round": 1, "seconds": seconds, "settings": {}, "groups": list(groups)}]
    return replays.lines({"rounds": rounds, "because": because, "confidence": 0.95 if because else None})


def test_a_round_is_a_line() -> None:
    well, ill = group("node-0", "node-1"), group("node-2", "node-3", digest="b", differs=True)
    assert told(well, well, ill, because="they meet at node-3") == [
        "horizontal: 3 groups of 2 nodes in 2.0 s: node-2, node-3 differs",
        "they meet at node-3; confidence 0.95",
    ]
    assert told(well, well) == ["horizontal: 2 groups of 2 nodes in 2.0 s: all agree"]
    assert told(well, group("node-2", digest="b")) == ["horizontal: 2 groups of 2 nodes in 2.0 s: no two agree"]
    assert told(group("node-0", digest=None), seconds=None) == ["horizontal: 1 group of 1 node, under way"]


def test_who_gave_nothing_is_told_with_the_reason_and_no_line_has_thousands_of_names() -> None:
    many = tuple(f"node-{number}" for number in range(1000))
    first, second = told(group(*many, digest=None, because="rank 3 of the group, on node-1: signal 9"))
    assert first == "horizontal: 1 group of 1000 nodes in 2.0 s"
    assert second.endswith("node-5, and 994 more: rank 3 of the group, on node-1: signal 9")
    (line,) = told(*[group(f"node-{number}", digest=str(number), differs=True) for number in range(9)])
    assert line.endswith("node-0 | node-1 | node-2 | node-3 differ, and 5 more")
