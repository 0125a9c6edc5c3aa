"""The ladder, arrow by arrow: what happens is answered cheaply and certainly first, and never without evidence."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from msgspec.structs import replace

from evertrain.decide import ladder
from evertrain.model import decisions as d
from evertrain.model.config import Config, HangConfig, LadderConfig, RestartConfig
from evertrain.model.decisions import (
    AskHuman,
    Enlist,
    Evict,
    Hold,
    Inspect,
    Policy,
    Replay,
    Restart,
    RollBack,
    Stop,
    Tolerate,
)
from support.ladders import Job, names

ALL = Policy(sources=("inspect", "replay", "roll_back"))
PATIENT = replace(ALL, restart=RestartConfig(no_progress_attempts=20))


# -- signs of trouble --------------------------------------------------------------------------------------------------


def test_one_alert_is_tolerated() -> None:
    (action,) = Job(standby=1).alert()
    assert isinstance(action, Tolerate) and "1 of 2 network alerts within 300 s" in action.because


def test_the_second_within_the_window_evicts_with_both_as_evidence() -> None:
    job = Job(standby=1)
    job.alert()
    job.now += 299
    (action,) = job.alert()
    assert isinstance(action, Evict)
    assert action.evidence == ("node-1: link down at 1000 s", "node-1: link down at 1299 s")


def test_alerts_far_apart_or_of_different_nodes_never_add_up() -> None:
    job = Job(standby=1)
    for node in ("node-0", "node-1", "node-2"):
        assert names(job.alert(node)) == ["Tolerate"]
    job.now += 301
    assert names(job.alert()) == ["Tolerate"]


def test_without_a_standby_alerts_ask_for_a_human_once_and_not_again_and_again() -> None:
    job = Job()
    done = [names(job.alert()) for _ in range(5)]
    assert done == [["Tolerate"], ["Tolerate", "AskHuman"], ["Tolerate"], ["Tolerate"], ["Tolerate"]]


def test_a_reading_alone_proves_nothing_and_a_blind_sensor_even_less() -> None:
    job = Job(standby=1)
    for _ in range(10):
        assert names(job.reading()) == ["Tolerate"]
        assert names(job.blind()) == ["Tolerate"]
    assert len(job.state.memory.readings["node-1"]) == 10


# -- a crash -----------------------------------------------------------------------------------------------------------


def test_a_crash_restarts_in_place() -> None:
    (action,) = Job(standby=1).fails()
    assert isinstance(action, Restart)
    assert action.because == "rank 2 on node-1 (killed (SIGKILL)): restart in place"


def test_with_odd_hardware_a_first_crash_still_only_restarts() -> None:
    job = Job(standby=1)
    job.reading()
    assert names(job.fails()) == ["Restart"]


def test_again_before_it_has_proven_itself_the_checks_are_asked() -> None:
    job = Job(standby=1, policy=ALL)
    job.fails()
    job.restarts()
    (action,) = job.fails(nodes=("node-2",))
    assert isinstance(action, Inspect) and action.nodes == job.state.active_nodes()
    assert "had not proven itself since incident 1" in action.because
    assert job.state.incident is not None and job.state.incident.decided is None


def test_after_it_has_proven_itself_it_is_a_first_one_again() -> None:
    job = Job(policy=ALL)
    job.fails(progress=True)
    job.restarts()
    job.is_proven()
    assert names(job.fails(nodes=("node-2",), progress=True)) == ["Restart"]


def test_the_same_failure_within_a_day_is_a_repeat_though_it_had_proven_itself() -> None:
    job = Job(policy=ALL)
    job.fails(progress=True)
    job.restarts()
    job.is_proven()
    job.now += 80_000
    (action,) = job.fails(progress=True)
    assert isinstance(action, Restart) and "the same as incident 1, 22.2 h ago: one more attempt" in action.because
    for answer in ("Restart", "Inspect"):
        job.restarts()
        assert names(job.fails(progress=True)) == [answer]
    later = Job(policy=ALL)
    later.fails(progress=True)
    later.restarts()
    later.is_proven()
    later.now += 90_000
    (action,) = later.fails(progress=True)
    assert isinstance(action, Restart) and "the same as" not in action.because


def checked(policy: Policy = ALL, standby: int = 1) -> Job:
    job = Job(standby=standby, policy=policy)
    job.fails()
    job.restarts()
    job.fails()
    return job


def test_suspects_of_the_checks_are_evicted_with_their_findings() -> None:
    job = checked()
    (action,) = job.answers("inspect", "suspects", "node-2")
    assert isinstance(action, Evict) and action.nodes == ("node-2",) and action.evidence == ("node-2 failed",)


def test_all_checks_passed_one_more_attempt() -> None:
    job = checked()
    (action,) = job.answers("inspect", "clean")
    assert isinstance(action, Restart) and "one more attempt" in action.because


def test_then_the_code_is_rolled_back_then_the_steps_are_replayed_then_it_ends() -> None:
    job = checked()
    job.answers("inspect", "clean")
    job.restarts()
    assert isinstance(job.fails()[0], RollBack)
    assert names(job.answers("roll_back", "done")) == ["Restart"]
    job.restarts()
    assert isinstance(job.fails()[0], Replay)
    (stop,) = job.answers("replay", "clean")
    assert isinstance(stop, Stop) and "4 attempts in a row made no progress" in stop.because


def test_what_cannot_be_replayed_is_said_and_passed_over() -> None:
    odd = {"takes_replays": True, "mesh": ""}
    for change, why in (
        ({"takes_replays": False}, "the script takes no part in replays"),
        (odd, "the job's parallel dimensions are not known; --mesh names them"),
        ({**odd, "mesh": "pp=3,dp=3"}, "4 nodes are no whole number of replicas of 3"),
        ({**odd, "mesh": "pp=8,dp=1"}, "4 nodes hold one replica: there is no second group to compare with"),
    ):
        job = Job(policy=PATIENT)
        job.script |= change
        job.fails()
        job.restarts()
        job.fails()
        job.answers("inspect", "clean")
        job.restarts()
        job.fails()
        job.answers("roll_back", "done")
        job.restarts()
        restart, human = job.fails()
        assert isinstance(restart, Restart) and isinstance(human, AskHuman)
        assert f"replay: {why}" in restart.because, restart.because


def test_a_suspect_of_the_replay_is_evicted() -> None:
    job = checked()
    job.answers("inspect", "clean")
    job.restarts()
    job.fails()
    job.answers("roll_back", "clean")
    (action,) = job.answers("replay", "suspects", "node-3")
    assert isinstance(action, Evict) and action.nodes == ("node-3",)


def test_after_the_checks_have_evicted_somebody_the_code_is_next() -> None:
    job = checked(PATIENT)
    job.answers("inspect", "suspects", "node-2")
    job.restarts()
    assert isinstance(job.fails(nodes=("node-3",))[0], RollBack)


def test_after_an_eviction_the_next_failure_asks_the_checks() -> None:
    job = Job(standby=1, policy=ALL)
    job.opens("node-1")
    job.fault()
    job.write(_ended(job))
    job.restarts()
    assert names(job.fails(nodes=("node-2",))) == ["Inspect"]


def _ended(job: Job) -> Any:
    from evertrain.model.records import AttemptEnded

    return AttemptEnded(
        time=job.now, attempt=job.state.next_attempt - 1, outcome="failed", step=0, relative_step=0, progress=False
    )


def test_no_answer_in_time_is_the_next_rung() -> None:
    job = checked()
    (action,) = job.answers("inspect", "not_available")
    assert isinstance(action, Restart) and "stop-time checks: no answer" in action.because


def test_an_answer_that_comes_too_late_changes_nothing() -> None:
    job = checked()
    job.answers("inspect", "clean")
    assert job.answers("inspect", "suspects", "node-2") == ()


def test_what_is_not_available_is_passed_over_and_named() -> None:
    job = Job(standby=1)
    job.fails(progress=True)
    job.restarts()
    (second,) = job.fails()
    assert isinstance(second, Restart) and "stop-time checks: not available" in second.because


def test_where_there_are_no_checks_odd_hardware_of_those_it_names_makes_them_suspects() -> None:
    job = Job(standby=1)
    job.fails(progress=True)
    job.restarts()
    job.reading()
    (action,) = job.fails()
    assert isinstance(action, Evict) and action.nodes == ("node-1",)
    assert action.evidence[0] == "node-1: Xid 63"
    other = Job(standby=1)
    other.fails(progress=True)
    other.restarts()
    other.reading("node-3")
    assert names(other.fails()) == ["Restart"], "that of somebody else is not"


def test_wrong_numbers_are_checked_at_once() -> None:
    assert names(Job(policy=ALL).fails(category="numerics", cause="loss is NaN")) == ["Inspect"]
    (action,) = Job().fails(category="numerics", cause="loss is NaN")
    assert isinstance(action, Restart) and "not available" in action.because


def test_damaged_copies_restart_from_others_and_count_for_nothing() -> None:
    job = Job()
    for _ in range(5):
        assert names(job.fails(category="storage", is_damage=True)) == ["Restart"]
        job.restarts()


def test_storage_that_is_away_is_waited_for_longer_each_time() -> None:
    job = Job()
    waits = []
    for _ in range(6):
        (action,) = job.fails(category="storage", cause="no answer from /mnt/data")
        assert isinstance(action, Hold)
        waits.append(action.until - job.now)
        job.restarts()
    assert waits == [30, 60, 120, 240, 480, 600]


def test_storage_that_stays_away_ends_the_job() -> None:
    job = Job()
    for _ in range(8):
        job.fails(category="storage")
        job.restarts()
    assert names(job.fails(category="storage")) == ["Stop"]


# -- an exception ------------------------------------------------------------------------------------------------------

BUG: dict[str, Any] = {"cause": "exception ValueError", "category": "user_code", "signature": "ValueError at t.py:7"}


def test_an_exception_restarts_and_the_same_at_the_same_step_ends_the_job() -> None:
    job = Job(standby=1)
    assert names(job.fails(**BUG, step=3, progress=True)) == ["Restart"]
    job.restarts()
    (action,) = job.fails(**BUG, step=3)
    assert isinstance(action, Stop)
    assert action.because == "rank 2 on node-1 ended twice with the same exception ValueError at the same step"


def test_at_other_steps_it_goes_on() -> None:
    job = Job()
    for step in range(10):
        assert names(job.fails(**BUG, step=step, progress=True)) == ["Restart"]
        job.restarts()


def test_before_it_ends_for_its_code_a_recent_change_is_undone() -> None:
    job = Job(policy=ALL)
    assert names(job.fails(**BUG, step=3, progress=True)) == ["Restart"], "it makes progress"
    job.restarts()
    assert names(job.fails(**BUG, step=3)) == ["RollBack"]
    assert names(job.answers("roll_back", "done")) == ["Restart"]
    job.restarts()
    assert names(job.fails(**BUG, step=3)) == ["Stop"]


def test_an_exception_right_after_a_change_is_answered_at_once() -> None:
    assert names(Job(policy=ALL).fails(**BUG)) == ["RollBack"]


def test_a_change_of_yesterday_is_not_suspected() -> None:
    job = Job(policy=ALL)
    job.now += ALL.code.recent_s + 1
    assert names(job.fails(**BUG, step=3)) == ["Restart"]
    job.restarts()
    assert names(job.fails(**BUG, step=3)) == ["Stop"]


def test_an_exception_on_a_machine_that_is_known_to_be_broken_is_no_reason_to_undo_a_change() -> None:
    job = Job(4, policy=ALL)
    job.fault("node-1")
    job.fails(signature="RuntimeError", category="gpu_hardware")
    job.restarts()
    assert "RollBack" not in names(job.fails(signature="RuntimeError", category="gpu_hardware"))
    other = Job(4, policy=ALL)
    other.fault("node-3")
    assert names(other.fails(signature="RuntimeError")) == ["RollBack"], "another one is broken"


def test_an_update_that_waits_comes_before_a_roll_back() -> None:
    job = Job(policy=ALL)
    job.asks_for_update(urgent=False)
    (action,) = job.fails(**BUG)
    assert names((action,)) == ["Restart"] and "version 3" in action.because


def test_a_hang_that_a_change_has_brought_is_rolled_back() -> None:
    job = Job(policy=ALL)
    assert names(job.fails("hang", cause="hang (still)")) == ["Restart"]
    job.restarts()
    assert names(job.fails("hang", cause="hang (still)")) == ["RollBack"]
    unchanged = Job()
    unchanged.fails("hang", nodes=(), cause="hang (still)")
    unchanged.restarts()
    assert names(unchanged.fails("hang", nodes=(), cause="hang (still)")) == ["Restart"]


def test_the_same_exception_in_an_earlier_run_does_not_count() -> None:
    job = Job()
    job.fails(**BUG, step=3, progress=True)
    assert job.state.run is not None
    job.write(replace(job.state.run, time=job.now + 60))
    job.restarts()
    assert names(job.fails(**BUG, step=3)) == ["Restart"]


# -- where it ends -----------------------------------------------------------------------------------------------------


def test_three_attempts_without_progress_end_the_job_and_say_what_was_not_tried() -> None:
    job = Job()
    for _ in range(2):
        assert "Stop" not in names(job.fails())
        job.restarts()
    (action,) = job.fails()
    assert isinstance(action, Stop) and "3 attempts in a row made no progress" in action.because
    for rung in ("stop-time checks", "roll-back", "replay"):
        assert f"{rung}: not available" in action.because


def test_a_job_that_makes_progress_is_never_ended_nor_rolled_back() -> None:
    job = Job(policy=ALL)
    for _ in range(20):
        done = names(job.fails(progress=True))
        if done == ["Inspect"]:
            done = names(job.answers("inspect", "clean"))
        assert done[0] == "Restart"
        job.restarts()


def test_evidence_at_the_last_moment_still_evicts_once() -> None:
    job = Job(standby=2, policy=Policy(ladder=LadderConfig(budget_nodes=9)))
    for _ in range(2):
        job.fails(nodes=("node-3",))
        job.restarts()
    job.reading()
    assert names(job.fails()) == ["Evict"]
    job.restarts()
    job.reading("node-2")
    assert names(job.fails(nodes=("node-2",))) == ["Stop"]


def test_max_restarts_caps() -> None:
    job = Job(max_restarts=1)
    assert names(job.fails(progress=True)) == ["Restart"]
    job.restarts()
    (action,) = job.fails(progress=True)
    assert isinstance(action, Stop) and "1 of 1 restarts are used (--max-restarts)" in action.because


@pytest.mark.parametrize("source", ["saves", "verification"])
def test_bad_saves_and_verifications_are_failures_without_a_culprit(source: str) -> None:
    job = Job(policy=ALL)
    for answer in ("Restart", "Restart", "Inspect"):  # who makes progress is not kept from it the second time already
        assert names(job.fails(source, nodes=(), ranks=(), progress=True)) == [answer]
        job.restarts()


# -- a hang ------------------------------------------------------------------------------------------------------------


def hang(job: Job, *nodes: str, **more: Any) -> tuple[d.AnyAction, ...]:
    return job.fails("hang", nodes=nodes, cause="hang (still)", **{"progress": True, **more})


def test_a_first_hang_restarts_and_tells_how_to_declare_what_takes_long() -> None:
    (action,) = hang(Job(standby=1), "node-1")
    assert isinstance(action, Restart) and "with evertrain.phase" in action.because


def test_hardware_evidence_beside_a_hang_evicts_at_once() -> None:
    for sign in ("reading", "alert"):
        job = Job(standby=1)
        getattr(job, sign)()
        job.now += 599
        (action,) = hang(job, "node-1")
        assert isinstance(action, Evict) and action.nodes == ("node-1",)
        assert len(action.evidence) >= 2


def test_old_evidence_counts_no_more_and_that_of_others_never() -> None:
    job = Job(standby=1)
    job.reading()
    job.now += 601
    job.reading("node-2")
    job.blind("node-1")
    assert names(hang(job, "node-1")) == ["Restart"]


def test_the_second_hang_at_the_same_node_within_a_day_evicts_it() -> None:
    job = Job(standby=1)
    hang(job, "node-1")
    job.restarts()
    job.is_proven()
    job.now += 86_000
    (action,) = hang(job, "node-1")
    assert isinstance(action, Evict) and "node-1 hung before, in incident 1" in action.evidence


def test_the_second_hang_at_another_node_or_after_a_day_restarts() -> None:
    job = Job(standby=1)
    hang(job, "node-1")
    job.restarts()
    assert names(hang(job, "node-2")) == ["Restart"]
    job.restarts()
    job.now += 86_401
    assert names(hang(job, "node-1")) == ["Restart"]


def test_a_process_that_does_not_end_evicts_at_once() -> None:
    (action,) = hang(Job(standby=1), "node-1", stuck=("node-1",))
    assert isinstance(action, Evict) and any("does not end" in line for line in action.evidence)


@pytest.mark.parametrize("category", ["data", "storage", "hang_dataloader", "user_code"])
def test_a_hang_that_no_machine_causes_never_evicts(category: str) -> None:
    job = Job(standby=1)
    for _ in range(3):
        job.reading()
        assert names(hang(job, "node-1", category=category)) == ["Restart"]
        job.restarts()


@pytest.mark.parametrize("category", ["storage", "hang_dataloader", "user_code"])
def test_a_hang_that_no_machine_causes_counts_against_nobody_later(category: str) -> None:
    job = Job(standby=1)
    hang(job, "node-1", category=category)
    job.restarts()
    job.is_proven()
    assert names(hang(job, "node-1")) == ["Restart"], "of all that a machine may have caused it is the first"
    job.restarts()
    job.is_proven()
    assert names(hang(job, "node-1")) == ["Evict"]


def test_a_hang_that_names_nobody_never_evicts() -> None:
    job = Job(standby=1)
    for _ in range(3):
        job.reading()
        assert names(hang(job, ranks=())) == ["Restart"]
        job.restarts()


def test_nothing_to_replace_it_with_restarts_and_says_so() -> None:
    job = Job(least=1, is_stored=True)
    job.reading()
    (action,) = hang(job, "node-1")
    assert isinstance(action, Restart) and "0 standbys are ready for 1 node" in action.because


def test_a_whole_group_goes_only_if_all_of_it_can_be_replaced() -> None:
    assert names(hang(Job(nodes=6, standby=2), "node-1", "node-2", is_group=True)) == ["Evict"]
    assert names(hang(Job(nodes=6, standby=1), "node-1", "node-2", is_group=True)) == ["Restart"]


def test_one_group_in_the_window_is_beyond_the_budget_a_second_is_not() -> None:
    job = Job(nodes=6, standby=4)
    assert names(hang(job, "node-1", "node-2", is_group=True)) == ["Evict"]
    job.restarts()
    assert names(hang(job, "node-3", "node-4", is_group=True)) == ["Restart", "AskHuman"]


def test_the_papers_rule_evicts_whom_a_hang_names() -> None:
    job = Job(standby=1, policy=ladder.policy_of(Config(hang=HangConfig(policy="paper"))))
    assert names(hang(job, "node-1", category="hang_dataloader")) == ["Restart"], "no machine's fault"
    (action,) = hang(job, "node-1")
    assert isinstance(action, Evict) and "hang.policy: paper" in action.because
    job.restarts()
    assert names(hang(job, "node-2")) == ["Restart"], "nobody is left to replace it"


# -- a lost node -------------------------------------------------------------------------------------------------------


def lose(job: Job, node: str = "node-1", state: str = "lost") -> tuple[d.AnyAction, ...]:
    job.becomes(node, state)
    return job.fails("lost", nodes=(node,), cause="node lost", category="host_os")


def test_a_lost_node_is_replaced() -> None:
    (action,) = lose(Job(standby=1))
    assert isinstance(action, Evict) and action.lost and action.replacements == {"node-1": "node-4"}


def test_or_the_job_goes_on_with_fewer() -> None:
    job = Job(least=2, is_stored=True)
    (action,) = lose(job)
    assert isinstance(action, Evict) and action.lost and len(job.state.active_nodes()) == 3


def test_or_it_is_waited_for() -> None:
    (action,) = lose(Job())
    assert isinstance(action, Restart) and "up to 300 s for it to come back" in action.because


def test_while_it_is_waited_for_a_standby_that_comes_takes_over() -> None:
    job = Job()
    lose(job)
    job.arrives("node-9")
    (action,) = job.ready("node-9")
    assert isinstance(action, Evict) and action.lost and action.replacements == {"node-1": "node-9"}


def test_one_that_is_back_is_taken_back_the_first_time_and_evicted_the_second() -> None:
    job = Job(standby=1)
    assert names(lose(job, state="active")) == ["Restart"]
    job.restarts()
    (action,) = lose(job, state="active")
    assert isinstance(action, Evict) and not action.lost
    assert "node-1 was lost before, in incident 1" in action.evidence


def test_a_lost_node_that_has_returned_is_tested_like_any_other() -> None:
    job = Job(standby=1)
    lose(job)
    assert names(job.arrives("node-1")) == ["Tolerate"]
    job.now += 600
    assert isinstance(job.tested()[0], Enlist)


# -- rules that hold everywhere ----------------------------------------------------------------------------------------


def test_observe_only_performs_nothing_and_says_what_it_would() -> None:
    job = Job(standby=1, observe_only=True)
    (action,) = job.fault()
    assert isinstance(action, Tolerate) and "it would evict node-1 (node-4" in action.because
    (stop,) = job.fails()
    assert isinstance(stop, Stop) and "with --observe-only nothing is restarted (it would: evict node-1" in stop.because
    assert job.state.roster == ("node-0", "node-1", "node-2", "node-3", "node-4")


def test_a_decision_says_what_was_decided_by_which_policy_and_why() -> None:
    job = Job(standby=1)
    number = job.opens("node-1")
    job.fault()
    decided = job.log[-1]
    assert (decided.incident, decided.action, decided.policy) == (number, "evict", job.hash)  # type: ignore[union-attr]
    assert "node-1: gpu lost" in decided.because  # type: ignore[union-attr]


def test_a_step_is_a_decision_that_is_written_down() -> None:
    job = Job(standby=1)
    event = d.NodeFault(time=job.now, node="node-1", signal="gpu_lost", evidence="gone")
    state, actions = ladder.step(job.state, event, job.policy)
    job.tell(event)
    assert state == job.state and actions == job.log[-1].actions  # type: ignore[union-attr]


def test_a_policy_has_the_same_name_in_every_process_and_another_has_another() -> None:
    code = "from evertrain.decide import ladder; from evertrain.model.decisions import Policy as P; "
    there = subprocess.run(
        [sys.executable, "-c", f"{code}print(ladder.policy_hash(P()))"], capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == ladder.policy_hash(Policy())
    others = {ladder.policy_hash(one) for one in (Policy(), ALL, Policy(ladder=LadderConfig(alerts_to_evict=3)))}
    assert len(others) == 3


def test_a_policy_is_all_of_the_configuration_that_a_decision_depends_on() -> None:
    config = Config(hang=HangConfig(policy="paper"), ladder=LadderConfig(reattempts=2))
    policy = ladder.policy_of(config, ["roll_back", "inspect"])
    assert (policy.hang_policy, policy.ladder.reattempts, policy.sources) == ("paper", 2, ("inspect", "roll_back"))
