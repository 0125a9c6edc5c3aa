"""Every second is productive or lost, and the lost ones are told apart."""

from __future__ import annotations

from itertools import pairwise, zip_longest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from evertrain.controller import ledger
from evertrain.controller.ledger import PLANNED_RESTART, PLANNED_STOP, START, VERIFICATION, Account, Run, Stretch
from evertrain.model.config import Config, RestartConfig
from evertrain.model.records import (
    AttemptEnded,
    AttemptEnding,
    AttemptStarted,
    JobEnded,
    Progress,
    RestartRequested,
    RunStarted,
    TermStarted,
)
from evertrain.model.report import RankError
from support.effort import examples
from support.world import World


def training(steps: int = 10, **options: object) -> World:
    world = World(**options)  # type: ignore[arg-type]
    world.turns()
    world.train(steps)
    world.turn()
    return world


def run_again(world: World, later_s: float = 100.0) -> None:
    """The same command once more; memory is empty, disks are not."""
    world.now += later_s
    for node in world.nodes.values():
        node.attempts, node.memory, node.order, node.last_attempt, node.flushed = {}, [], None, 0, None
    world.write(RunStarted(time=world.now, run_id=f"job-{world.now}", nodes=tuple(world.nodes), standby=0,
                           nproc_per_node=2, fresh=False, start="zygote", command="t.py"))  # fmt: skip
    world.write(TermStarted(time=world.now, term=world.state.term + 1))
    world.turns()


def run(world: World) -> Run:
    return ledger.runs(world.log, world.now)[-1]


def parts(world: World) -> list[tuple[str, Account | None]]:
    return [(part.phase, part.account) for part in ledger.stretches(run(world))]


def lost(world: World, account: Account) -> list[Stretch]:
    return [part for part in ledger.stretches(run(world)) if part.account == account]


# -- one run ---------------------------------------------------------------------------------------------------------


def test_a_run_without_faults_loses_only_its_start() -> None:
    world = World()
    world.turns(8)
    begun = world.state.attempts[0].resumed
    assert begun is not None
    end = 1000.0 + 10 * (begun.resumed_time - 1000.0)
    assert ledger.ettr(world.state, end) == pytest.approx(0.9, abs=1e-3)


def test_what_the_command_did_before_the_first_record_is_start_up() -> None:
    world = World(began_time=998.5)
    world.now += 5
    (part,) = ledger.stretches(run(world))
    assert (part.phase, part.account, part.seconds) == ("start", START, 6.5)


def test_before_the_first_step_all_is_lost() -> None:
    world = World()
    world.now += 5
    assert ledger.ettr(world.state, world.now) == 0.0
    assert parts(world) == [("start", START)]


def test_an_incident_is_lost_from_the_last_progress_to_the_first_new_step() -> None:
    world = training()
    for node in world.nodes.values():
        node.memory_is_tight = True  # so nothing waits ahead, and the way back takes its time
    world.turn()
    last_progress = world.now - 0.1
    world.now += 2.0
    world.fail(1)
    world.turns()
    world.train()
    passed = world.now
    world.turns()
    mine = lost(world, Account(world.state.incidents[1].opened.category, "restart", 1))
    assert (mine[0].start, mine[-1].end) == pytest.approx((last_progress, passed), abs=0.11)
    assert [part.phase for part in mine] == ["recompute", "detect", "failover", "recompute"]
    phases = ledger.seconds(world.state.incidents[1])
    assert phases.detect is not None and phases.failover is not None
    assert phases.recompute is not None and phases.recompute > 0
    by_phase = {part.phase: part.seconds for part in mine[1:]}
    assert by_phase["recompute"] == pytest.approx(phases.recompute, abs=1e-3)
    assert by_phase["failover"] == pytest.approx(phases.failover, abs=1e-3)


