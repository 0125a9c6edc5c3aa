"""Standbys: tested when they come, again while something is wrong with them, and heard before they are counted on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from evertrain.controller import views
from evertrain.decide import standbys
from evertrain.decide.memory import Blocked
from evertrain.decide.picture import Picture
from evertrain.model.config import Config, LadderConfig, MachinesConfig
from evertrain.model.records import NodeChanged
from evertrain.model.report import Check, Exit, Go, NodeReport, SelfCheck
from support.world import World

CONFIG = Config(ladder=LadderConfig(test_every_s=60.0), machines=MachinesConfig(broken_s=10.0))


def world() -> World:
    """Two nodes train, the third one waits."""
    return World(nodes=3, standby=1, config=CONFIG)


def states(world: World, node: str = "node-2") -> list[str]:
    return [record.state for record in world.log if isinstance(record, NodeChanged) and record.node == node]


def asked(world: World, node: str = "node-2") -> int:
    return standbys.check_number(world.state, world.picture(), node, CONFIG, world.now)


def shown(world: World) -> dict[str, str]:
    seen = views.status(world.state, world.picture(), job="job", now=world.now)
    return {node["id"]: node["state"] for node in seen["nodes"]}


def test_a_standby_tests_itself_once_before_it_counts_as_one() -> None:
    job = world()
    job.turn()
    assert states(job) == ["joining"] and asked(job) == 1
    job.turns()
    assert states(job) == ["joining", "standby"]
    assert shown(job) == {"node-0": "active", "node-1": "active", "node-2": "standby"}
    job.turns(20, 60.0)
    order = job.nodes["node-2"].order
    assert order is not None and order.check == 1, "what has been answered is not asked again"
    assert states(job) == ["joining", "standby"]


def test_nodes_in_training_are_asked_nothing() -> None:
    job = world()
    job.turns()
    orders = [node.order for node in job.nodes.values() if node.order is not None]
    assert [(order.check, bool(order.reach)) for order in orders] == [(0, False), (0, False), (1, True)]


def test_a_standby_that_fails_is_unusable_says_why_and_is_tested_again_until_it_passes() -> None:
    job = world()
    job.nodes["node-2"].disk_is_dead = True
    job.turns()
    assert states(job) == ["joining", "unusable"]
    status = views.status(job.state, job.picture(), job="job", now=job.now)
    assert status["message"] == "node-2 is no standby: its self-check has failed: disk: read-only"
    numbers = []
    for _ in range(6):
        job.turn(30.0)
        job.turn()
        assert job.nodes["node-2"].self_check is not None
        numbers.append(job.nodes["node-2"].self_check.number)
    assert numbers == [1, 2, 2, 3, 3, 4], "once in every period"
    assert states(job) == ["joining", "unusable"]
    job.nodes["node-2"].disk_is_dead = False
    job.turns(2, 60.0)
    job.turns()
    assert states(job) == ["joining", "unusable", "standby"]


def test_a_silent_standby_is_lost_after_a_while_and_is_tested_again_when_it_is_back() -> None:
    job = world()
    job.turns()
    job.nodes["node-2"].connected = False
    job.turns(2, 4.0)
    assert states(job)[-1] == "standby"
    job.turns(2, 4.0)
    assert states(job)[-1] == "lost" and shown(job)["node-2"] == "lost"
    job.turn(60.0)
    job.nodes["node-2"].connected = True
    job.turn()
    assert states(job)[-1] == "joining", "it was tested before it went"
    job.turns()
    assert states(job)[-1] == "standby"
    assert job.nodes["node-2"].self_check is not None and job.nodes["node-2"].self_check.number == 2


def test_a_standby_that_has_never_been_heard_is_not_lost() -> None:
    job = world()
    job.nodes["node-2"].connected = False
    job.turns(5, 60.0)
    assert states(job) == [] and shown(job)["node-2"] == "joining"


def test_after_a_takeover_the_standby_that_stays_silent_is_lost() -> None:
    job = world()
    job.turns()
    job.nodes["node-2"].connected = False
    job.take_over()
    job.turn(9.0)
    assert states(job)[-1] == "standby"
    job.turn(2.0)
    assert states(job)[-1] == "lost"


def test_an_agent_that_was_started_again_is_asked_again_and_stays_a_standby_meanwhile() -> None:
    job = world()
    job.turns()
    job.nodes["node-2"].self_check = None
    assert asked(job) == 1
    job.turns()
    assert states(job) == ["joining", "standby"]


@pytest.mark.parametrize(("later_s", "number"), [(0.0, 0), (59.0, 0), (60.0, 2), (119.0, 2), (120.0, 3)])
def test_an_evicted_node_is_tested_in_every_period_after_its_eviction(later_s: float, number: int) -> None:
    job = world()
    job.turns()
    evicted = Blocked(since=job.now, because="Xid 79", is_certain=False)
    memory = replace(job.state.memory, blocked={"node-2": evicted})
    job.state = replace(job.state, roster=("node-0", "node-1"), standby=0, memory=memory)
    start = job.run.time
    job.now = start + later_s
    assert asked(job) == number
    # what it found out as a standby does not speak for it now
    assert standbys.verdict(job.picture().report("node-2"), asked(job)) is None
    assert {peer.node for peer in standbys.reach(job.state, job.picture(), "node-2")} == {"node-0", "node-1"}
    job.nodes["node-2"].connected = False
    assert asked(job) == 0


def test_a_verdict_is_the_answer_to_what_was_asked() -> None:
    answer = SelfCheck(number=3, checks=(Check(name="cpu", passed=True),))
    report = NodeReport(node="n", self_check=answer)
    assert standbys.verdict(report, 3) == answer
    assert standbys.verdict(report, 4) is None
    assert standbys.verdict(NodeReport(node="n"), 1) is None
    assert standbys.verdict(NodeReport(node="n"), 0) is None
    assert standbys.verdict(None, 1) is None


def test_of_many_nodes_some_from_all_over_are_to_be_reached() -> None:
    job = World(nodes=41, standby=1, config=CONFIG)
    job.turns(3)
    peers = [peer.node for peer in standbys.reach(job.state, job.picture(), "node-40")]
    assert peers == [f"node-{number}" for number in range(0, 40, 5)]
    assert standbys.reach(job.state, Picture(), "node-40") == ()


def test_a_process_that_nothing_ends_makes_a_node_unusable_whatever_it_says_of_itself() -> None:
    job = world()
    job.turns()
    job.unkillable = {2}
    job.end(0, Exit(status=-9, time=job.now))
    job.turns()
    assert states(job, "node-1")[-1] == "unusable"
    assert job.state.nodes["node-1"].state == "evicted", "a standby is there to take its place"


def test_ranks_of_a_fit_standby_run_ahead_once_training_has_begun_where_the_user_wants_it() -> None:
    job = world()
    job.spec = replace(job.spec, standby_barrier="init")
    job.turns()

    def early(node: str = "node-2") -> Go | None:
        order = job.nodes[node].order
        assert order is not None
        return order.early

    job.turns()
    job.train()
    job.turns()
    assert early("node-0") is None
    wanted = early()
    assert wanted is not None
    assert [order.local_rank for order in wanted.ranks] == [0, 1] and wanted.local_world_size == 2
    # what waits is needed most just now
    job.fail(0)
    job.turn()
    assert early() == wanted
    job.turns()
    job.nodes["node-2"].memory_is_tight = True
    job.turns(2)
    assert early() is None
    job.nodes["node-2"].memory_is_tight = False
    job.turns(2)
    assert early() == wanted
    job.spec = replace(job.spec, standby_barrier="start")
    job.turns(2)
    assert early() is None


def test_a_standby_that_is_not_fit_has_nothing_run_ahead() -> None:
    job = world()
    job.spec = replace(job.spec, standby_barrier="init")
    job.nodes["node-2"].disk_is_dead = True
    job.turns()
    job.train()
    job.turns()
    order = job.nodes["node-2"].order
    assert order is not None and order.early is None


def test_what_is_odd_about_a_standby_is_said_and_fails_nothing() -> None:
    job = world()
    job.turn()
    odd = Check(name="gpu", passed=True, is_odd=True, detail="gpu: GPU 3: 92 C")
    job.nodes["node-2"].self_check = SelfCheck(number=1, checks=(Check(name="disk", passed=True), odd))
    job.turns()
    assert states(job) == ["joining", "standby"]
    assert job.state.nodes["node-2"].because == "its self-check has passed; yet gpu: gpu: GPU 3: 92 C"


def test_a_test_of_the_machine_alone_makes_no_standby() -> None:
    job = world()
    job.nodes["node-2"].self_check = SelfCheck(number=-1, checks=())
    job.turn()
    assert states(job) == ["joining"] and asked(job) == 1
    job.turns()
    assert states(job) == ["joining", "standby"]
