"""What a user sees of a job is JSON, whatever the ranks report."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from evertrain.controller import views
from evertrain.decide.applying import fold
from evertrain.decide.picture import NodePicture, Picture
from evertrain.model import records as r
from evertrain.model.report import Identity, NodeReport, PageReport
from support.world import World

RUN = r.RunStarted(
    time=1.0, run_id="a", nodes=("n",), standby=0, nproc_per_node=1, fresh=False, start="zygote", command="t.py"
)
ATTEMPT = r.AttemptStarted(
    time=2.0,
    attempt=1,
    restart_count=0,
    placement={0: "n"},
    keepers={"n": Identity(1, 1)},
    master_addr="127.0.0.1",
    master_port=1,
    resume=None,
    tiers={},
    reached=None,
)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_none(loss: float) -> None:
    page = PageReport(
        rank=0, attempt=1, pid=1, step=1, relative_step=1, phase="step", progress_time=3.0, resumed_time=2.0,
        passed_time=0.0, loss=loss,
    )  # fmt: skip
    picture = Picture({"n": NodePicture(NodeReport(node="n", address="", pages=(page,)), connected=True, since=1.0)})
    status = views.status(fold([RUN, ATTEMPT]), picture, job="j", now=4.0)
    json.dumps(status, allow_nan=False)
    assert status["workers"][0]["loss"] is None


def test_incidents_of_earlier_runs_are_told_apart_whatever_the_clock_says() -> None:
    world = World()
    world.turns()
    world.train(2)
    world.turn()
    world.fail(1)
    world.turns()
    assert [seen["this_run"] for seen in views.incidents(world.state)] == [True]
    started = world.log[0]
    assert isinstance(started, r.RunStarted)
    world.write(replace(started, time=world.now, run_id="job-2"))
    assert [seen["this_run"] for seen in views.incidents(world.state)] == [False]


def test_a_step_that_is_on_disk_has_been_seen() -> None:
    ended = r.AttemptEnded(time=4.0, attempt=1, outcome="stopped", step=None, relative_step=0, progress=False)
    state = fold([RUN, ATTEMPT, ended, r.Flushed(time=5.0, step=15)])
    status = views.status(state, Picture(), job="j", now=6.0)
    assert (status["step"], status["step_kind"]) == (15, "absolute")


def test_a_restart_says_which_change_came_with_it() -> None:
    world = World()
    world.turns()
    world.capture()
    world.train(3)

    def brings(name: str, change: str | None = None, **own: object) -> object:
        """What a restart brings, once its attempt has started; before that nobody knows."""
        if change is not None:
            world.change("second", change, within_s=600)
        if own:
            world.change(None, name, act="restart", **own)
        assert world.state.attempt is not None
        world.write(r.RestartRequested(time=world.now, restart=name, attempt=world.state.attempt.number))
        before = views.restart(world.state, name)
        assert before is not None and before["brings"] is None
        world.turns()
        world.train(3)
        world.turns()
        after = views.restart(world.state, name)
        assert after is not None and after["back"]
        return after["brings"]

    assert brings("plain") is None
    assert brings("takes-along", "waited") == "waited"
    assert brings("own", args=("--lr", "3")) == "own"
    assert brings("again") is None, "it has come before"
    earlier = views.restart(world.state, "takes-along")
    assert earlier is not None and earlier["brings"] == "waited"