def test_steps_done_again_are_not_productive() -> None:
    world = training(10)
    for node in world.nodes.values():
        node.memory = [replace(copy, step=0) for copy in node.memory]  # only the first step was kept
    world.fail(1)
    world.turns()
    world.train(9)  # 1 to 9: all of them known
    world.turn()
    category = world.state.incidents[1].opened.category
    assert lost(world, Account(category, "restart", 1))[-1].end == pytest.approx(world.now)
    world.train(5)
    world.turn()
    redone = lost(world, Account(category, "restart", 1))[-1]
    assert redone.phase == "recompute"
    assert redone.seconds == pytest.approx(1.0, abs=0.5)


def test_a_fault_before_the_first_step_ends_the_start() -> None:
    world = World()
    world.turns(4)
    world.fail(0)
    world.turns()
    world.train(3)
    world.turns()
    names = [account.mechanism if account else "productive" for _, account in parts(world)]
    assert names[0] == "start_up" and names[-1] == "productive"
    assert set(names) == {"start_up", "restart", "productive"}


def test_a_fault_on_the_way_back_begins_an_account_of_its_own() -> None:
    world = training()
    world.fail(0)
    world.turns()
    world.now += 3.0
    world.fail(1)
    world.turns()
    world.train(2)
    world.turns()
    booked = [account.incident for _, account in parts(world) if account is not None and account.incident is not None]
    assert booked == sorted(booked) and set(booked) == {1, 2}
    assert parts(world)[-1] == ("productive", None)


def test_who_is_only_watched_costs_nothing() -> None:
    world = training()
    world.hang(1, cpu_fraction=1.0)
    world.turns(60, seconds=0.5)
    assert world.state.tolerated is not None
    assert [phase for phase, _ in parts(world)] == ["start", "productive"]


def test_a_hang_is_lost_from_the_moment_nothing_moved() -> None:
    world = training()
    stood = world.now
    world.hang(1)
    world.turns(60, seconds=0.5)
    (incident,) = world.state.incidents.values()
    mine = lost(world, Account(incident.opened.category, "restart", 1))
    assert mine[0].start == pytest.approx(stood, abs=0.2)
    assert {part.phase for part in mine} >= {"detect", "failover"}
    detect = next(part for part in mine if part.phase == "detect")
    assert detect.seconds == pytest.approx(10.0, abs=1.5)


def test_a_request_to_stop_is_a_planned_stop_from_the_last_step_on() -> None:
    world = training()
    world.now += 4.0
    world.stop()
    world.turns()
    assert world.state.ended is not None
    assert [phase for phase, _ in parts(world)] == ["start", "productive", "stop"]
    (stop,) = lost(world, PLANNED_STOP)
    assert (stop.start, stop.end) == pytest.approx((world.now - 0.45 - 4.0, world.state.ended.time), abs=0.2)


@pytest.mark.parametrize("user_is_faster", [False, True])
def test_a_change_of_the_code_that_brings_training_back_is_its_mechanism(user_is_faster: bool) -> None:
    world = training()
    world.capture()
    world.change("new")
    world.turns()
    if user_is_faster:
        world.change("mended", within_s=3600)
    world.fail(1, 1, error=RankError(type="TypeError", message="no", file="train.py", line=3))
    world.turns()
    assert world.state.incidents[1].decided is not None and world.state.incidents[1].decided.action == "restart"
    found = {part.account.mechanism for part in ledger.stretches(run(world)) if part.account and part.account.incident}
    assert found == {"hot_update" if user_is_faster else "roll_back"}


def test_an_end_without_incident_between_two_attempts_is_a_planned_restart() -> None:
    world = training()
    log = list(world.log)
    first = next(record for record in log if isinstance(record, AttemptStarted))
    mark = Progress(time=1010.0, attempt=1, step=90, relative_step=90, progress_time=1010.0)
    log += [
        mark,
        AttemptEnding(time=1012.0, attempt=1, signal=15, because="restart asked for"),
        replace(mark, time=1014.0, progress_time=1011.0),
        AttemptEnded(time=1014.0, attempt=1, outcome="stopped", step=90, relative_step=90, progress=True),
        replace(first, time=1020.0, attempt=2, resume=90, reached=90),
    ]
    seen = ledger.stretches(ledger.runs(log, 1030.0)[0])[-2:]
    assert [(part.start, part.phase, part.account) for part in seen] == [
        (seen[0].start, "productive", None),
        (1011.0, "failover", PLANNED_RESTART),
    ]


