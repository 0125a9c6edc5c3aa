"""From the end of an attempt to the next one: who is replaced, what is waited for, and when it counts as mended."""

from __future__ import annotations

from evertrain.controller import views
from evertrain.model import decisions as d
from evertrain.model.records import Decided
from support.world import World


def training(nodes: int = 3, standby: int = 1, **options: object) -> World:
    world = World(nodes, standby=standby, **options)  # type: ignore[arg-type]
    world.turns()
    world.train(6)
    world.turns()
    return world


def events(world: World, kind: type[d.Event]) -> list[Decided]:
    return [one for one in world.log if isinstance(one, Decided) and isinstance(one.event, kind)]


def actions(world: World) -> list[str]:
    return [one["action"] for one in views.incidents(world.state)]


def hang(world: World, rank: int) -> None:
    world.hang(rank)
    world.turn(world.config.hang.still_limit_s + 1)
    world.turns(12)


def test_the_first_hang_restarts_and_the_second_at_that_node_evicts() -> None:
    world = training()
    hang(world, 2)
    assert actions(world) == ["restart"] and set(world.state.active_nodes()) == {"node-0", "node-1"}
    world.train(12)
    world.turns()
    hang(world, 3)
    assert actions(world) == ["restart", "evict"]
    assert world.state.active_nodes() == ("node-0", "node-2")
    assert world.running() == dict.fromkeys(range(4), 3)


def test_a_hang_beside_a_reading_evicts_at_once() -> None:
    world = training()
    world.signal("xid_31", "node-1")
    world.turns()
    hang(world, 2)
    assert actions(world) == ["evict"] and world.state.active_nodes() == ("node-0", "node-2")


def test_a_process_that_nothing_ends_makes_way_for_the_standby() -> None:
    world = training()
    world.unkillable = {2}
    hang(world, 2)
    assert world.state.nodes["node-1"].state == "evicted"
    world.turn(5.1)
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2) | {2: 2}
    assert actions(world) == ["evict"]


def test_a_restart_has_proven_itself_ten_steps_past_the_failing_one_and_once() -> None:
    world = training()
    world.fail(2)
    world.turns()
    assert world.state.memory.chain.incidents == (1,)
    world.train(9)
    world.turns()
    assert events(world, d.Proven) == []
    world.train(5)
    world.turns()
    world.train(5)
    world.turns()
    assert len(events(world, d.Proven)) == 1 and world.state.memory.chain.incidents == ()


def test_a_lost_node_is_replaced() -> None:
    world = training()
    world.back_up(5)
    world.lose("node-1")
    world.turn()
    world.turn(world.config.machines.broken_s - 1)
    world.turns()
    assert world.running() == {}
    world.turn(2.0)
    world.turns(12)
    assert world.state.active_nodes() == ("node-0", "node-2")
    assert world.running() == dict.fromkeys(range(4), 2)
    assert actions(world) == ["evict"] and world.state.nodes["node-1"].state == "lost"
    assert world.state.active is not None and world.state.active.started.resume == 5


def test_one_that_is_lost_while_nothing_runs_is_replaced_once() -> None:
    world = World(3, standby=1)
    world.turn()
    world.nodes["node-1"].connected = False
    world.lose_keeper("node-1")
    world.turn()
    assert world.state.active is None
    world.turns(4, 2.0)
    assert world.state.active_nodes() == ("node-0", "node-1")
    world.turns(20)
    world.turn(world.config.machines.broken_s)
    world.turns(12)
    assert world.state.active_nodes() == ("node-0", "node-2")
    assert world.running() == dict.fromkeys(range(4), 1)
    assert sum(one.action == "evict" for one in world.log if isinstance(one, Decided)) == 1


def test_without_a_standby_a_lost_node_is_waited_for_and_then_the_job_ends() -> None:
    world = training(nodes=2, standby=0)
    world.lose("node-1")
    world.turn()
    world.turn(world.config.machines.broken_s + 1)
    world.turns()
    assert world.state.ended is None and world.running() == {}
    world.turn(world.config.restart.node_return_s + 1)
    world.turns()
    assert world.state.ended is not None and "node-1" in world.state.ended.message
