"""A node is lost when it is silent and the ranks that wait for it stand still; silence alone is nothing."""

from __future__ import annotations

from support.world import World

LOST_S = 60.0


def running() -> World:
    world = World(nodes=3, nproc=2)
    world.turns()
    world.train(5)
    world.turns()
    return world


def test_a_silent_node_whose_peers_train_is_left_alone() -> None:
    world = running()
    world.nodes["node-1"].connected = False
    world.turn()
    for _ in range(200):
        world.train()
        world.turn(1.0)
    assert world.state.incident is None
    assert world.state.nodes["node-1"].state == "active"
    assert world.state.active is not None and world.state.active.number == 1


def test_peers_that_stall_make_it_lost_and_the_job_waits_for_it() -> None:
    world = running()
    world.nodes["node-1"].connected = False
    world.turn()
    world.hang(2)
    world.turn(LOST_S - 1)
    assert world.state.nodes["node-1"].state == "active"
    world.turn(2.0)
    assert world.state.nodes["node-1"].state == "lost"
    (incident,) = world.state.incidents.values()
    assert (incident.opened.cause, incident.opened.nodes) == ("node lost", ("node-1",))
    assert "silent for 61 s" in incident.opened.evidence[0]
    world.turns()
    assert world.state.active is None  # nothing starts without it
    world.nodes["node-1"].attempts.clear()
    world.nodes["node-1"].connected = True
    world.turns()
    assert world.state.nodes["node-1"].state == "active"
    assert world.state.active is not None and world.state.active.number == 2


def test_a_node_that_stays_away_ends_the_job_and_memory_goes_to_disk() -> None:
    world = running()
    world.nodes["node-1"].connected = False
    world.turn()
    world.hang(2)
    world.turn(LOST_S + 1)
    world.turns()
    world.turn(world.config.restart.node_return_s + 1)
    assert world.state.ended is not None
    assert "node-1: no word from its agent" in world.state.ended.message
    world.turn()
    order = world.nodes["node-0"].order
    assert order is not None and order.shutdown and order.keep_all


def test_ranks_that_lost_their_connection_to_it_are_no_culprits() -> None:
    world = running()
    world.nodes["node-1"].connected = False
    world.turn()
    world.fail(2)
    world.turns()
    assert world.state.active is not None  # the ends of node-1 are not known
    world.turn(LOST_S + 1)
    world.turns()
    (incident,) = world.state.incidents.values()
    assert (incident.opened.cause, incident.opened.nodes) == ("node lost", ("node-1",))
