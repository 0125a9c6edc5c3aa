"""Node-days and failures as the log tells them."""

from __future__ import annotations

from typing import Any

import pytest

from evertrain.decide.history import History, of_log
from evertrain.model import records as r
from evertrain.model.decisions import Evict
from evertrain.model.records import AnyRecord
from evertrain.model.spec import Seats

DAY = 86400.0
NODES = ("a", "b", "c")


def started(day: float, **different: Any) -> r.RunStarted:
    usual: dict[str, Any] = {
        "run_id": f"job-{day}", "nodes": NODES, "standby": 1, "nproc_per_node": 1, "fresh": False, "start": "zygote",
        "command": "t.py",
    }  # fmt: skip
    return r.RunStarted(time=day * DAY, **{**usual, **different})


def changed(day: float, node: str, state: Any) -> r.NodeChanged:
    return r.NodeChanged(time=day * DAY, node=node, state=state, because="")


def evicted(day: float, node: str, **how: Any) -> r.Decided:
    evict = Evict(because="", nodes=(node,), replacements={}, evidence=("seen",), **how)
    return r.Decided(time=day * DAY, action="evict", because="", actions=(evict,))


def ended(day: float) -> r.JobEnded:
    return r.JobEnded(time=day * DAY, state="stopped", exit_code=1, message="")


def of(*log: AnyRecord) -> History:
    history = of_log(log)
    return History(pytest.approx(history.node_days), history.failures)  # type: ignore[arg-type]


def test_standbys_count_and_the_time_between_runs_does_not() -> None:
    assert of(started(0), ended(2), started(10), changed(11, "a", "active")) == History(9.0, 0)


def test_a_log_without_a_run_holds_nothing() -> None:
    assert of() == of(started(0)) == History(0.0, 0)


@pytest.mark.parametrize("state", ["lost", "unusable", "evicted"])
def test_a_node_that_falls_out_is_a_failure(state: str) -> None:
    log = (started(0), changed(0, "a", "active"), changed(1, "a", state), ended(2))
    assert of(*log) == History(6.0, 1)


def test_a_node_that_is_lost_and_then_evicted_has_failed_once() -> None:
    log = (started(0), changed(0, "a", "active"), changed(1, "a", "lost"), evicted(1, "a", lost=True), ended(1))
    assert of(*log) == History(3.0, 1)


def test_one_that_comes_back_may_fail_again() -> None:
    log = (started(0), changed(1, "a", "lost"), changed(2, "a", "active"), changed(3, "a", "lost"))
    assert of(*log).failures == 2


def test_an_evicted_node_takes_part_no_longer() -> None:
    assert of(started(0), evicted(1, "a"), ended(2)) == History(3.0 + 2.0, 1)


def test_a_node_that_the_user_took_out_has_not_failed() -> None:
    assert of(started(0), evicted(1, "a", planned=True), ended(1)) == History(3.0, 0)


def test_with_seats_nobody_takes_part_before_the_nodes_are_settled() -> None:
    log = (started(0, nodes=("a",), seats=Seats(2, 2)), r.NodesSettled(time=5 * DAY, nodes=("a", "b"), standby=0))
    assert of(*log, ended(6)) == History(2.0, 0)


def test_histories_add_up() -> None:
    assert History(1.0, 2) + History(0.5, 1) == History(1.5, 3)
