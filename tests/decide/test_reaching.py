"""Who is cut off, by what several nodes say, and who is not?"""

from __future__ import annotations

from collections import Counter

from evertrain.controller import views
from evertrain.decide import reaching
from evertrain.decide.state import JobState
from evertrain.model.config import Config, LadderConfig
from evertrain.model.records import SignalRaised
from support.world import World


def training(nodes: int = 6, **options: object) -> World:
    world = World(nodes, nproc=1, **options)  # type: ignore[arg-type]
    for number, node in enumerate(world.nodes.values()):
        node.address = f"10.0.0.{number}"
    world.turns()
    world.train(3)
    world.turns()
    return world


def tried(world: World, node: str) -> list[str]:
    order = world.nodes[node].order
    assert order is not None
    return [peer.node for peer in order.peers]


def witnesses(world: World, node: str) -> list[str]:
    return [other for other in world.nodes if node in tried(world, other)]


def are_apart(world: World, one: str, other: str) -> bool:
    """Whether neither tries the other one, and two who try each of them try it alone."""
    if one == other or one in tried(world, other) or other in tried(world, one):
        return False
    return not set(witnesses(world, one)) & set(witnesses(world, other))


def cut_off(world: World, *nodes: str) -> None:
    """What every node sees when these reach nobody and nobody reaches them."""
    for name, node in world.nodes.items():
        lost = [other for other in tried(world, name) if other in nodes or name in nodes]
        node.unreachable = tuple(lost)


def raised(world: World) -> list[tuple[str, str]]:
    return [(record.node, record.signal) for record in world.log if isinstance(record, SignalRaised)]


def test_each_node_tries_three_others_and_is_tried_by_three() -> None:
    world = training(7)
    by = Counter(other for name in world.nodes for other in tried(world, name))
    assert set(by.values()) == {3} and len(by) == 7
    assert all(name not in tried(world, name) for name in world.nodes)


def test_one_node_more_or_less_moves_a_few_only() -> None:
    names = [f"gpu{number:04}" for number in range(1000)]
    before = reaching.tried(JobState(roster=tuple(names)))
    after = reaching.tried(JobState(roster=tuple(names[1:])))
    assert sum(before[name] != after[name] for name in names[1:]) == 3


def test_on_one_machine_and_with_two_nodes_nobody_is_tried() -> None:
    world = World(4, nproc=1)
    world.turns()
    assert tried(world, "node-0") == []
    assert reaching.tried(JobState()) == {}
    assert tried(training(2), "node-0") == []


def test_a_node_that_is_cut_off_is_one_alert_however_long() -> None:
    world = training()
    cut_off(world, "node-4")
    world.turns(10, 10.0)
    assert raised(world) == [("node-4", "nic_down")]
    first, *_ = views.incidents(world.state)
    assert first["nodes"] == ["node-4"] and "node-4 is cut off: " in first["evidence"][0]
    assert first["evidence"][0].count(" and ") >= 1
    world.take_over()
    world.turns(10, 10.0)
    assert len(raised(world)) == 1


def test_what_the_node_has_told_of_its_own_port_is_the_same_event() -> None:
    world = training()
    world.sense("node-4", "nic_down", "port:eth0:down:1000")
    world.turns()
    cut_off(world, "node-4")
    world.turns(10, 10.0)
    assert raised(world) == [("node-4", "nic_down")]
    assert world.state.nodes["node-4"].state == "active"


def test_several_at_once_have_something_in_common() -> None:
    world = training(9)
    gone = sorted(("node-0", next(name for name in world.nodes if are_apart(world, "node-0", name))))
    cut_off(world, *gone)
    world.turns()
    assert raised(world) == [(node, "switch_down") for node in gone]


def test_one_witness_is_none() -> None:
    world = training()
    cut_off(world, "node-4")
    _, *others = witnesses(world, "node-4")
    for other in others:
        world.nodes[other].unreachable = ()
    world.turns(5, 10.0)
    assert raised(world) == []


def test_a_node_that_reaches_others_is_not_cut_off() -> None:
    world = training()
    cut_off(world, "node-4")
    world.nodes["node-4"].unreachable = world.nodes["node-4"].unreachable[1:]
    world.turns(5, 10.0)
    assert raised(world) == []


def test_a_node_that_is_not_heard_is_lost_or_not_by_other_rules() -> None:
    world = training(config=Config(ladder=LadderConfig()))
    cut_off(world, "node-4")
    world.nodes["node-4"].connected = False
    world.turns(3, 1.0)
    assert raised(world) == []


def test_witnesses_that_are_cut_off_themselves_accuse_nobody() -> None:
    world = training()
    for name, node in world.nodes.items():
        node.unreachable = tuple(tried(world, name))
    world.turns(5, 10.0)
    assert raised(world) == [], "nobody reaches anybody: a switch in the middle, and no node's fault"
