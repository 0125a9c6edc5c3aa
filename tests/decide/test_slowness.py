"""Slow training: five looks, a rank is named or nobody, and no healthy machine is touched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from evertrain.controller import views
from evertrain.decide import captures, replay
from evertrain.model.capture_records import CaptureAsked
from evertrain.model.config import Config, HangConfig
from evertrain.model.stacks import Located
from support.world import World

STRAGGLER = Located(
    kind="slow", ranks=(2,), nodes=("node-1",), confidence=0.8, category="straggler", group=(2, 3), group_name="tp",
    evidence=("rank 2 on node-1 computed in 90 % of the looks while the others waited",),
)  # fmt: skip


def training(**options: Any) -> World:
    """Two nodes of two ranks, and one that waits."""
    world = World(**{"nodes": 3, "standby": 1, **options})
    world.turns()
    world.train(5)
    world.turns()
    return world


def slow(world: World) -> None:
    """What the lowest rank of every node says when the whole job has become slow."""
    for node in ("node-0", "node-1"):
        world.signal("slow", node)
    world.turn()


def goes_on(world: World, seconds: float) -> None:
    for _ in range(int(2 * seconds)):
        world.train()
        world.turn(0.4)


def rounds(world: World) -> list[CaptureAsked]:
    return [record for record in world.log if isinstance(record, CaptureAsked)]


def of_rank(world: World) -> list[dict[str, Any]]:
    return [one for one in views.incidents(world.state) if one["cause"] == "slow rank"]


def test_five_rounds_ten_seconds_apart_and_then_a_name() -> None:
    world = training()
    world.located = STRAGGLER
    slow(world)
    goes_on(world, 60)
    found = rounds(world)
    assert [(one.round, one.series, one.looks, one.every_s) for one in found] == [(n, 1, 20, 0.05) for n in range(1, 6)]
    apart = [later.time - one.time for one, later in pairwise(found)]
    assert all(10.0 <= gap < 11.0 for gap in apart)
    assert not any(order.recorder for order in world.orders)
    (incident,) = of_rank(world)
    assert (incident["ranks"], incident["nodes"], incident["class"]) == ([2], ["node-1"], "slow")
    assert (incident["category"], incident["action"], incident["open"]) == ("straggler", "tolerate", False)
    assert incident["captures"] == [5] and incident["evidence"][-1].startswith("`evertrain stacks --incident ")
    assert world.running() == dict.fromkeys(range(4), 1), "training goes on"


@pytest.mark.parametrize("located", [Located(kind="unknown"), Located(kind="slow", ranks=(2,), confidence=0.3)])
def test_where_all_are_equally_slow_nobody_is_named(located: Located) -> None:
    world = training()
    world.located = located
    slow(world)
    goes_on(world, 90)
    assert len(rounds(world)) == captures.ROUNDS
    assert [one["cause"] for one in views.incidents(world.state)] == ["slow"]
    assert views.incidents(world.state)[0]["action"] in ("none", "tolerate")


def test_again_only_after_a_while() -> None:
    world = training()
    slow(world)
    goes_on(world, 60)
    slow(world)
    goes_on(world, 20)
    assert len(rounds(world)) == captures.ROUNDS
    goes_on(world, 560)
    slow(world)
    assert len(rounds(world)) == captures.ROUNDS + 1


def test_the_second_time_at_the_same_node_a_standby_takes_over() -> None:
    world = training()
    world.located = STRAGGLER
    slow(world)
    goes_on(world, 700)
    slow(world)
    goes_on(world, 60)
    world.turns(12)
    first, second = of_rank(world)
    assert (first["action"], second["action"]) == ("tolerate", "evict")
    assert "was slow before, in incident" in second["because"]
    assert world.state.nodes["node-1"].state == "evicted"
    assert world.state.active is not None and world.state.active.started.placement[2] == "node-2"
    (decided,) = replay.replay(world.log, second["id"])
    assert decided.agrees


def test_with_hardware_evidence_at_once_and_without_a_standby_never() -> None:
    for standby, action in ((1, "evict"), (0, "tolerate")):
        world = training(nodes=2 + standby, standby=standby)
        world.located = STRAGGLER
        slow(world)
        goes_on(world, 30)
        world.sense("node-1", "gpu_hot", "hot")
        goes_on(world, 30)
        world.turns(12)
        (incident,) = of_rank(world)
        assert incident["action"] == action
        assert incident["because"].count("gpu_hot") >= 1
    assert world.running() == dict.fromkeys(range(4), 1), "training goes on"


def test_by_the_papers_rule_the_group_goes_at_once() -> None:
    world = training(config=Config(hang=HangConfig(policy="paper")))
    world.located = Located(
        kind="slow", ranks=(2,), nodes=("node-1",), eviction=("node-1",), confidence=0.8, category="straggler"
    )
    slow(world)
    goes_on(world, 60)
    world.turns(12)
    assert of_rank(world)[0]["action"] == "evict"


def test_several_nodes_at_once_are_no_machines_fault() -> None:
    world = training()
    world.located = Located(kind="slow", ranks=(0, 2), nodes=("node-0", "node-1"), confidence=0.8)
    world.sense("node-1", "gpu_hot", "hot")
    slow(world)
    goes_on(world, 60)
    (incident,) = of_rank(world)
    assert incident["action"] == "tolerate" and "2 nodes at once" in incident["because"]


def test_a_hang_meanwhile_comes_first() -> None:
    world = training()
    slow(world)
    goes_on(world, 12)
    before = len(rounds(world))
    world.hang(2)
    for _ in range(16):
        world.turn(0.5)
    assert [one.reason for one in rounds(world)[before:]] == ["hang"]


def test_observe_only_names_and_touches_nothing() -> None:
    world = training(observe_only=True)
    world.located = STRAGGLER
    world.sense("node-1", "gpu_hot", "hot")
    slow(world)
    goes_on(world, 60)
    (incident,) = of_rank(world)
    assert incident["action"] == "tolerate" and "it would evict node-1" in incident["because"]
    assert world.running() == dict.fromkeys(range(4), 1)


def test_rounds_that_nobody_judges_come_to_an_end() -> None:
    world = training()
    world.located = None
    slow(world)
    goes_on(world, 200)
    assert len(rounds(world)) <= captures.ROUNDS + captures.MOST_LOST
    assert not of_rank(world)


def test_a_new_attempt_begins_with_nothing() -> None:
    world = training()
    slow(world)
    goes_on(world, 12)
    world.fail(2)
    world.turns(12)
    goes_on(world, 60)
    assert {one.attempt for one in rounds(world)} == {1}
