"""Groups of stopped nodes replay the job: the node at which those meet that differ goes, and nobody else does."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.controller import check_views, views
from evertrain.decide import replaying
from evertrain.decide.state import Incident
from evertrain.model import decisions as d
from evertrain.model.config import Config, DiagnoseConfig, LadderConfig
from evertrain.model.records import SignalRaised
from evertrain.model.report import DesiredAttempt, Exit, RankError
from support.world import LOST, World

ODD = {"node-3"}


class Fleet:
    """What ranks give in a replay: other numbers in a group with a node of `odd`, as often as `shows` says."""

    def __init__(self, *odd: str, crash: tuple[str, ...] = (), silent: tuple[str, ...] = ()) -> None:
        self.odd, self.crash, self.silent = odd, crash, silent
        self.asked: list[tuple[str, DesiredAttempt]] = []
        self.world: World | None = None

    def __call__(self, node: str, attempt: DesiredAttempt) -> dict[int, str | Exit]:
        self.asked.append((node, attempt))
        group = self.group_of(node)
        if node in self.silent:
            return {}
        if any(one in self.crash for one in group):
            error = RankError(type="RuntimeError", message="no kernel image\nfor this device", traceback="t.py")
            ended = Exit(status=1, time=0.0, error=error if node in self.crash else LOST.error)
            return dict.fromkeys(attempt.ranks, ended)
        odd = "".join(one for one in group if one in self.odd)
        return {rank: f"{rank} {odd}" for rank in attempt.ranks}

    def group_of(self, node: str) -> tuple[str, ...]:
        assert self.world is not None
        newest = self.world.state.incidents[2].replays[-1].asked
        return next(group.nodes for group in newest.groups if node in group.nodes)


def not_finite(
    fleet: Fleet | None, *, nodes: int = 6, nproc: int = 1, standby: int = 1, mesh: str = "dp=6", **config: Any
) -> World:
    """A job whose loss is not finite for the second time, and that nothing else has helped."""
    settings = Config(diagnose=DiagnoseConfig(**config), ladder=LadderConfig(reattempts=0))
    world = World(nodes + standby, nproc, standby=standby, config=settings, replay=fleet)
    world.mesh = mesh
    if fleet is not None:
        fleet.world = world
    world.turns()
    world.train(5)
    world.turn()
    for attempt in (1, 2):
        what = "loss_not_finite"
        world.write(
            SignalRaised(time=world.now, node="node-0", signal=what, evidence=what, key=f"k{attempt}", attempt=attempt)
        )
        if attempt == 1:
            while len(world.state.attempts) == 1:
                world.turn()
            world.turns()
    return world


def through(world: World) -> float:
    """Until training goes on or has ended; in seconds how long that took."""
    began = world.now
    while len(world.state.attempts) == 2 and world.state.ended is None:
        world.turn(0.5)
        assert world.now - began < 2000, "nobody goes on"
    return world.now - began


def incident(world: World) -> Incident:
    return world.state.incidents[2]


def phases(world: World) -> list[str]:
    return [one.asked.groups[0].phase for one in incident(world).replays]


def answer(world: World) -> d.Answered:
    (found,) = (one.event for one in incident(world).decisions if isinstance(one.event, d.Answered))
    return found


def test_the_node_at_which_groups_meet_that_differ_is_evicted() -> None:
    fleet = Fleet("node-3")
    world = not_finite(fleet)
    assert through(world) < 20
    assert phases(world) == ["horizontal", "vertical", "retest"]
    horizontal = incident(world).replays[0].asked
    assert [group.nodes for group in horizontal.groups] == [
        ("node-0", "node-1"),
        ("node-2", "node-3"),
        ("node-4", "node-5"),
    ]
    assert answer(world).nodes == ("node-3",)
    assert "horizontal group 1 and vertical group 0 differ from 4 others" in answer(world).evidence[0]
    assert world.state.active_nodes() == ("node-0", "node-1", "node-2", "node-6", "node-4", "node-5")
    assert world.state.nodes["node-3"].state == "evicted"
    assert not any(number < 0 for node in world.nodes.values() for number in node.attempts), "nothing is left of it"
    world.take_over()


def test_each_group_is_a_job_of_its_own() -> None:
    fleet = Fleet()
    world = not_finite(fleet, nodes=6, nproc=2, mesh="pp=4,dp=3", replay_steps=2)
    through(world)
    (first, go), (second, other) = [one for one in fleet.asked if one[1].attempt == -1][:2]
    assert (first, second) == ("node-0", "node-1")
    assert go.go is not None and other.go is not None
    assert (go.ranks, other.ranks) == ((0, 1), (2, 3))
    assert (go.store, other.store) == (True, False)
    assert go.go.master_port == other.go.master_port == 28999 and go.go.world_size == 4
    assert (other.go.group_rank, other.go.group_world_size, other.go.local_world_size) == (1, 2, 2)
    settings = incident(world).replays[0].asked.settings
    assert (settings.layers, settings.dp, settings.steps, settings.seed) == (4, 1, 2, 2)
    step = incident(world).opened.step
    assert step is not None and settings.from_step == step - 2
    assert {one.asked.settings for one in incident(world).replays} == {settings}
    assert {attempt.attempt for _, attempt in fleet.asked} == {-1, -2, -3, -4, -5, -6}


@pytest.mark.parametrize(("wanted", "layers"), [("auto", 1), ("all", None), (7, 7)])
def test_how_many_layers_the_model_has(wanted: Any, layers: int | None) -> None:
    world = not_finite(Fleet(), replay_layers=wanted, replay_repeats=1)
    through(world)
    assert incident(world).replays[0].asked.settings.layers == layers


def test_a_fault_of_the_code_shows_everywhere_and_costs_nobody_his_place() -> None:
    world = not_finite(Fleet(*(f"node-{x}" for x in range(6))))
    fleet_nodes = world.state.active_nodes()

    def alike(node: str, attempt: DesiredAttempt) -> dict[int, str | Exit]:
        return {rank: f"nan on {rank}" for rank in attempt.ranks}

    world.replay = alike
    through(world)
    assert phases(world) == ["horizontal", "vertical"] * 3
    assert answer(world).outcome == "clean"
    assert world.state.active_nodes() == fleet_nodes
    actions = incident(world).decisions[-1].actions
    assert [type(action) for action in actions] == [d.Restart, d.AskHuman]
    assert "all groups agree bit by bit in 6 replays" in actions[0].because


def test_who_crashes_gives_no_result_and_is_not_accused_for_it() -> None:
    world = not_finite(Fleet(crash=("node-3",)), replay_repeats=1)
    through(world)
    assert answer(world).nodes == ()
    first = incident(world).replays[0].done
    assert first is not None and first.digests[1] is None
    assert first.because == ("", "rank 1 of the group, on node-3: exit code 1 (RuntimeError: no kernel image)", "")


def test_where_every_group_crashes_the_first_reason_is_told() -> None:
    world = not_finite(Fleet(crash=tuple(f"node-{x}" for x in range(6))), replay_repeats=2)
    through(world)
    assert answer(world).outcome == "not_available"
    assert "replay: rank 0 of the group, on node-0: exit code 1" in incident(world).decisions[-1].because


def test_a_round_and_the_whole_of_it_have_their_limits() -> None:
    world = not_finite(Fleet(silent=("node-1",)), replay_round_s=20.0, replay_budget_s=50.0)
    assert 50 <= through(world) < 60
    first = incident(world).replays[0]
    assert first.done is not None and first.done.because == ("no result within 20 s", "", "")
    assert 20 <= first.done.time - first.asked.time < 25
    assert answer(world).evidence == ("its time was over (50 s)",)


def test_a_controller_that_takes_over_goes_on_in_the_middle() -> None:
    fleet = Fleet("node-3")
    world = not_finite(fleet)
    for _ in range(100):
        world.turn()
        if len(world.state.incidents) > 1 and len(incident(world).replays) == 2:
            break
    world.take_over()
    through(world)
    assert phases(world) == ["horizontal", "vertical", "retest"] and answer(world).nodes == ("node-3",)


def until_replay(world: World) -> None:
    for _ in range(100):
        world.turn()
        if world.state.incidents.keys() >= {2} and any(
            number < 0 for one in world.nodes.values() for number in one.attempts
        ):
            return
    raise AssertionError("nothing is replayed")


def test_a_stop_ends_it_at_once() -> None:
    world = not_finite(Fleet(silent=("node-1",)))
    until_replay(world)
    world.stop()
    world.turns(60, 0.5)
    assert world.state.ended is not None and world.state.ended.state == "stopped"
    assert not any(node.attempts for node in world.nodes.values())


@pytest.mark.parametrize("standby", [0, 1])
def test_a_node_that_is_lost_in_the_middle_ends_it(standby: int) -> None:
    world = not_finite(Fleet(silent=("node-1",)), standby=standby)
    until_replay(world)
    world.lose("node-4")
    began = world.now
    while incident(world).decided is None and world.now - began < 60:
        world.turn(0.5)
    assert world.now - began < 15
    if standby:
        assert world.state.active_nodes()[4] == "node-6"
    else:
        assert answer(world).evidence == ("node-4 cannot be heard",)
    world.turns()
    assert not any(number < 0 for name, one in world.nodes.items() if name != "node-4" for number in one.attempts)


def test_a_group_starts_when_the_one_before_has_left_the_gpus() -> None:
    fleet = Fleet()
    world = not_finite(fleet)
    until_replay(world)
    for node in world.nodes.values():
        node.gpus_held = "a process is still on GPU 0"
    world.turns(20)
    assert not [one for one in fleet.asked if one[1].attempt == -2]
    for node in world.nodes.values():
        node.gpus_held = ""
    world.turns(4)
    assert [one for one in fleet.asked if one[1].attempt == -2]


def test_a_script_that_never_asked_is_not_replayed() -> None:
    world = not_finite(None)
    through(world)
    assert not incident(world).replays
    assert "replay: the script takes no part in replays: see docs/diagnosis.md" in incident(world).decisions[-1].because


def test_replays_can_be_switched_off() -> None:
    world = not_finite(Fleet(), replay=False)
    through(world)
    assert "replay: not available" in incident(world).decisions[-1].because


def test_what_is_shown_of_it() -> None:
    world = not_finite(Fleet("node-3"))
    until_replay(world)
    assert check_views.under_way(world.state) == "the start waits for a replay of the job on groups of its 6 nodes"
    through(world)
    shown = views.incidents(world.state)[1]
    assert shown["action"] == "replay"
    rounds = shown["replay"]["rounds"]
    assert [one["groups"][0]["phase"] for one in rounds] == ["horizontal", "vertical", "retest"]
    odd = [group["nodes"] for group in rounds[0]["groups"] if group["differs"]]
    assert odd == [["node-2", "node-3"]] and rounds[0]["groups"][1]["digest"] != rounds[0]["groups"][0]["digest"]
    assert rounds[0]["seconds"] > 0
    assert shown["replay"]["nodes"] == ["node-3"] and shown["replay"]["confidence"] == 0.95
    assert views.incidents(world.state)[0]["replay"] is None


def test_nothing_is_asked_of_nodes_without_an_incident() -> None:
    world = World(2)
    world.turns()
    assert replaying.parts(world.state, world.picture()) == {}
