"""Whether a node can be taken out now, or let back, and why not; and what becomes of the wish."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from evertrain.decide import draining
from evertrain.decide.applying import apply
from evertrain.decide.memory import Blocked, Memory
from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.records import AnyRecord
from support.world import World

STORED = r.StoreCommitted(
    time=1.0, url="s3://b", folder="step-5", attempt=1, step=5, world_size=4, bytes=1, seconds=1.0
)


class Drill:
    """A job of two nodes and perhaps a standby, that trains."""

    def __init__(self, nodes: int = 3, standby: int = 1, **run: Any) -> None:
        self.world = World(nodes, standby=standby, **run)
        self.world.turns()
        self.world.train(3)
        self.world.turns()

    @property
    def state(self) -> JobState:
        return self.world.state

    def write(self, *records: AnyRecord) -> None:
        for record in records:
            self.world.write(record)

    def why_not(self, node: str = "node-1") -> str:
        return draining.refusal(self.state, self.world.picture(), node)


def test_a_standby_that_waits_can_take_over() -> None:
    drill = Drill()
    assert drill.state.nodes["node-2"].state == "standby"
    assert drill.why_not() == ""


def test_a_standby_itself_can_be_taken_out() -> None:
    assert Drill().why_not("node-2") == ""


def test_a_standby_that_is_silent_or_not_ready_takes_over_nothing() -> None:
    drill = Drill()
    seen = drill.world.picture()
    silent = Picture({**seen.nodes, "node-2": replace(seen.nodes["node-2"], connected=False)})
    assert draining.refusal(drill.state, silent, "node-1").startswith("no standby is ready to take over the ranks of")
    drill.write(r.NodeChanged(time=2.0, node="node-2", state="joining", because=""))
    assert draining.refusal(drill.state, seen, "node-1").startswith("no standby is ready")


@pytest.mark.parametrize(
    ("run", "stored", "because"),
    [
        ({}, True, "and the job never goes on with fewer nodes (--nnodes MIN:MAX lets it)"),
        ({"least": 2}, True, "and 2 nodes is the least that the job may have"),
        ({"least": 1}, False, "and nothing is in the shared store that fewer nodes could go on from"),
        ({"least": 1}, True, ""),
    ],
)
def test_without_a_standby_the_job_may_have_to_shrink(run: dict[str, Any], stored: bool, because: str) -> None:
    drill = Drill(nodes=2, standby=0, **run)
    if stored:
        drill.write(STORED)
    why_not = drill.why_not()
    assert why_not == because or why_not == f"no standby is ready to take over the ranks of node-1, {because}"
    assert bool(why_not) == bool(because)


@pytest.mark.parametrize(
    ("record", "because"),
    [
        (r.StopRequested(time=2.0, signal=15, because=""), "the job is ending"),
        (r.JobEnded(time=2.0, state="done", exit_code=0, message=""), "the job is ending"),
        (r.RestartRequested(time=2.0, restart="a", attempt=1), "the job is being restarted; ask again when"),
        (r.AttemptEnding(time=2.0, attempt=1, signal=9, because=""), "the job is recovering; ask again when"),
        (
            r.NodeChanged(time=2.0, node="node-0", state="unusable", because="rank 0 (pid 7) is still there"),
            "node-0 is unusable (rank 0 (pid 7) is still there): the ranks cannot all be ended",
        ),
        (r.DrainAsked(time=2.0, node="node-0", because=""), "node-0 is being drained; ask again when training is back"),
    ],
)
def test_the_wrong_moment(record: AnyRecord, because: str) -> None:
    drill = Drill()
    drill.write(record)
    assert drill.why_not().startswith(because)


def test_a_job_that_recovers() -> None:
    drill = Drill()
    drill.world.fail(1)
    drill.world.turn()
    assert drill.state.incident is not None
    assert drill.why_not() == "the job is recovering; ask again when training is back"


def test_who_only_observes_takes_nobody_out() -> None:
    assert Drill(observe_only=True).why_not() == "with --observe-only nothing is done"


def test_a_node_that_is_not_part() -> None:
    drill = Drill()
    assert drill.why_not("node-9") == "node-9 is not part of this job; its nodes are node-0, node-1, node-2"
    blocked = Blocked(since=1.0, because="gpu lost", is_certain=True)
    drill.world.state = replace(drill.state, memory=Memory(blocked={"node-9": blocked}))
    assert drill.why_not("node-9") == "node-9 is out already: gpu lost"


def test_before_the_first_start_nobody_is_taken_out() -> None:
    world = World(3, standby=1)
    assert draining.refusal(world.state, world.picture(), "node-1") == "its ranks have not been started yet"


# -- allow -----------------------------------------------------------------------------------------------------------


def test_only_who_is_kept_out_can_be_let_back() -> None:
    drill = Drill()
    assert draining.allow_refusal(drill.state, "node-1") == "node-1 is part of the job and nothing keeps it out"
    assert draining.allow_refusal(drill.state, "node-9") == "node-9 was not evicted from this job"
    memory = Memory(blocked={"node-9": Blocked(since=1.0, because="gpu lost", is_certain=True)})
    drill.world.state = replace(drill.state, memory=memory)
    assert draining.allow_refusal(drill.state, "node-9") == ""
    assert draining.allow_refusal(drill.state, "x") == "x was not evicted from this job; evicted are node-9"


# -- the wish --------------------------------------------------------------------------------------------------------

ALLOW = r.AllowAsked(time=2.0, node="node-1", because="its GPU was replaced")
DRAIN = r.DrainAsked(time=2.0, node="node-1", because="maintenance")


def decided(event: d.AnyEvent, *actions: d.AnyAction) -> r.Decided:
    return r.Decided(time=3.0, action="tolerate", because="as it is", event=event, actions=actions)


def test_a_wish_stands_until_it_is_decided() -> None:
    state = Drill().state
    for record in (ALLOW, DRAIN, ALLOW):
        state = apply(state, record)
    assert state.asked == (ALLOW, DRAIN)
    answer = decided(d.DrainRequested(time=2.5, node="node-1", because=""))
    state = apply(state, answer)
    assert state.asked == (ALLOW,) and state.answers == {"node-1": answer}
    state = apply(state, decided(d.NodeAllowed(time=2.5, node="node-1", because="")))
    assert state.asked == ()


def test_what_was_asked_between_two_runs_holds_for_the_next_one_and_gives_the_node_its_place() -> None:
    drill = Drill()
    blocked = Blocked(since=1.0, because="gpu lost", is_certain=True)
    state = replace(drill.state, memory=Memory(blocked={"node-1": blocked}))
    again = replace(drill.world.run, run_id="job-2", time=5.0)
    assert apply(state, again).roster == ("node-0", "node-2"), "who is out stays out"
    state = apply(apply(state, ALLOW), DRAIN)
    assert apply(state, again).asked == (ALLOW,)
    assert apply(state, again).roster == ("node-0", "node-1", "node-2")
    assert apply(state, replace(again, fresh=True, forgets=True)).asked == ()
    assert apply(state, replace(again, fresh=True)).asked == (ALLOW,)
