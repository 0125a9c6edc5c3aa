"""Who takes over, what the budget allows, and how a node comes back."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from evertrain.model.config import LadderConfig
from evertrain.model.decisions import AskHuman, Enlist, Evict, Grow, Policy, Tolerate, WaitForNodes
from support.ladders import EVIDENCE, Job, names

WIDE = Policy(ladder=LadderConfig(budget_nodes=4))


# -- replacement -------------------------------------------------------------------------------------------------------


def test_a_certain_fault_evicts_at_once_and_the_standby_takes_over_its_place() -> None:
    job = Job(nodes=3, standby=1)
    (action,) = job.fault("node-1")
    assert isinstance(action, Evict)
    assert (action.nodes, action.replacements) == (("node-1",), {"node-1": "node-3"})
    assert action.evidence == (f"node-1: {EVIDENCE}",)
    assert job.state.active_nodes() == ("node-0", "node-3", "node-2")
    assert "node-1" in action.because and "gpu lost" in action.because and "node-3 takes over" in action.because


@pytest.mark.parametrize("state", ["joining", "unusable", "lost"])
def test_a_standby_that_is_not_ready_takes_over_nothing(state: str) -> None:
    job = Job(standby=1)
    job.becomes("node-4", state)
    assert names(job.fault()) == ["Tolerate", "AskHuman"]


def test_an_evicted_node_never_takes_over() -> None:
    job = Job(nodes=3, standby=1, policy=WIDE)
    job.fault("node-1")
    job.now += 10_000
    job.allowed("node-1")
    job.fault("node-1")  # it only waits
    assert job.state.standbys() == ()
    assert names(job.fault("node-2")) == ["Tolerate", "AskHuman"]


def test_in_the_next_run_it_is_out_as_long_as_the_others_suffice() -> None:
    job = Job(nodes=3, standby=1)
    job.fault("node-1")
    assert job.state.run is not None
    job.write(job.state.run)
    assert job.state.roster == ("node-0", "node-3", "node-2") and job.state.standbys() == ()
    assert job.state.nodes["node-1"].state == "evicted"
    job.now += 5000
    assert names(job.fault("node-2")) == ["Tolerate", "AskHuman"]
    job.write(replace(job.state.run, nodes=("node-0", "node-1", "node-2"), standby=0))
    assert job.state.active_nodes() == ("node-0", "node-1", "node-2"), "there is nobody else"


def test_without_a_standby_training_goes_on_and_a_human_is_asked() -> None:
    goes_on, human = Job().fault()
    assert isinstance(goes_on, Tolerate) and "no standby is ready" in goes_on.because
    assert isinstance(human, AskHuman) and "node-1" in human.because


def test_the_same_fault_again_asks_nobody_again() -> None:
    job = Job()
    job.fault()
    (action,) = job.fault()
    assert isinstance(action, Tolerate) and "cannot be replaced" in action.because


def test_a_known_fault_is_acted_on_as_soon_as_there_is_a_standby() -> None:
    job = Job()
    job.fault()
    job.arrives("node-9")
    job.ready("node-9")
    (action,) = job.fault()
    assert isinstance(action, Evict)


def test_a_faulty_standby_leaves_without_touching_training() -> None:
    job = Job(nodes=3, standby=1)
    (action,) = job.fault("node-3")
    assert isinstance(action, Evict) and action.spare and action.replacements == {}
    assert job.state.roster == job.state.active_nodes() == ("node-0", "node-1", "node-2")
    assert not job.state.memory.evictions[0].counted


def test_a_fault_of_a_stranger_is_tolerated() -> None:
    assert names(Job().fault("node-77")) == ["Tolerate"]


def test_max_restarts_leaves_training_alone_for_as_long_as_it_runs() -> None:
    (action,) = Job(standby=1, max_restarts=0).fault()
    assert isinstance(action, Tolerate) and "--max-restarts" in action.because


# -- smaller and larger ------------------------------------------------------------------------------------------------


def test_no_standby_and_a_range_of_nodes_makes_the_job_smaller() -> None:
    job = Job(least=3, is_stored=True)
    (action,) = job.fault()
    assert isinstance(action, Evict) and action.replacements == {}
    assert "1 node less" in action.because
    assert job.state.active_nodes() == ("node-0", "node-2", "node-3")


def test_never_below_the_least() -> None:
    assert names(Job(least=4, is_stored=True).fault()) == ["Tolerate", "AskHuman"]


def test_never_smaller_without_a_shared_store() -> None:
    goes_on, _ = Job(least=1).fault()
    assert "nothing is in the shared store" in goes_on.because


def test_it_grows_at_the_next_start_that_happens_anyway() -> None:
    job = Job(least=3, is_stored=True)
    job.fault()
    job.restarts()
    job.arrives("node-9")
    assert names(job.ready("node-9")) == ["Tolerate"]
    *_, grow = job.fails(nodes=("node-2",), progress=True)
    assert isinstance(grow, Grow) and grow.nodes == ("node-9",)
    assert job.state.active_nodes() == ("node-0", "node-2", "node-3", "node-9")
    assert job.state.standbys() == ()


def test_it_never_grows_beyond_what_was_asked_for() -> None:
    job = Job(nodes=4, standby=2, least=2, is_stored=True)
    assert names(job.fails(progress=True)) == ["Restart"]


# -- waiting -----------------------------------------------------------------------------------------------------------


def waiting(**options: object) -> Job:
    job = Job(has_platform=True, **options)  # type: ignore[arg-type]
    job.opens("node-1")
    (wait,) = job.fault()
    assert isinstance(wait, WaitForNodes)
    assert (wait.nodes, wait.until, wait.instead_of) == (1, job.now + 300, ("node-1",))
    return job


def test_the_platform_is_asked_and_the_start_waits_with_a_deadline() -> None:
    job = waiting()
    assert job.state.incident is not None and job.state.incident.decided is None


def test_a_node_that_comes_in_time_takes_over() -> None:
    job = waiting()
    job.arrives("node-9")
    job.now += 20
    (action,) = job.ready("node-9")
    assert isinstance(action, Evict) and action.replacements == {"node-1": "node-9"}
    assert action.evidence == (f"node-1: {EVIDENCE}",)
    assert job.state.incident is not None and job.state.incident.decided is not None
    assert job.state.memory.blocked["node-1"].is_certain


def test_if_nobody_comes_training_goes_on_and_a_human_is_asked() -> None:
    job = waiting()
    job.now += 300
    goes_on, human = job.nobody_came()
    assert isinstance(goes_on, Tolerate) and "too few nodes came in 300 s" in goes_on.because
    assert isinstance(human, AskHuman)


def test_what_comes_too_late_changes_nothing() -> None:
    job = waiting()
    job.nobody_came()
    assert job.nobody_came() == ()


def test_the_same_fault_during_the_wait_asks_for_nothing_more() -> None:
    (action,) = waiting().fault()
    assert isinstance(action, Tolerate) and "waited for already" in action.because


# -- budget ------------------------------------------------------------------------------------------------------------


def test_over_the_budget_nobody_is_evicted_and_a_human_is_asked() -> None:
    job = Job(nodes=4, standby=2)
    assert names(job.fault("node-1")) == ["Evict"]
    goes_on, human = job.fault("node-2")
    assert isinstance(goes_on, Tolerate) and "the budget of 1 node in 60 min" in goes_on.because
    assert isinstance(human, AskHuman)
    assert "node-2" in job.state.active_nodes()


def test_the_budget_is_a_part_of_a_large_job() -> None:
    job = Job(nodes=30, standby=4)
    assert [names(job.fault(f"node-{index}")) for index in range(4)] == [["Evict"]] * 3 + [["Tolerate", "AskHuman"]]


def test_the_budget_renews_itself() -> None:
    job = Job(nodes=4, standby=2)
    job.fault("node-1")
    job.now += 3601
    assert names(job.fault("node-2")) == ["Evict"]


def test_neither_lost_nor_drained_nor_waiting_nodes_use_it_up() -> None:
    job = Job(nodes=4, standby=5)
    job.drain("node-0")
    job.fault("node-8")
    job.becomes("node-1", "lost")
    assert names(job.fails("lost")) == ["Evict"]
    assert names(job.fault("node-2")) == ["Evict"]


# -- coming back -------------------------------------------------------------------------------------------------------


def out_by_alerts() -> Job:
    job = Job(standby=2, policy=WIDE)
    job.alert()
    job.alert()
    assert "node-1" in job.state.memory.blocked
    return job


def test_a_node_returns_when_its_test_passed_and_it_was_quiet() -> None:
    job = out_by_alerts()
    job.now += 599
    (too_soon,) = job.tested()
    assert isinstance(too_soon, Tolerate) and "quiet for 599 of 600 s" in too_soon.because
    job.now += 1
    (back,) = job.tested()
    assert isinstance(back, Enlist)
    assert job.state.standbys()[-1] == "node-1" and job.state.nodes["node-1"].state == "joining"
    assert "node-1" not in job.state.memory.blocked


def test_what_is_seen_of_it_meanwhile_counts() -> None:
    job = out_by_alerts()
    job.now += 500
    assert names(job.alert()) == ["Tolerate"]
    job.now += 500
    assert names(job.tested()) == ["Tolerate"]


def test_a_failed_test_keeps_it_out() -> None:
    job = out_by_alerts()
    job.now += 5000
    (action,) = job.tested(passed=False)
    assert isinstance(action, Tolerate) and "matmul differs" in action.because


def test_a_certain_fault_needs_a_human() -> None:
    job = Job(standby=1)
    job.fault()
    job.now += 5000
    (action,) = job.tested()
    assert isinstance(action, Tolerate) and "evertrain node allow node-1" in action.because
    assert names(job.allowed()) == ["Enlist"]


def test_evicted_twice_within_a_week_it_needs_a_human() -> None:
    job = out_by_alerts()
    job.now += 1000
    job.tested()
    job.becomes("node-1", "standby")
    job.now += 5000
    job.alert("node-1")
    job.alert("node-1")
    job.now += 1000
    (action,) = job.tested()
    assert isinstance(action, Tolerate) and "evicted 2 times within 7 days" in action.because
    job.now += 604800
    assert names(job.tested()) == ["Enlist"]


def test_a_drained_node_stays_out_until_allowed() -> None:
    job = Job(standby=1)
    (evict,) = job.drain()
    assert isinstance(evict, Evict) and evict.planned and evict.replacements == {"node-1": "node-4"}
    job.now += 5000
    assert names(job.tested()) == ["Tolerate"]
    assert names(job.arrives("node-1")) == ["Tolerate"]
    assert names(job.allowed()) == ["Enlist"]


def test_allowing_a_node_that_takes_part_changes_nothing() -> None:
    job = Job()
    assert names(job.allowed()) == ["Tolerate"]
    assert job.state.roster == ("node-0", "node-1", "node-2", "node-3")


def test_a_node_that_cannot_be_spared_is_not_drained() -> None:
    (action,) = Job().drain()
    assert isinstance(action, Tolerate) and "not drained: no standby is ready" in action.because


def test_draining_may_make_the_job_smaller() -> None:
    job = Job(least=2, is_stored=True)
    assert names(job.drain()) == ["Evict"] and len(job.state.active_nodes()) == 3


def test_a_drained_standby_is_just_gone() -> None:
    job = Job(standby=1)
    job.drain("node-4")
    assert job.state.standbys() == () and len(job.state.active_nodes()) == 4


def test_a_new_node_becomes_a_standby_once() -> None:
    job = Job()
    assert names(job.arrives("node-9")) == ["Enlist"]
    assert names(job.arrives("node-9")) == ["Tolerate"]
    assert job.state.standbys() == ("node-9",)
