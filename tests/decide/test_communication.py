"""Collectives that are stuck or slow: one incident an episode, nobody healthy is ended, and hangs learn who it is."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from evertrain.controller import views
from evertrain.decide.communication import next_look
from evertrain.model.collective_records import CauseFound, CollectivesOdd, CollectivesWell
from evertrain.model.collectives import Component, RootCause, Symptom
from evertrain.model.records import IncidentClosed, IncidentCorrected, IncidentOpened
from evertrain.model.stacks import Located
from support.world import ALLREDUCE, World, training


def odd(world: World, symptom: Symptom = "stuck", episode: int = 1) -> None:
    world.write(
        CollectivesOdd(
            time=world.now, attempt=world.state.attempts[-1].number, episode=episode, symptom=symptom,
            seen_by="trigger", for_s=2.5, evidence="rank 0 waits",
        )
    )  # fmt: skip


def found(world: World, component: Component = "host", ranks: tuple[int, ...] = (2,), **more: Any) -> None:
    nodes = tuple(dict.fromkeys(f"node-{rank // 2}" for rank in ranks))
    cause = RootCause(
        **{
            "symptom": "stuck", "component": component, "ranks": ranks, "nodes": nodes, "confidence": 0.9,
            "evidence": ("it shows",), "time": world.now - 4.0, **more,
        }
    )  # fmt: skip
    episode = world.state.communication.odd.episode if world.state.communication is not None else 0
    world.write(CauseFound(time=world.now, attempt=1, episode=episode, cause=cause, seconds=0.3))


def well(world: World, episode: int = 1) -> None:
    world.write(CollectivesWell(time=world.now, attempt=1, episode=episode))


def of_log(world: World) -> list[type]:
    return [type(one) for one in world.log if isinstance(one, IncidentOpened | IncidentCorrected | IncidentClosed)]


def test_an_episode_is_an_incident_that_is_watched_and_closed() -> None:
    world = training()
    odd(world)
    world.turn()
    assert views.incidents(world.state) == [], "it is not known yet who it is"
    found(world)
    world.turn()
    (incident,) = views.incidents(world.state)
    assert (incident["cause"], incident["component"]) == ("communication stuck (host)", "host")
    assert (incident["ranks"], incident["nodes"], incident["action"]) == ([2], ["node-1"], "tolerate")
    assert incident["open"] and incident["category"] == "host_os" and incident["evidence"] == ["it shows"]
    assert incident["time"] == pytest.approx(world.now - 4.0, abs=0.2)
    world.train()
    well(world)
    world.turn()
    assert not views.incidents(world.state)[0]["open"]
    assert world.running() == dict.fromkeys(range(4), 1), "nobody was ended"


def test_a_later_look_that_says_it_better_replaces_the_first() -> None:
    world = training()
    odd(world, "slow")
    found(world, "network", (0, 2), confidence=0.6, link=(0, 2), symptom="slow")
    world.turn()
    (incident,) = views.incidents(world.state)
    assert (incident["links"], incident["nodes"], incident["ranks"]) == ([[0, 2]], [], [0, 2]), "a link is no node"
    assert "between rank 0 and rank 2" in incident["evidence"][-1]
    found(world, "none", (), confidence=0.3, symptom="slow")
    world.turn()
    assert views.incidents(world.state)[0]["ranks"] == [0, 2], "nobody is no better answer"
    odd(world)
    found(world)
    world.turn()
    (incident,) = views.incidents(world.state)
    assert (incident["ranks"], incident["links"], incident["component"]) == ([2], [], "host")
    found(world, "outside", (1,), confidence=0.5)
    world.turn()
    assert views.incidents(world.state)[0]["ranks"] == [2], "it is much less certain"
    assert of_log(world) == [IncidentOpened, IncidentCorrected]


def test_what_names_nobody_is_no_incident() -> None:
    world = training()
    odd(world)
    found(world, "none", (), confidence=0.8)
    world.turn()
    found(world, "outside", (2,), confidence=0.3)
    world.turn()
    assert views.incidents(world.state) == []


def test_what_comes_after_the_episode_is_about_nothing() -> None:
    world = training()
    odd(world)
    well(world)
    world.write(
        CauseFound(
            time=world.now, attempt=1, episode=1, seconds=0.1,
            cause=RootCause(symptom="stuck", component="host", ranks=(2,), confidence=0.9),
        )
    )  # fmt: skip
    world.turn()
    assert views.incidents(world.state) == [] and world.state.communication is None
    odd(world, episode=2)
    found(world)
    world.turn()
    assert len(views.incidents(world.state)) == 1 and world.state.next_episode == 3


def test_all_ranks_are_looked_at_again_while_it_lasts() -> None:
    world = training()
    assert next_look(world.state) is None
    odd(world, "slow")
    began = world.now
    due = []
    while (at := next_look(world.state)) is not None:
        due.append(round(at - began, 1))
        found(world, symptom="slow")
    assert due == [0.0, 2.5, 6.0, 12.0]
    odd(world, "stuck")
    assert next_look(world.state) == world.now, "what is stuck now is looked at anew"


def test_while_nobody_can_be_named_there_are_more_looks() -> None:
    world = training()
    odd(world, "slow")
    began = world.now
    due = []
    for component in ("none", "none", "sender", "sender"):
        at = next_look(world.state)
        assert at is not None
        due.append(round(at - began, 1))
        found(world, component, () if component == "none" else (2,), symptom="slow")
    assert due == [0.0, 1.0, 2.5, 12.0]
    assert next_look(world.state) is None


def test_a_less_certain_look_corrects_none_that_named_others() -> None:
    world = training()
    odd(world, "slow")
    found(world, "sender", (1,), symptom="slow", confidence=0.85)
    found(world, "receiver", (2,), symptom="slow", confidence=0.75)
    seen = world.state.communication
    assert seen is not None and seen.found is not None and seen.found.cause.ranks == (1,)
    found(world, "network", (2,), symptom="slow", confidence=0.85)
    seen = world.state.communication
    assert seen is not None and seen.found is not None and seen.found.cause.ranks == (2,)


def test_a_hang_that_stacks_do_not_explain_has_the_cause_from_here() -> None:
    world = training()
    world.located = Located(kind="network", confidence=0.5, evidence=("all have come, and nothing moves",))
    world.hang(0, inside=ALLREDUCE, last=ALLREDUCE)
    odd(world)
    found(world, "network", (2,))
    world.turns(30, seconds=0.5)
    hang = views.incidents(world.state)[-1]
    assert (hang["cause"], hang["ranks"], hang["nodes"]) == ("hang (network)", [2], ["node-1"]), hang
    assert hang["action"] == "restart", "the first time in place"


def test_a_hang_that_stacks_explain_keeps_their_word() -> None:
    world = training()
    world.located = Located(kind="loader", ranks=(1,), nodes=("node-0",), confidence=0.85, category="hang_dataloader")
    world.hang(1)
    odd(world)
    found(world, "network", (2,))
    world.turns(30, seconds=0.5)
    assert views.incidents(world.state)[-1]["cause"] == "hang (loader)"


def test_a_rank_that_is_watched_already_gets_the_class_that_stacks_give_it() -> None:
    world = training()
    world.located = Located(kind="loop", ranks=(1,), nodes=("node-0",), confidence=0.85, category="user_code")
    world.hang(1, cpu_fraction=1.0)
    odd(world)
    found(world, "compute", (1,))
    world.turns(4, seconds=0.5)
    assert [one["cause"] for one in views.incidents(world.state)] == ["communication stuck (compute)"]
    world.turns(26, seconds=0.5)
    first, then = views.incidents(world.state)
    assert (
        not first["open"]
        and then["open"]
        and (then["class"], then["ranks"], then["action"]) == ("loop", [1], "tolerate")
    )
    world.turns(26, seconds=0.5)
    assert len(views.incidents(world.state)) == 2, "and that is all"


def test_what_stacks_do_not_know_better_changes_nothing() -> None:
    world = training()
    world.located = Located(kind="outside", ranks=(1,), nodes=("node-0",), confidence=0.85)
    world.hang(1, cpu_fraction=1.0)
    odd(world)
    found(world, "compute", (1,))
    world.turns(40, seconds=0.5)
    assert [one["cause"] for one in views.incidents(world.state)] == ["communication stuck (compute)"]


def test_a_link_never_costs_a_node_its_place() -> None:
    world = training(nodes=3, standby=1)
    for attempt in range(2):
        world.located = Located(kind="network", confidence=0.5)
        world.hang(0, inside=ALLREDUCE, last=ALLREDUCE)
        odd(world, episode=attempt + 1)
        found(world, "network", (0, 2), link=(0, 2), confidence=0.7)
        world.turns(40, seconds=0.5)
        world.train(3)
        world.turns(10, seconds=0.5)
    hangs = [one for one in views.incidents(world.state) if one["cause"].startswith("hang")]
    assert len(hangs) >= 1 and all(one["action"] in ("restart", "tolerate") for one in hangs), hangs


def slow_rank(world: World, component: Component = "compute", ranks: tuple[int, ...] = (2,), episode: int = 1) -> None:
    odd(world, "slow", episode)
    found(world, component, ranks, symptom="slow", confidence=0.85)
    for _ in range(30):
        world.train()
        world.turn(0.5)


def test_a_rank_that_is_slow_by_itself_is_the_ladders() -> None:
    world = training(nodes=3, standby=1)
    slow_rank(world)
    (incident,) = views.incidents(world.state)
    assert incident["action"] == "tolerate" and "the first time" in incident["because"]
    well(world)
    world.turn()
    slow_rank(world, episode=2)
    last = views.incidents(world.state)[-1]
    assert (last["action"], last["nodes"]) == ("evict", ["node-1"]), "the same node again, and a standby is ready"


@pytest.mark.parametrize("component", ["sender", "network", "receiver", "storage", "outside"])
def test_other_components_cost_no_node_anything(component: Component) -> None:
    world = training(nodes=3, standby=1)
    for episode in (1, 2, 3):
        slow_rank(world, component, episode=episode)
        well(world, episode)
        world.turn()
    assert [one["action"] for one in views.incidents(world.state)] == ["tolerate"] * 3
    assert world.running() == dict.fromkeys(range(4), 1)


def test_a_new_attempt_begins_without_an_episode() -> None:
    world = training()
    odd(world)
    found(world)
    world.turn()
    world.fail(1)
    world.turns(20)
    assert world.state.communication is None
    assert not views.incidents(world.state)[0]["open"]
    again = replace(world.state)
    assert again.next_episode == 2