def asked(world: World, **more: object) -> None:
    number = world.state.attempts[-1].number
    world.write(RestartRequested(time=world.now, restart=f"r{number}", attempt=number, **more))  # type: ignore[arg-type]
    world.turns()


def steps_and_turns(world: World, number: int) -> float:
    """When the third of these steps was done."""
    done = []
    for _ in range(number):
        world.train()
        done.append(world.now)
        world.turn()
    return done[2]


def test_a_restart_that_was_asked_for_is_planned_until_the_first_new_step() -> None:
    world = training()
    last_progress = world.now - 0.05
    asked(world, from_step=7)
    first_new = steps_and_turns(world, 6)
    mine = lost(world, PLANNED_RESTART)
    assert [part.phase for part in mine] == ["failover", "recompute"]
    assert (mine[0].start, mine[1].end) == pytest.approx((last_progress, first_new), abs=0.01)
    assert parts(world)[-1] == ("productive", None)
    assert lost(world, VERIFICATION) == []


def test_what_a_verification_takes_is_its_own_account_and_no_other_restarts() -> None:
    world = training()
    last_progress = world.now - 0.05
    asked(world, verify=2)
    first_new = steps_and_turns(world, 6)
    asked(world)
    world.train(2)
    world.turn()
    mine = lost(world, VERIFICATION)
    assert [part.phase for part in mine] == ["failover", "recompute"]
    assert (mine[0].start, mine[1].end) == pytest.approx((last_progress, first_new), abs=0.01)
    assert [part.phase for part in lost(world, PLANNED_RESTART)] == ["failover"]


def test_a_fault_on_the_way_of_a_verification_is_booked_on_the_fault() -> None:
    world = training()
    asked(world, verify=2)
    world.train(1)
    world.turn()
    world.fail(1)
    world.turns()
    world.train(3)
    world.turn()
    mine = [account.category for _, account in parts(world) if account is not None]
    assert mine.index("verification") < mine.index(world.state.incidents[1].opened.category)
    assert parts(world)[-1] == ("productive", None)


def test_the_way_back_of_a_script_that_names_no_steps_ends_in_its_loop() -> None:
    world = training()
    world.fail(1)
    world.turns()
    world.train()
    world.turns()
    log = [
        replace(record, step=None, relative_step=5)
        if isinstance(record, Progress)
        else replace(record, reached=None, resume=None)
        if isinstance(record, AttemptStarted)
        else record
        for record in world.log
    ]
    # such a script never says that it has passed: the incident stays open
    log = [record for record in log if type(record).__name__ != "IncidentClosed"]
    (only,) = ledger.runs(log, world.now + 50.0)
    last = ledger.stretches(only)[-1]
    assert last.phase == "productive" and last.seconds > 50.0


# -- several runs ----------------------------------------------------------------------------------------------------


def test_each_run_has_its_own_account_and_the_time_between_is_nobodys() -> None:
    world = training()
    world.stop()
    world.turns()
    run_again(world)
    world.train(5)
    world.turns()
    first, second = ledger.runs(world.log, world.now)
    assert second.start - first.end > 90.0
    assert ledger.stretches(second)[0].account == START
    both = ledger.share([first, second])
    assert both is not None and 0.0 < both < 1.0


