"""A node is lost when it is silent and the ranks that wait for it stand still; silence alone is nothing."""

from __future__ import annotations

from evertrain.model.report import Exit
from support.world import LOST, World

LOST_S = 60.0
BROKEN_S = 10.0


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


# -- with a standby --------------------------------------------------------------------------------------------------


def spared(nodes: int = 3, standby: int = 1) -> World:
    world = World(nodes, standby=standby)
    world.turns()
    world.train(5)
    world.turns()
    world.back_up(4)
    return world


def test_where_connections_have_broken_ten_seconds_are_enough() -> None:
    world = spared()
    world.lose("node-1")
    world.turn()
    world.turn(BROKEN_S - 1)
    assert world.state.nodes["node-1"].state == "active"
    world.turn(1.1)
    assert world.state.nodes["node-1"].state == "lost"
    assert "silent for 10 s, and connections to its ranks have broken" in world.state.nodes["node-1"].because
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2) and world.state.active_nodes() == ("node-0", "node-2")


def test_where_the_others_only_wait_it_takes_a_minute() -> None:
    world = spared()
    world.nodes["node-1"].connected = False
    world.turn()
    world.hang(2)
    world.turn(LOST_S - 1)
    assert world.state.nodes["node-1"].state == "active" and world.state.active_nodes() == ("node-0", "node-1")
    world.turn(2.0)
    world.turns(12)
    assert world.state.active_nodes() == ("node-0", "node-2") and world.state.nodes["node-1"].state == "lost"
    assert world.state.active is not None and world.state.active.started.resume == 4
    assert world.state.active.started.placement[2] == "node-2"
    assert set(world.nodes["node-1"].attempts) >= {1}, "nobody can tell the lost one, and nobody waits for it"


def test_who_cannot_hear_most_nodes_is_cut_off_itself() -> None:
    world = spared(nodes=6, standby=1)
    for node in ("node-1", "node-2", "node-3", "node-5"):
        world.nodes[node].connected = False
    for rank in (0, 1, 8, 9):
        world.end(rank, Exit(status=1, time=world.now, error=LOST.error))
    world.turns(40, 10.0)
    assert not any(seen.state == "lost" for node, seen in world.state.nodes.items() if node != "node-5")
    assert world.state.active_nodes() == tuple(f"node-{index}" for index in range(5))


def test_one_that_comes_back_after_it_was_replaced_ends_what_it_still_runs_and_waits_as_a_standby() -> None:
    world = spared()
    world.nodes["node-1"].connected = False
    world.turn()
    world.hang(2)
    world.turn(LOST_S + 1)
    world.turns(12)
    assert world.state.active_nodes() == ("node-0", "node-2")
    world.nodes["node-1"].connected = True
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2), "nothing of the old attempt is left"
    assert world.state.standbys() == ()
    world.turns(30, world.config.ladder.test_every_s / 2)
    assert world.state.standbys() == ("node-1",)


def test_a_silent_agent_is_not_lost_because_somebody_else_has_failed_and_has_not_been_told_yet() -> None:
    world = running()
    world.nodes["node-1"].connected = False
    world.turn()
    for _ in range(12):
        world.train()
        world.turn(1.0)
    # rank 4 has died; of its followers one is reported before it is
    world.end(0, Exit(status=1, time=world.now + 0.005, error=LOST.error))
    world.turn()
    assert world.state.incident is not None and world.state.nodes["node-1"].state == "active"
