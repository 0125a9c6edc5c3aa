"""From the end of an attempt to the next one: who is replaced, what is waited for, and when it counts as mended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evertrain.controller import views
from evertrain.decide import verdicts
from evertrain.model import decisions as d
from evertrain.model.records import Decided, DrainAsked
from evertrain.model.report import Exit
from evertrain.model.spec import Seats
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


def placed(world: World) -> dict[int, str]:
    assert world.state.active is not None
    return world.state.active.started.placement


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


def test_a_standby_that_is_ready_later_takes_over_from_a_lost_node_that_is_waited_for() -> None:
    world = World(3, standby=1)
    world.nodes["node-2"].disk_is_dead = True
    world.turns()
    world.train(6)
    world.turns()
    world.back_up(5)
    world.lose("node-1")
    world.turn()
    world.turn(world.config.machines.broken_s + 1)
    world.turns()
    assert actions(world) == ["restart"] and world.running() == {}
    world.nodes["node-2"].disk_is_dead = False
    world.turn(world.config.ladder.test_every_s)
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2)
    assert placed(world) == {0: "node-0", 1: "node-0", 2: "node-2", 3: "node-2"}
    assert actions(world) == ["evict"] and len(events(world, d.NodeReady)) == 1


def test_one_that_is_lost_after_it_was_decided_to_restart_is_replaced_once() -> None:
    world = training()
    world.back_up(5)
    world.nodes["node-1"].memory_is_tight = True  # so that it has nothing that waits
    world.turns()
    world.fail(0)
    world.turn()
    world.nodes["node-1"].connected = False
    world.lose_keeper("node-1")
    world.turns()
    assert world.state.incident is not None and world.state.incident.decided is not None
    assert world.state.active is None
    world.turn(world.config.machines.broken_s)
    world.turns(12)
    assert world.state.active_nodes() == ("node-0", "node-2")
    assert world.running() == dict.fromkeys(range(4), 2)
    assert sum(one.action == "evict" for one in world.log if isinstance(one, Decided)) == 1
    assert world.state.memory.blocked.keys() == {"node-1"}


def test_its_replacement_may_be_lost_as_well_before_anything_ran() -> None:
    world = World(4, standby=2)
    for node in ("node-1", "node-2"):
        world.turn()
        world.nodes[node].connected = False
        world.lose_keeper(node)
    world.turn()
    world.turn(world.config.machines.broken_s + 1)
    world.turns(12)
    assert world.state.active_nodes() == ("node-0", "node-3")
    assert world.running() == dict.fromkeys(range(4), 1)


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


# -- several machines ------------------------------------------------------------------------------------------------


def machines(*others: str, seats: Seats | None = None, **options: object) -> World:
    world = World(seats=seats or Seats(2, 2), **options)  # type: ignore[arg-type]
    world.turns()
    for other in others or ("second",):
        world.join(other)
    world.turns()
    world.train(6)
    world.turns()
    assert world.running()
    return world


def test_a_start_is_held_until_the_node_that_was_asked_for_has_come_and_taken_over() -> None:
    world = machines()
    world.signal("gpu_lost", "second")
    world.turns()
    world.fail(2)
    world.turns(12)
    assert world.running() == {} and world.state.active is None, "nothing starts on a node that is broken"
    world.join("third")
    world.turns(12)
    assert placed(world) == {0: "node-0", 1: "node-0", 2: "third", 3: "third"}
    assert world.state.active is not None and world.state.active.started.resume == 5
    assert actions(world) == ["evict"] and world.state.nodes["second"].state == "evicted"
    assert len(events(world, d.NodeArrived)) == len(events(world, d.NodeReady)) == 1


def test_a_start_is_held_no_longer_than_that() -> None:
    world = machines()
    world.signal("gpu_lost", "second")
    world.turns()
    world.fail(2)
    world.turns(12)
    world.turn(world.config.ladder.replace_wait_s - 2)
    assert world.running() == {}
    world.turn(2.0)
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2) and placed(world)[2] == "second"
    assert actions(world) == ["human"] and len(events(world, d.NobodyCame)) == 1


def test_the_node_that_was_asked_for_takes_over_while_training_still_goes_on() -> None:
    world = machines()
    world.signal("gpu_lost", "second")
    world.turns()
    world.join("third")
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2) and placed(world)[2] == "third"
    assert actions(world) == ["evict"]


def test_another_machine_takes_the_place_of_one_that_is_lost() -> None:
    world = machines()
    world.back_up(5)
    world.lose("second")
    world.turn()
    world.turn(world.config.machines.broken_s + 1)
    world.turns()
    assert world.state.nodes["second"].state == "lost" and world.running() == {}
    world.join("third")
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2) and placed(world)[2] == "third"
    assert world.state.active is not None and world.state.active.started.resume == 5


def test_a_standby_that_falls_silent_before_it_has_begun_makes_way_for_the_next() -> None:
    world = training(nodes=4, standby=2)
    world.signal("gpu_lost", "node-1")
    world.nodes["node-2"].connected = False
    world.turns()
    assert world.state.active_nodes() == ("node-0", "node-2") and world.state.active is None
    world.turn(world.config.machines.broken_s + 1)
    world.turns(12)
    assert world.state.active_nodes() == ("node-0", "node-3")
    assert world.running() == dict.fromkeys(range(4), 2)
    assert actions(world) == ["evict"], "it belongs to the way back from the first loss"
    assert {node for node, seen in world.state.nodes.items() if seen.state in ("evicted", "lost")} == {
        "node-1",
        "node-2",
    }


def test_a_node_that_falls_silent_after_its_failure_was_decided_about_is_replaced() -> None:
    world = training()
    world.lose_keeper("node-1")
    world.turns()
    world.bring_back("node-1")
    world.turn()
    world.nodes["node-1"].connected = False
    world.turns()
    assert actions(world) == ["restart"] and world.state.active is None
    world.turn(world.config.machines.broken_s + 1)
    world.turns(12)
    assert world.state.active_nodes() == ("node-0", "node-2")
    assert actions(world) == ["evict"], "the strongest of what was done about it"


def test_an_evicted_node_whose_agent_starts_again_is_heard_before_training_goes_on() -> None:
    """What its memory holds may be all that there is."""
    world = training()
    world.signal("gpu_lost", "node-1")
    world.turn()
    world.nodes["node-1"].connected = False
    world.turns()
    assert world.state.nodes["node-1"].state == "evicted" and world.state.active is None
    world.nodes["node-1"].connected = True
    world.turns(12)
    assert world.state.active is not None and world.state.active.started.resume == 5


def test_an_evicted_node_that_stays_silent_is_not_waited_for() -> None:
    world = training()
    world.back_up(4)
    world.turns()
    world.signal("gpu_lost", "node-1")
    world.turn()
    world.nodes["node-1"].connected = False
    world.turns()
    assert world.state.active is None
    world.turn(world.config.machines.broken_s + 1)
    world.turns(12)
    assert world.state.active is not None and world.state.active.started.resume == 4


# -- a controller that takes over ------------------------------------------------------------------------------------


def a_gpu_is_lost() -> World:
    world = training()
    world.signal("gpu_lost", "node-1")
    return world


def a_machine_is_lost() -> World:
    world = training()
    world.back_up(5)
    world.lose("node-1")
    return world


def a_machine_is_lost_and_the_job_gets_smaller() -> World:
    world = training(standby=0, least=2)
    world.store(4)
    world.lose("node-1")
    return world


def it_hangs_beside_a_reading() -> World:
    world = training()
    world.signal("xid_31", "node-1")
    world.turns()
    world.hang(2)
    return world


def a_node_is_drained() -> World:
    world = training()
    world.write(DrainAsked(time=world.now, node="node-1", because="service"))
    return world


def a_node_is_waited_for_and_comes() -> World:
    world = machines()
    world.signal("gpu_lost", "second")
    world.turns()
    world.fail(2)
    world.turn()
    world.join("node-2")
    return world


@pytest.mark.parametrize("turns", [*range(6), *range(9, 14)])
@pytest.mark.parametrize(
    "begin",
    [
        a_gpu_is_lost,
        a_machine_is_lost,
        a_machine_is_lost_and_the_job_gets_smaller,
        it_hangs_beside_a_reading,
        a_node_is_drained,
        a_node_is_waited_for_and_comes,
    ],
)
def test_a_controller_that_takes_over_goes_on_where_the_other_one_was(begin: Callable[[], World], turns: int) -> None:
    world = begin()
    world.turns(turns, 1.0)
    world.take_over()
    world.turns(30, 1.0)
    assert world.state.active_nodes() == ("node-0", "node-2")
    assert world.running() == dict.fromkeys(range(4), 2)
    assert sum(one.action == "evict" for one in world.log if isinstance(one, Decided)) == 1
    assert len(world.state.incidents) == (begin is not a_node_is_drained)
    assert world.state.active is not None and world.state.active.started.resume in (4, 5)


def test_a_lost_node_makes_the_job_smaller_and_the_others_prepare_their_new_numbers() -> None:
    world = a_machine_is_lost_and_the_job_gets_smaller()
    world.turn()
    world.turn(world.config.machines.broken_s + 1)
    assert world.state.active is None, "node-2 has prepared ranks 4 and 5, and they are 2 and 3 now"
    world.turns(4)
    assert placed(world) == {0: "node-0", 1: "node-0", 2: "node-2", 3: "node-2"}
    assert world.running() == dict.fromkeys(range(4), 2)


def test_whoever_is_to_blame_it_is_the_node_with_the_stuck_process_that_goes() -> None:
    world = training()
    world.unkillable = {0}
    hang(world, 2)
    assert world.state.nodes["node-0"].state == "evicted" and world.state.nodes["node-1"].state == "active"
    world.turn(5.1)
    world.turns(12)
    assert world.state.active_nodes() == ("node-2", "node-1")
    assert set(world.running().values()) == {2}


def test_a_process_that_nothing_ends_makes_way_after_a_crash_as_well() -> None:
    world = training()
    world.unkillable = {2}
    world.end(3, Exit(status=-9, time=world.now))
    world.turns(12)
    assert world.state.nodes["node-1"].state == "evicted"
    world.turn(5.1)
    world.turns(12)
    assert world.state.active_nodes() == ("node-0", "node-2") and set(world.running().values()) == {2}


def test_the_platform_is_asked_for_lost_nodes_too_and_by_every_controller_anew() -> None:
    world = machines()
    assert verdicts.nodes_wanted(world.state)[0] == 0
    world.lose("second")
    world.turn()
    world.turn(world.config.machines.broken_s + 1)
    world.turns()
    assert verdicts.nodes_wanted(world.state)[0] == 1 and "second" in verdicts.nodes_wanted(world.state)[1]
    world.take_over()
    assert verdicts.nodes_wanted(world.state)[0] == 1
    world.join("third")
    world.turns(12)
    assert verdicts.nodes_wanted(world.state)[0] == 0