def test_a_run_that_was_killed_ends_with_its_last_record_and_its_steps_are_redone() -> None:
    world = training()
    for node in world.nodes.values():  # on disk: an old step
        node.disk = [replace(copy, step=2, tier="disk") for copy in node.memory if copy.step == 9]
    mark = Progress(time=world.now, attempt=1, step=9, relative_step=10, progress_time=world.now)
    world.write(mark)
    died = world.log[-1].time
    run_again(world, later_s=500.0)
    attempt = world.state.active
    assert attempt is not None and (attempt.started.resume, attempt.started.reached) == (2, 9)
    assert attempt.resumed is not None
    back = attempt.resumed.resumed_time
    log = [*world.log, replace(mark, attempt=2, step=22, time=back + 40.0, progress_time=back + 40.0)]
    first, second = ledger.runs(log, back + 50.0)
    assert first.end == died
    # 20 steps in 40 s, of which 8 led to the first new one, number 10
    assert [(part.phase, part.account) for part in ledger.stretches(second)] == [
        ("start", START),
        ("recompute", START),
        ("productive", None),
    ]
    assert ledger.stretches(second)[1].end == pytest.approx(back + 16.0, abs=1.1)


# -- ETTR ------------------------------------------------------------------------------------------------------------


def test_the_hour_forgets_what_the_whole_remembers() -> None:
    world = World()
    world.now += 60.0
    world.turns()
    later = world.now + 7200.0
    whole, hour = ledger.ettr(world.state, later), ledger.ettr(world.state, later, window_s=3600.0)
    assert hour == 1.0
    assert whole is not None and whole < 1.0


def marked(*marks: tuple[float, int], tokens: tuple[float, ...] = ()) -> Run:
    """A run whose only attempt is in its loop after 100 s and has these marks (time after that, step), maybe tokens."""
    world = World()
    world.now += 100.0
    world.turns()
    resumed = world.state.attempts[0].resumed
    assert resumed is not None
    begin = resumed.resumed_time
    log = [record for record in world.log if not isinstance(record, Progress)]
    for (at, step), seen in zip_longest(marks, tokens, fillvalue=0.0):  # type: ignore[misc]
        mark = Progress(time=begin + at, attempt=1, step=step, relative_step=step, progress_time=begin + at)
        log.append(replace(mark, tokens=seen))
    return ledger.runs(log, begin + marks[-1][0])[0]


def test_at_full_speed_the_weighted_value_is_the_plain_one() -> None:
    seen = marked((0, 0), (100, 10), (200, 20), (300, 30), (400, 40))
    assert ledger.share([seen], weighted=True) == ledger.share([seen])


def test_slow_steps_weigh_less() -> None:
    # three stretches at 1 step a second, then two at half of it
    seen = marked((0, 0), (100, 100), (200, 200), (300, 300), (400, 350), (500, 400))
    plain, weighted = ledger.share([seen]), ledger.share([seen], weighted=True)
    assert plain is not None and weighted is not None
    assert weighted / plain == pytest.approx(400 / 500, abs=1e-3)
    assert ledger.share([seen], 150.0, weighted=True) == pytest.approx(0.5)


def test_a_save_without_steps_makes_the_next_interval_longer() -> None:
    seen = marked((0, 0), (100, 100), (200, 200), (300, 300), (350, 300), (450, 400))
    plain, weighted = ledger.share([seen]), ledger.share([seen], weighted=True)
    assert plain is not None and weighted is not None
    assert weighted / plain == pytest.approx(400 / 450, abs=1e-3)


def test_where_tokens_are_reported_their_speed_counts_and_not_that_of_the_steps() -> None:
    # steps take twice as long after 300 s, for they are twice as long
    steps = ((0, 0), (100, 100), (200, 200), (300, 300), (400, 350), (500, 400))
    seen = marked(*steps, tokens=(0, 1000, 2000, 3000, 4000, 5000))
    assert ledger.share([seen], weighted=True) == ledger.share([seen])
    slower = marked(*steps, tokens=(0, 1000, 2000, 3000, 4000, 4500))
    plain, weighted = ledger.share([slower]), ledger.share([slower], weighted=True)
    assert plain is not None and weighted is not None
    assert weighted / plain == pytest.approx(450 / 500, abs=1e-3)


