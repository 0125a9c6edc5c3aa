"""From a sign of trouble to training without the node, in virtual time: who is evicted, and from where it goes on."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from evertrain.controller import views
from evertrain.decide import applying, ladder
from evertrain.model.config import Config, LadderConfig
from evertrain.model.records import AllowAsked, DrainAsked, JobEnded, PolicyAdopted, RestartRequested, SignalRaised
from evertrain.model.report import Exit
from evertrain.model.spec import Seats
from support.world import World


def training(nodes: int = 3, standby: int = 1, **options: object) -> World:
    """Two ranks on each active node, at step 5."""
    world = World(nodes, standby=standby, **options)  # type: ignore[arg-type]
    world.turns()
    world.train(6)
    world.turns()
    assert [world.state.nodes[node].state for node in world.state.standbys()] == ["standby"] * standby
    return world


def newest(world: World) -> dict[str, object]:
    return views.incidents(world.state)[-1]


def placed(world: World) -> dict[int, str]:
    assert world.state.active is not None
    return world.state.active.started.placement


def test_a_certain_fault_evicts_at_once_and_training_goes_on_where_it_was() -> None:
    world = training()
    world.signal("gpu_lost", "node-1")
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2)
    assert placed(world) == {0: "node-0", 1: "node-0", 2: "node-2", 3: "node-2"}
    assert world.state.active is not None and world.state.active.started.resume == 5
    assert (newest(world)["action"], newest(world)["nodes"]) == ("evict", ["node-1"])
    assert world.state.nodes["node-1"].state == "evicted"


def test_without_a_word_from_the_evicted_node_its_ranks_go_on_from_what_others_keep() -> None:
    world = training()
    world.back_up(3)
    world.nodes["node-1"].memory = []
    world.signal("gpu_lost", "node-1")
    world.nodes["node-1"].connected = False
    for node in world.nodes.values():
        node.memory = [*node.memory, *(world._copy(rank, 3, 1) for rank in (0, 1) if node.name == "node-0")]
    world.turns()
    # its agent may be starting again
    world.turn(world.config.machines.broken_s + 1)
    world.turns(12)
    assert world.state.active is not None and world.state.active.started.resume == 3


def test_nothing_is_ever_begun_anew_without_a_word() -> None:
    world = training()
    world.nodes["node-1"].memory = []
    world.signal("gpu_lost", "node-1")
    world.turns(12)
    assert world.state.active is not None and world.state.active.started.resume is None
    (said,) = world.state.active.started.passed_over
    assert "started again from nothing after step 5" in said


def test_ranks_of_an_evicted_node_that_is_not_heard_are_written_off_at_once() -> None:
    world = training()
    world.back_up(5)
    world.signal("gpu_lost", "node-1")
    world.nodes["node-1"].connected = False
    began = world.now
    world.turns(4)
    assert world.running() == {0: 2, 1: 2, 2: 2, 3: 2} and world.now - began < 1.0
    assert world.state.active is not None and world.state.active.started.resume == 5


def test_ranks_of_an_evicted_node_that_do_not_end_are_written_off() -> None:
    world = training()
    world.unkillable = {2, 3}
    world.signal("gpu_lost", "node-1")
    world.turns()
    assert world.state.attempt is not None and world.state.attempt.alive() == (2, 3)
    world.turn(4.0)
    assert world.state.attempt.ended is None, "they may end yet"
    world.turn(1.1)
    world.turns()
    assert world.running() == dict.fromkeys(range(4), 2)
    assert "node-1" not in placed(world).values()


@pytest.mark.parametrize("turns", range(5))
def test_one_alert_is_told_and_leaves_an_incident_that_is_open_alone(turns: int) -> None:
    calm, world = training(), training()
    for job in (calm, world):
        job.end(0, Exit(status=-9, time=job.now))
        job.turn()
        assert job.state.incident is not None and job.state.incident.decided is None
        job.turns(turns)
    world.signal("network_alert", "node-1")
    for job in (calm, world):
        job.turns(12)
        job.train(3)
        job.turns()
    assert newest(world)["action"] == "tolerate" and not newest(world)["open"]
    assert views.incidents(world.state)[0] == newest(calm), "as if nothing had been seen"
    assert world.running() == calm.running() == dict.fromkeys(range(4), 2)


@pytest.mark.parametrize("turns", range(5))
def test_a_certain_fault_of_another_node_evicts_it_in_the_middle_of_a_recovery_too(turns: int) -> None:
    world = training()
    world.end(0, Exit(status=-9, time=world.now))
    world.turns(1 + turns)
    world.signal("gpu_lost", "node-1")
    world.turns(12)
    assert placed(world) == {0: "node-0", 1: "node-0", 2: "node-2", 3: "node-2"}
    assert len(world.running()) == 4 and newest(world)["action"] == "evict"
    assert world.state.active is not None and world.state.active.started.resume == 5


def test_the_second_alert_evicts_with_both_as_evidence() -> None:
    world = training()
    world.signal("link_flap", "node-1")
    world.turns()
    world.turn(200)
    world.signal("nic_down", "node-1")
    world.turns(12)
    assert newest(world)["action"] == "evict" and len(newest(world)["evidence"]) == 2  # type: ignore[arg-type]
    assert "node-1" not in placed(world).values()


def test_a_reading_and_blindness_are_written_down_and_are_no_incident() -> None:
    world = training()
    world.signal("xid_13", "node-1")
    world.signal("blind_nvml", "node-1")
    world.turns()
    assert world.state.incidents == {} and world.state.signals == ()
    assert list(world.state.memory.readings) == ["node-1"]


def test_a_fault_of_the_standby_does_not_touch_training() -> None:
    world = training()
    world.signal("disk_fault", "node-2")
    world.turns()
    assert world.running() == dict.fromkeys(range(4), 1)
    assert world.state.nodes["node-2"].state == "evicted" and world.state.standby == 0


def test_a_node_that_had_to_stay_goes_as_soon_as_a_standby_is_ready() -> None:
    world = training(standby=1)
    world.nodes["node-2"].disk_is_dead = True
    world.signal("gpu_lost", "node-2")
    world.turns()
    assert world.state.standby == 0
    world.signal("gpu_lost", "node-1")
    world.turns()
    assert newest(world)["action"] == "human" and set(world.running().values()) == {1}
    world.write(AllowAsked(time=world.now, node="node-2", because="repaired"))
    world.nodes["node-2"].disk_is_dead = False
    world.turns(16)
    assert newest(world)["action"] == "evict" and newest(world)["nodes"] == ["node-1"]
    assert placed(world)[2] == "node-2" and world.running() == dict.fromkeys(range(4), 2)


def test_an_evicted_node_returns_by_its_test_when_it_was_quiet() -> None:
    world = training(config=Config(ladder=LadderConfig(quiet_s=100.0, test_every_s=20.0)))
    for _ in range(2):
        world.signal("network_alert", "node-1")
        world.turns()
    world.turns(12)
    assert world.state.nodes["node-1"].state == "evicted"
    world.turns(18, 5.0)
    assert world.state.nodes["node-1"].state == "evicted", "not quiet for long enough"
    world.turns(12, 5.0)
    assert world.state.nodes["node-1"].state == "standby"
    assert world.state.standbys() == ("node-1",)


def test_a_certain_fault_returns_by_the_user_only() -> None:
    world = training()
    world.signal("gpu_lost", "node-1")
    for _ in range(40):
        world.turn(60.0)
    assert world.state.nodes["node-1"].state == "evicted"
    world.write(AllowAsked(time=world.now, node="node-1", because="the GPU was changed"))
    world.turns()
    assert world.state.standbys() == ("node-1",) and world.state.nodes["node-1"].state == "standby"


def test_a_drain_is_no_incident_and_uses_no_restart_up() -> None:
    world = training(max_restarts=0)
    world.write(DrainAsked(time=world.now, node="node-0", because="a new disk"))
    world.turns(12)
    assert set(placed(world).values()) == {"node-2", "node-1"}
    assert placed(world)[0] == "node-2", "it has taken over the ranks"
    assert world.state.incidents == {} and world.state.restarts_used == 0
    assert world.running() == dict.fromkeys(range(4), 2)


def test_with_a_range_the_job_goes_on_smaller_and_grows_at_the_next_start() -> None:
    world = training(nodes=3, standby=0, least=2)
    world.store(4)
    world.signal("gpu_lost", "node-1")
    world.turns(12)
    assert newest(world)["action"] == "evict"
    assert placed(world) == {0: "node-0", 1: "node-0", 2: "node-2", 3: "node-2"}
    assert world.state.active is not None and world.state.active.started.resume == 4, "from the store only"
    world.write(AllowAsked(time=world.now, node="node-1", because="repaired"))
    world.train(4)
    world.turns()
    assert world.state.standbys() == ("node-1",) and len(placed(world)) == 4, "nothing is restarted for it"
    world.store(8)
    world.fail(0)
    world.turns(12)
    assert placed(world) == {0: "node-0", 1: "node-0", 2: "node-2", 3: "node-2", 4: "node-1", 5: "node-1"}
    assert world.running() == dict.fromkeys(range(6), 3)
    assert world.state.active.started.resume == 8


@pytest.mark.parametrize(("least", "is_stored"), [(None, True), (3, True), (2, False)])
def test_it_never_gets_smaller_than_it_may_nor_without_a_shared_store(least: int | None, is_stored: bool) -> None:
    world = training(nodes=3, standby=0, least=least)
    if is_stored:
        world.store(4)
    world.signal("gpu_lost", "node-1")
    world.turns(12)
    assert newest(world)["action"] == "human" and world.running() == dict.fromkeys(range(6), 1)


@pytest.mark.parametrize("turns", range(1, 7))
def test_a_controller_that_takes_over_finishes_what_was_begun(turns: int) -> None:
    world = training()
    world.signal("gpu_lost", "node-1")
    world.turns(turns)
    world.take_over()
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2)
    assert world.state.active is not None and world.state.active.started.resume == 5
    assert [one["action"] for one in views.incidents(world.state)] == ["evict"]


def test_several_machines_wait_for_a_node_while_training_goes_on() -> None:
    world = World(seats=Seats(2, 2))
    world.turns()
    world.join("second")
    world.turns()
    world.train(6)
    world.turns()
    world.signal("gpu_lost", "second")
    world.turns()
    assert set(world.running().values()) == {1}, "as long as it can"
    incident = world.state.incident
    assert incident is not None and incident.decided is None
    world.turn(world.config.ladder.replace_wait_s + 1)
    world.turns()
    assert set(world.running().values()) == {1} and world.state.incident is None
    assert newest(world)["action"] == "human" and not newest(world)["open"]


def test_a_restart_that_the_user_asks_for_is_none_of_this() -> None:
    world = training()
    world.write(RestartRequested(time=world.now, restart="r", attempt=1))
    world.turns()
    assert world.running() == dict.fromkeys(range(4), 2)
    assert placed(world)[2] == "node-1"


def test_alerts_of_days_ago_cost_a_node_nothing_when_a_standby_comes() -> None:
    world = training()
    world.signal("gpu_lost", "node-2")
    for _ in range(2):
        world.signal("link_flap", "node-1")
    world.turns()
    assert newest(world)["action"] == "human"
    world.turn(1000.0)
    world.write(AllowAsked(time=world.now, node="node-2", because="repaired"))
    world.turns(16)
    assert world.state.nodes["node-2"].state == "standby"
    assert set(world.running().values()) == {1}, "what healed by itself is no fault"


def test_a_sensor_that_says_the_same_again_and_again_is_one_incident_and_the_cry_stays() -> None:
    world = training(nodes=2, standby=0)
    for _ in range(20):
        world.signal("gpu_lost", "node-1")
        world.turns()
    assert len(world.state.incidents) == 1
    assert "a human is needed" in views.status(world.state, world.picture(), job="job", now=world.now)["message"]


def test_a_second_broken_node_joins_the_wait_for_the_first() -> None:
    world = World(seats=Seats(3, 3))
    world.turns()
    for host in ("second", "third"):
        world.join(host)
        world.turns()
    world.train(6)
    world.turns()
    world.config = Config(ladder=LadderConfig(budget_nodes=2))
    policy = ladder.policy_of(world.config)
    world.write(PolicyAdopted(time=world.now, hash=ladder.policy_hash(policy), policy=policy))
    for node in ("second", "third"):
        world.signal("gpu_lost", node)
        world.turns()
    assert len(world.state.incidents) == 1 and world.state.waiting is not None
    assert world.state.waiting.wait is not None and world.state.waiting.wait.instead_of == ("second", "third")
    world.hang(0, cpu_fraction=1.0)
    world.turn(world.config.hang.still_limit_s + 1)
    world.turns()
    assert world.state.waiting is not None, "who is only named disturbs no wait"
    world.wake()
    for host in ("fourth", "fifth"):
        world.join(host)
        world.turns(4)
    world.turns(12)
    assert set(world.state.active_nodes()) == {world.run.nodes[0], "fourth", "fifth"}


# -- what the sensors of a node report ---------------------------------------------------------------------------------


def raised(world: World) -> list[tuple[str, str]]:
    return [(record.node, record.key) for record in world.log if isinstance(record, SignalRaised)]


def test_a_sign_in_a_report_is_told_once_and_acted_upon() -> None:
    world = training()
    world.sense("node-1", "gpu_lost", "gpu:GPU-1:lost")
    world.turns(12)
    assert raised(world) == [("node-1", "gpu:GPU-1:lost")]
    assert world.state.nodes["node-1"].state == "evicted"
    assert newest(world)["evidence"] == ["node-1: gpu_lost on node-1, seen at 1001"]
    assert world.running() == dict.fromkeys(range(4), 2)


def test_a_sign_that_holds_is_one_alert_however_long_and_whoever_serves_the_job() -> None:
    world = training()
    world.sense("node-1", "nic_down", "port:eth0:down:1001")
    world.turns(8, 20.0)
    world.take_over()
    world.turns(8, 20.0)
    assert raised(world) == [("node-1", "port:eth0:down:1001")]
    assert world.state.nodes["node-1"].state == "active" and len(views.incidents(world.state)) == 1
    world.sense("node-1", "nic_down", "port:eth0:down:1400")
    world.turns()
    assert len(raised(world)) == 2, "another event is another sign"


def test_two_events_within_the_window_evict() -> None:
    world = training()
    for number in range(2):
        world.sense("node-1", "link_flap", f"port:eth0:flap:{number}")
        world.turn()
        world.turn(90.0)
    world.turns(12)
    assert newest(world)["action"] == "evict" and world.state.nodes["node-1"].state == "evicted"


def test_one_cable_that_several_sensors_see_as_several_ports_is_one_alert() -> None:
    world = training()
    world.sense("node-1", "nic_down", "port:eth0:down:1")
    world.sense("node-1", "nic_down", "port:eth0.100:down:1")
    world.turns(4, 5.0)
    world.sense("node-1", "link_flap", "kernel:boot:17")
    world.turns(10)
    assert len(raised(world)) == 3 and len(views.incidents(world.state)) == 1
    assert world.state.nodes["node-1"].state == "active"
    assert len(world.state.memory.readings["node-1"]) == 2, "what all of them saw is evidence"


def test_signs_of_several_nodes_are_told_oldest_first() -> None:
    world = training()
    world.sense("node-0", "odd", "b", time=999.0)
    world.sense("node-2", "odd", "a", time=998.0)
    world.sense("node-0", "odd", "c", time=990.0)
    world.sense("node-1", "odd", "a", time=999.0)
    world.turns()
    assert raised(world) == [("node-0", "c"), ("node-2", "a"), ("node-0", "b"), ("node-1", "a")]


def test_what_is_known_of_signs_is_bounded_and_nothing_is_told_over_and_over() -> None:
    world = training()
    for number in range(2000):
        world.sense("node-1", "odd", f"kernel:boot:{number}", time=float(number))
    world.turns()
    assert len(raised(world)) == 128, "the newest of what one report holds"
    assert raised(world)[-1] == ("node-1", "kernel:boot:1999")
    for batch in range(5):
        world.nodes["node-1"].signs = ()
        for number in range(128):
            world.sense("node-1", "odd", f"kernel:boot {batch}:{number}")
        world.turns(2)
    assert len(raised(world)) == 128 * 6
    assert len(world.state.known_signs["node-1"]) == 512


def test_signs_of_more_nodes_than_are_remembered_are_not_told_over_and_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applying, "MOST_NODES", 2)
    world = training(nodes=4)
    for node in world.nodes:
        world.sense(node, "odd", "host:memory")
    world.turns(4)
    world.write(SignalRaised(time=world.now, node="gone", signal="odd", evidence="odd", key="a"))
    world.turns(4)
    assert sorted(raised(world)) == [("gone", "a"), *((node, "host:memory") for node in world.nodes)]
    world.write(SignalRaised(time=world.now, node="gone too", signal="odd", evidence="odd", key="a"))
    assert "gone" not in world.state.known_signs, "it is bounded all the same"


def test_a_blind_sensor_and_a_reading_evict_nobody() -> None:
    world = training()
    for number in range(5):
        world.sense("node-1", "blind_gpu", f"gpu:blind:{number}")
        world.sense("node-1", "disk_errors", f"host:sda:{number}")
        world.turn(5.0)
    world.turns()
    assert world.running() == {0: 1, 1: 1, 2: 1, 3: 1} and views.incidents(world.state) == []
    assert [one.evidence for one in world.state.memory.readings["node-1"]] == [
        f"disk_errors on node-1, seen at {at}" for at in (1001, 1006, 1011, 1016, 1021)
    ]


def test_a_node_whose_sign_still_holds_does_not_come_back() -> None:
    world = training(config=Config(ladder=LadderConfig(quiet_s=100.0, test_every_s=20.0)))
    for number in range(2):
        world.sense("node-1", "nic_down", f"port:eth0:down:{number}")
        world.turn()
        world.turn(90.0)
    world.turns(12)
    assert world.state.nodes["node-1"].state == "evicted"
    world.turns(40, 5.0)
    assert world.state.nodes["node-1"].state == "evicted", "the port is still down"
    world.nodes["node-1"].signs = ()
    world.turns(8, 5.0)
    assert world.state.nodes["node-1"].state == "standby"


def test_a_sign_of_an_evicted_node_counts_against_its_return() -> None:
    world = training(config=Config(ladder=LadderConfig(quiet_s=100.0, test_every_s=20.0)))
    for number in range(2):
        world.sense("node-1", "link_flap", f"port:eth0:flap:{number}")
        world.turn()
        world.turn(90.0)
    world.turns(12)
    assert world.state.nodes["node-1"].state == "evicted"
    world.turns(16, 5.0)
    world.sense("node-1", "link_flap", "port:eth0:flap:2")
    world.turns(2)
    world.nodes["node-1"].signs = ()
    world.turns(18, 5.0)
    assert world.state.nodes["node-1"].state == "evicted", "not quiet for long enough"
    world.turns(12, 5.0)
    assert world.state.nodes["node-1"].state == "standby"


def ended_with_signs(*, undecided: bool = False) -> World:
    """A job that has ended, in which node-1 had reported something."""
    world = training()
    world.sense("node-1", "odd", "a")
    world.turns()
    if undecided:
        world.write(SignalRaised(time=world.now, node="node-1", signal="odd", evidence="odd", key="b"))
    for rank in world.running():
        world.end(rank, Exit(status=0, time=world.now))
    world.write(JobEnded(time=world.now, state="stopped", exit_code=1, message="stopped"))
    return world


def test_the_next_run_is_told_only_what_is_new() -> None:
    world = ended_with_signs()
    world.run_again()
    world.sense("node-1", "odd", "a")
    world.sense("node-1", "odd", "c")
    for node in world.nodes.values():
        node.connected = True
    world.turns()
    assert raised(world) == [("node-1", "a"), ("node-1", "c")]


def test_a_sign_that_nothing_was_decided_about_is_told_again_in_the_next_run() -> None:
    world = ended_with_signs(undecided=True)
    world.run_again()
    world.sense("node-1", "odd", "b")
    for node in world.nodes.values():
        node.connected = True
    world.turns()
    assert raised(world) == [("node-1", "a"), ("node-1", "b"), ("node-1", "b")]


def test_a_fresh_life_forgets_signs_as_it_forgets_all_else() -> None:
    world = ended_with_signs()
    world.run_again()
    world.write(replace(world.run, time=world.now, fresh=True, forgets=True))
    world.sense("node-1", "odd", "a")
    for node in world.nodes.values():
        node.connected = True
    world.turns()
    assert raised(world) == [("node-1", "a"), ("node-1", "a")]


# -- what training reports ---------------------------------------------------------------------------------------------


def odd(world: World, kind: str, node: str = "node-0", attempt: int = 1) -> None:
    world.write(
        SignalRaised(time=world.now, node=node, signal=kind, evidence=f"{kind} in step 5", key="k", attempt=attempt)
    )


def test_numbers_that_are_none_end_the_attempt_once_and_accuse_nobody() -> None:
    world = World()
    world.turns()
    world.train(5)
    odd(world, "loss_not_finite")
    odd(world, "loss_not_finite", "node-1")
    world.turns()
    assert set(world.running().values()) == {2}, "all ranks again, where they are"
    (incident,) = world.state.incidents.values()
    assert (incident.opened.source, incident.opened.category, incident.opened.nodes) == ("metrics", "numerics", ())
    assert incident.opened.evidence == ("node-0: loss_not_finite in step 5",)
    assert not world.state.memory.readings, "it is no evidence against hardware"
    odd(world, "loss_not_finite", attempt=1)
    world.turns()
    assert set(world.running().values()) == {2}, "what comes late is about an attempt that is over"


def test_all_else_is_told_once_an_attempt_and_changes_nothing() -> None:
    world = World()
    world.turns()
    world.train(5)
    for node in ("node-0", "node-1"):
        odd(world, "slow", node)
    odd(world, "loss_jump")
    world.turns()
    assert set(world.running().values()) == {1}
    assert [one.opened.cause for one in world.state.incidents.values()] == ["slow", "loss jump"]
    assert all(one.closed is not None for one in world.state.incidents.values())
    assert not world.state.memory.readings


def test_where_nothing_would_start_again_numbers_that_are_none_end_nothing() -> None:
    world = World(max_restarts=1)
    world.turns()
    world.train(5)
    odd(world, "loss_not_finite")
    world.turns()
    assert set(world.running().values()) == {2}
    world.train(5)
    odd(world, "loss_not_finite", attempt=2)
    world.turns()
    assert set(world.running().values()) == {2} and world.state.ended is None
    assert [one.opened.tolerated for one in world.state.incidents.values()] == [False, True]


def test_with_observe_only_training_goes_on_with_numbers_that_are_none() -> None:
    world = World(observe_only=True)
    world.turns()
    world.train(5)
    odd(world, "loss_not_finite")
    world.turns()
    assert set(world.running().values()) == {1}
    assert [one.opened.tolerated for one in world.state.incidents.values()] == [True]


def test_numbers_that_come_back_at_the_same_step_end_nothing_any_more() -> None:
    """A script that leaves such steps out by itself must not be restarted for ever, and not be ended."""
    world = World()
    world.turns()
    world.train(5)
    for attempt in (1, 2, 3):
        odd(world, "loss_not_finite", attempt=attempt)
        world.turns()
        assert set(world.running().values()) == {attempt + 1}
        world.train()
    odd(world, "loss_not_finite", attempt=4)
    world.turns()
    assert set(world.running().values()) == {4} and world.state.ended is None
    world.train(10)
    world.turn()
    odd(world, "loss_not_finite", attempt=4)
    world.turns()
    assert set(world.running().values()) == {4}, "told once an attempt"