def test_where_no_speed_is_known_a_second_counts_in_full() -> None:
    seen = marked((50, 0))
    assert ledger.share([seen], weighted=True) == ledger.share([seen])


# -- it adds up ------------------------------------------------------------------------------------------------------

HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("train"), st.integers(1, 5)),
        st.tuples(st.just("turns"), st.integers(1, 8)),
        st.tuples(st.just("fail"), st.integers(0, 3)),
        st.tuples(st.just("hang"), st.integers(0, 3)),
        st.tuples(st.just("wait"), st.integers(1, 40)),
        st.tuples(st.just("lose"), st.integers(0, 1)),
        st.tuples(st.just("return"), st.integers(0, 1)),
        st.tuples(st.just("take over"), st.sampled_from([0, 3600])),
        st.tuples(st.just("stop"), st.just(15)),
        st.tuples(st.just("again"), st.integers(1, 300)),
    ),
    max_size=25,
)


def happen(world: World, what: str, number: int) -> None:
    match what:
        case "train":
            world.train(number)
        case "turns":
            world.turns(number)
        case "fail" if number in world.running():
            world.fail(number, later=0.01)
        case "hang" if number in world.running():
            world.hang(number)
        case "wait":
            world.turn(float(number))
        case "lose":
            world.lose_keeper(f"node-{number}")
        case "return":
            world.bring_back(f"node-{number}")
        case "take over":
            world.take_over(jump_s=number)
        case "stop" if world.state.ended is None:
            world.stop(number)
        case "again":
            for name in world.nodes:
                world.bring_back(name)
            run_again(world, float(number))


@settings(max_examples=examples(60), deadline=None)
@given(HAPPENINGS)
def test_all_parts_of_a_job_sum_up_to_its_wall_time(happenings: list[tuple[str, int]]) -> None:
    world = World(config=Config(restart=RestartConfig(no_progress_attempts=1000, node_return_s=1e6)))
    for what, number in happenings:
        happen(world, what, number)
    runs = ledger.runs(world.log, world.now)
    between = sum(after.start - before.end for before, after in pairwise(runs))
    booked = 0.0
    for seen in runs:
        cut = ledger.stretches(seen)
        edges = [seen.start, *(part.end for part in cut)]
        assert [part.start for part in cut] == edges[:-1], "without a gap and without an overlap"
        assert edges[-1] == max(seen.end, seen.start)
        assert all(part.end > part.start for part in cut)
        assert all((part.phase == "productive") == (part.account is None) for part in cut)
        booked += sum(part.seconds for part in cut)
        known = {incident.number for incident in seen.state.incidents.values() if not incident.opened.tolerated}
        assert {part.account.incident for part in cut if part.account is not None} <= known | {None}
        weighted, plain = ledger.share([seen], weighted=True), ledger.share([seen])
        assert weighted is None or (plain is not None and 0.0 <= weighted <= plain <= 1.0)
    end = world.state.ended.time if world.state.ended is not None else world.now
    assert booked + between == pytest.approx(end - 1000.0, abs=1e-6)
    live = ledger.ettr(world.state, world.now)
    assert live is None or 0.0 <= live <= 1.0


@settings(max_examples=examples(30), deadline=None)
@given(HAPPENINGS)
def test_an_ended_job_is_never_booked_again(happenings: list[tuple[str, int]]) -> None:
    """Whoever asks a year later gets the same answer."""
    world = World()
    for what, number in happenings:
        happen(world, what, number)
    world.write(JobEnded(time=world.now, state="failed", exit_code=1, message="enough"))
    assert ledger.runs(world.log, world.now) == ledger.runs(world.log, world.now + 3e7)
    assert ledger.ettr(world.state, world.now) == ledger.ettr(world.state, world.now + 3e7)
