"""The life of a job: from the first attempt over faults to its end, in virtual time and without a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from evertrain.controller import views
from evertrain.decide import changes, planned, rollback
from evertrain.decide.changes import Wish
from evertrain.decide.progress import steps
from evertrain.model.code import Code
from evertrain.model.config import Config, RestartConfig
from evertrain.model.copies import Copy
from evertrain.model.records import (
    AttemptEnding,
    AttemptStarted,
    IncidentOpened,
    JobEnded,
    Progress,
    RestartRequested,
    SignalRaised,
    TermStarted,
)
from evertrain.model.report import Exit, RankError
from support.effort import examples
from support.world import LOST, World

BUG = RankError(type="ValueError", message="boom", file="/t.py", line=7, step=3)


def running(**options: object) -> World:
    world = World(**options)  # type: ignore[arg-type]
    world.turns()
    assert world.running(), "the first attempt has started"
    return world


def incident(world: World, index: int = -1) -> dict[str, object]:
    return views.incidents(world.state)[index]


def test_first_attempt_starts_when_every_node_has_prepared() -> None:
    world = World()
    world.nodes["node-1"].connected = False
    world.turns()
    assert not world.running()
    world.nodes["node-1"].connected = True
    world.turns()
    assert world.running() == {0: 1, 1: 1, 2: 1, 3: 1}


def test_next_attempt_is_prepared_while_this_one_runs() -> None:
    world = running()
    world.train()
    world.turns()
    assert set(world.nodes["node-0"].attempts) == {1, 2}


def test_nothing_waits_ahead_where_memory_is_tight() -> None:
    world = running()
    world.nodes["node-1"].memory_is_tight = True
    world.train()
    world.turns()
    assert set(world.nodes["node-1"].attempts) == {1}
    world.fail(2)
    world.turns()
    assert world.running() == dict.fromkeys(range(4), 2)


def test_no_attempt_starts_while_one_that_is_over_is_still_on_a_gpu_of_a_node() -> None:
    world = running()
    world.train()
    world.turns()
    world.nodes["node-1"].gpus_held = "process 102 of attempt 1 on GPU 0 is still there"
    world.fail(2)
    world.turns()
    assert world.running() == {}
    status = views.status(world.state, world.picture(), job="job", now=world.now)
    assert status["message"] == "node-1: the start waits: process 102 of attempt 1 on GPU 0 is still there"
    world.nodes["node-1"].gpus_held = ""
    world.turns()
    assert world.running() == dict.fromkeys(range(4), 2)
    assert all(node.order is not None and node.order.gpu_wait_s == 30.0 for node in world.nodes.values())


def test_a_killed_rank_is_named_and_training_resumes_at_the_newest_common_step() -> None:
    world = running()
    world.train(5)
    world.turn()
    world.fail(2)
    world.turns()
    assert world.running() == dict.fromkeys(range(4), 2)
    assert world.state.active is not None and world.state.active.started.resume == 4
    world.train()
    world.turns()
    seen = incident(world)
    assert (seen["ranks"], seen["nodes"], seen["cause"]) == ([2], ["node-1"], "killed (SIGKILL)")
    assert (seen["action"], seen["first_new_step"]) == ("restart", 5)
    assert seen["seconds"]["recompute"] is not None  # type: ignore[index]


def test_marks_add_up_the_tokens_of_all_ranks() -> None:
    world = running()
    world.tokens_a_step = 10.0
    world.train(5)
    world.turn(10.0)
    world.fail(2)
    world.turns()
    marks = [record for record in world.log if isinstance(record, Progress)]
    assert [mark.tokens for mark in marks if mark.attempt == 1][-1] == 4 * 5 * 10.0
    world.nodes["node-1"].connected = False
    world.take_over()
    world.train(150)
    world.turn()
    newest = world.log[-1]
    assert isinstance(newest, Progress) and newest.attempt == 2
    assert newest.tokens == 0.0, "half of the ranks are no sum"


def test_a_copy_from_before_a_step_back_is_void() -> None:
    world = running()
    world.train(5)
    # rank 3 never finished step 4
    world.nodes["node-1"].memory = [c for c in world.nodes["node-1"].memory if (c.rank, c.step) != (3, 4)]
    world.turn()
    world.fail(3)
    world.turns()
    assert world.state.active is not None and world.state.active.started.resume == 3
    # only rank 3 redoes step 4: the others' old copies of it must not complete it
    world.nodes["node-1"].memory.append(Copy(rank=3, step=4, attempt=2, world_size=4, tier="memory"))
    world.fail(3)
    world.turns()
    assert world.state.active.started.resume == 3


def test_survivors_are_followers_whoever_is_heard_first() -> None:
    world = running()
    world.train(3)
    world.turn()
    world.nodes["node-1"].connected = False
    frozen = world.report(world.nodes["node-1"])
    world.fail(3)
    original = world.report
    world.report = lambda node: frozen if not node.connected else original(node)  # type: ignore[method-assign]
    world.turns()
    assert incident(world)["cause"] == "connection lost"
    assert incident(world)["ranks"] == []
    assert not any(rank in world.running() for rank in (0, 1)), "survivors have ended"
    world.nodes["node-1"].connected = True
    world.turns()
    assert (incident(world)["cause"], incident(world)["ranks"]) == ("killed (SIGKILL)", [3])
    assert world.running() == dict.fromkeys(range(4), 2)


def test_an_exception_counts_from_when_it_was_raised_also_if_we_killed_the_rank_on_its_way_out() -> None:
    world = running()
    world.train(3)
    world.turn()
    raised = RankError(type="MemoryError", file="/t.py", line=7, step=3, time=world.now)
    # rank 1 takes half a second to leave; its victim is gone first, and then we kill it
    world.end(0, Exit(status=1, time=world.now + 0.1, error=LOST.error))
    process = world.process(1)
    assert process is not None
    world.turn()
    process.exit = Exit(status=-9, time=world.now, error=raised)
    world.turns()
    seen = incident(world)
    assert (seen["cause"], seen["ranks"], seen["category"]) == ("exception MemoryError", [1], "oom_host")


def test_nothing_follows_from_agents_that_cannot_be_heard() -> None:
    world = running()
    world.train(3)
    for node in world.nodes.values():
        node.connected = False
    world.turns(50, seconds=60.0)
    assert world.running() == dict.fromkeys(range(4), 1)
    assert not world.state.incidents


def test_a_lost_keeper_takes_its_ranks_with_it_and_is_waited_for() -> None:
    world = running()
    world.train(3)
    world.turn()
    world.lose_keeper("node-1")
    for rank in (0, 1):
        world.end(rank, Exit(status=1, time=world.now, error=LOST.error))
    world.turns()
    assert not world.running()
    world.bring_back("node-1")
    world.turns(12)
    assert world.running() == dict.fromkeys(range(4), 2)
    seen = incident(world)
    assert (seen["cause"], seen["nodes"], seen["ranks"]) == ("node lost", ["node-1"], [2, 3])


def test_a_node_that_never_returns_ends_the_job_with_its_name() -> None:
    world = running()
    world.turn()
    world.lose_keeper("node-1")
    world.end(0, Exit(status=1, time=world.now, error=LOST.error))
    world.turns(20, seconds=60.0)
    assert world.state.ended is not None and world.state.ended.exit_code == 1
    assert "node-1" in world.state.ended.message


def test_the_same_exception_twice_at_the_same_step_ends_the_job() -> None:
    world = running()
    for _ in range(2):
        world.train(2)
        world.turn()
        world.fail(1, 1, error=BUG)
        world.turns()
    assert world.state.ended is not None
    assert (world.state.ended.state, world.state.ended.exit_code) == ("failed", 1)
    assert "rank 1 on node-0 ended twice with the same exception ValueError" in world.state.ended.message


def test_the_same_exception_at_other_steps_goes_on() -> None:
    world = running()
    for step in range(6):
        world.train(2)
        world.turn()
        error = RankError(type="ValueError", message="boom", file="/t.py", line=7, step=step)
        world.fail(1, 1, error=error)
        world.turns()
    assert world.state.ended is None
    assert len(world.state.attempts) == 7


def test_three_attempts_without_progress_end_the_job() -> None:
    world = running()
    world.train(3)
    for _ in range(4):
        world.turns(3)
        world.fail(0, -11)
        world.turns()
    assert world.state.ended is not None
    assert "3 attempts in a row made no progress" in world.state.ended.message
    # the first attempt had made progress
    assert len(world.state.attempts) == 4


def test_progress_between_crashes_goes_on_for_ever() -> None:
    world = running()
    for _ in range(12):
        world.train(1)
        world.turns(3)
        world.fail(0, -11)
        world.turns()
    assert world.state.ended is None


def test_max_restarts_caps() -> None:
    world = running(max_restarts=1)
    for _ in range(2):
        world.train(2)
        world.turn()
        world.fail(0)
        world.turns()
    assert world.state.ended is not None and "1 of 1 restarts are used" in world.state.ended.message
    assert world.state.flushed is not None and world.state.flushed.step == 3


def test_observe_only_ends_at_the_first_death() -> None:
    world = running(observe_only=True)
    world.train(2)
    world.turn()
    assert set(world.nodes["node-0"].attempts) == {1}, "nothing is prepared that will not be used"
    world.fail(0)
    world.turns()
    assert world.state.ended is not None and world.state.ended.exit_code == 1


def test_all_ranks_with_0_complete_the_job() -> None:
    world = running()
    world.train(2)
    world.turn()
    for rank in range(4):
        world.end(rank, Exit(status=0, time=world.now))
    world.turns()
    assert world.state.ended is not None and world.state.ended.state == "done"
    assert world.nodes["node-0"].order is not None and world.nodes["node-0"].order.shutdown


def test_one_rank_with_0_gives_the_others_a_deadline_that_progress_renews() -> None:
    world = running()
    world.train(2)
    world.turn()
    world.end(2, Exit(status=0, time=world.now))
    world.turn(6.0)
    assert "rank 2 exited with 0" in str(
        views.status(world.state, world.picture(), job="job", now=world.now)["message"]
    )
    for _ in range(10):
        world.turn(200.0)
        world.train()
    assert not world.state.incidents, "ranks that make progress are left alone"
    world.turns(4, seconds=200.0)
    assert (incident(world)["cause"], incident(world)["ranks"]) == ("exited early with 0", [2])


def test_a_rank_that_hangs_in_the_interpreters_exit_has_done_its_work() -> None:
    world = running()
    world.train(2)
    world.turn()
    for rank in (0, 1, 2):
        world.end(rank, Exit(status=0, time=world.now))
    process = world.process(3)
    assert process is not None
    process.phase, process.progress = "exit", world.now
    world.turn(14.0)
    assert world.running() == {3: 1}, "it may take its time"
    world.turn(2.0)
    world.turns()
    assert world.state.ended is not None and world.state.ended.state == "done"
    assert not world.state.incidents


def test_stop_flushes_the_newest_common_step_and_keeps_the_signal() -> None:
    world = running()
    world.train(4)
    world.turn()
    world.stop(2)
    world.turns(12)
    assert world.state.ended is not None
    assert (world.state.ended.state, world.state.ended.exit_code) == ("stopped", 130)
    assert world.state.flushed is not None and world.state.flushed.step == 3


def test_stop_before_anything_ran() -> None:
    world = World()
    world.stop()
    world.turns(12)
    assert world.state.ended is not None and world.state.ended.exit_code == 143


def test_stop_does_not_wait_for_a_node_beyond_the_grace() -> None:
    world = running()
    world.train(2)
    world.turn()
    world.nodes["node-1"].connected = False
    frozen = world.report(world.nodes["node-1"])
    original = world.report
    world.report = lambda node: frozen if not node.connected else original(node)  # type: ignore[method-assign]
    world.stop()
    world.turns(40, seconds=1.0)
    assert world.state.ended is not None and world.state.ended.state == "stopped"


def test_a_gpu_signal_without_a_standby_asks_a_human_and_training_goes_on() -> None:
    world = running()
    world.train(2)
    world.turn()
    world.write(SignalRaised(time=world.now, node="node-1", signal="gpu_lost", evidence="GPU 3 has fallen off the bus"))
    world.turns()
    seen = incident(world)
    assert (seen["cause"], seen["category"], seen["nodes"]) == ("gpu lost", "gpu_hardware", ["node-1"])
    assert seen["evidence"] == ["GPU 3 has fallen off the bus"]
    assert seen["action"] == "human" and not seen["open"]
    assert world.running() == dict.fromkeys(range(4), 1)


def test_a_second_fault_before_the_first_is_made_good_is_an_incident_of_its_own() -> None:
    world = running()
    world.train(3)
    world.turn()
    world.fail(0)
    world.turns()
    world.fail(1)
    world.turns()
    first, second = views.incidents(world.state)
    assert (first["ranks"], first["first_new_step"], first["open"]) == ([0], None, False)
    assert second["ranks"] == [1]


@pytest.mark.parametrize("turns", range(12))
def test_a_controller_may_be_replaced_at_any_moment(turns: int) -> None:
    world = running()
    world.train(3)
    world.turn()
    world.fail(1)
    for turn in range(14):
        if turn == turns:
            world.take_over()
        world.turn()
    assert world.running() == dict.fromkeys(range(4), 2)
    assert len(world.state.attempts) == 2


def a_node_is_away(world: World) -> None:
    world.fail(0)
    world.nodes["node-1"].connected = False
    world.turns()


def an_end_is_waited_for(world: World) -> None:
    frozen = world.report(world.nodes["node-1"])
    world.fail(0)
    world.nodes["node-1"].connected = False
    original = world.report
    world.report = lambda node: original(node) if node.connected else frozen  # type: ignore[method-assign]
    world.turns()


def a_stop_is_on_its_way(world: World) -> None:
    an_end_is_waited_for(world)
    world.stop(15)
    world.turn()


def ranks_finish_in_silence(world: World) -> None:
    world.end(0, Exit(status=0, time=world.now))
    world.turns()
    for node in world.nodes.values():
        node.connected = False


def it_leaves(world: World) -> None:
    for rank in (0, 1, 2):
        world.end(rank, Exit(status=0, time=world.now))
    last = world.process(3)
    assert last is not None
    last.phase, last.progress = "exit", world.now
    world.turn()


def all_is_well(world: World) -> None:
    world.turn()


@pytest.mark.parametrize(
    "situation",
    [a_node_is_away, an_end_is_waited_for, a_stop_is_on_its_way, ranks_finish_in_silence, it_leaves, all_is_well],
)
def test_a_clock_that_is_hours_ahead_at_a_takeover_makes_nobody_late(situation: Callable[[World], None]) -> None:
    world = running()
    world.train(3)
    world.turn()
    situation(world)
    before = world.log[:]
    world.take_over(jump_s=7200.0)
    world.turns(4)
    assert [type(record) for record in world.log[len(before) :]] in ([TermStarted], [TermStarted, Progress])
    world.turns(8, seconds=60.0)
    if situation is not all_is_well:
        assert any(isinstance(record, JobEnded | IncidentOpened) for record in world.log[len(before) :]), (
            "the deadline itself still holds"
        )


class AnyJob(RuleBasedStateMachine):
    """Whatever happens in whatever order: one attempt at a time, no endless loop, the log tells it all."""

    def __init__(self) -> None:
        super().__init__()
        config = Config(restart=RestartConfig(node_return_s=1e6))
        self.world = World(config=config)

    @rule()
    def capture(self) -> None:
        if self.world.state.own is None:
            self.world.capture()

    def alive(self) -> bool:
        return bool(self.world.running())

    @rule(steps=st.integers(1, 4))
    def train(self, steps: int) -> None:
        self.world.train(steps)

    @rule(count=st.integers(1, 6))
    def time_passes(self, count: int) -> None:
        self.world.turns(count)

    @precondition(alive)
    @rule(rank=st.integers(0, 3), status=st.sampled_from([-9, -11, -6, 3]), later=st.floats(0, 0.02))
    def kill(self, rank: int, status: int, later: float) -> None:
        if rank in self.world.running():
            self.world.fail(rank, status, later=later)

    @rule(node=st.sampled_from(["node-0", "node-1"]))
    def disconnect(self, node: str) -> None:
        self.world.nodes[node].connected = False

    @rule(node=st.sampled_from(["node-0", "node-1"]))
    def reconnect(self, node: str) -> None:
        self.world.nodes[node].connected = True

    @rule(node=st.sampled_from(["node-0", "node-1"]))
    def lose_keeper(self, node: str) -> None:
        self.world.lose_keeper(node)

    @rule(node=st.sampled_from(["node-0", "node-1"]))
    def bring_back(self, node: str) -> None:
        self.world.bring_back(node)

    @rule(wish=st.sampled_from([{}, {"from_step": 2}, {"verify": 1}, {"env": {"A": "1"}, "args": ("x",)}]))
    def restart(self, wish: dict[str, Any]) -> None:
        state, picture = self.world.state, self.world.picture()
        number = state.active.number if state.active is not None else 0
        name = f"r{len(state.restarts)}"
        changed = {key: wish[key] for key in ("env", "args") if key in wish}
        wanted = {key: wish[key] for key in wish.keys() - changed.keys()}
        asked = RestartRequested(time=self.world.now, restart=name, attempt=number, **wanted)
        step = steps(state.active, picture)[0] if state.active is not None else None
        if planned.refusal(state, picture, asked, step) is None:
            if changed:
                self.change(Wish(change=name, act="restart", **changed))
            self.world.write(asked)

    def change(self, wish: Wish) -> None:
        records = changes.ask(self.world.state, wish, self.world.now)
        for record in records if isinstance(records, list) else ():
            self.world.write(record)

    @rule(content=st.sampled_from(["a", "b", "own"]), within_s=st.sampled_from([0.0, 0.3, 1e6]))
    def update(self, content: str, within_s: float) -> None:
        code, name = Code(digest=content, files=1, bytes=1), f"u{len(self.world.log)}"
        self.change(Wish(change=name, act="update", code=code, within_s=within_s))

    @rule(goes_back=st.booleans())
    def roll_back(self, goes_back: bool) -> None:
        if (number := rollback.target(self.world.state)) is not None:
            name = f"b{len(self.world.log)}"
            self.change(Wish(change=name, act="rollback", version=number, goes_back=goes_back))

    @rule(node=st.sampled_from(["node-0", "node-1"]), trouble=st.sampled_from(["", "no room"]))
    def code_trouble(self, node: str, trouble: str) -> None:
        self.world.nodes[node].code_trouble = trouble

    @rule(node=st.sampled_from(["node-0", "node-1"]), is_late=st.booleans())
    def code_is_late(self, node: str, is_late: bool) -> None:
        self.world.nodes[node].code_is_late = is_late

    @rule(jump_s=st.sampled_from([0.0, 1e7]))
    def replace_controller(self, jump_s: float) -> None:
        self.world.take_over(jump_s=jump_s)

    @invariant()
    def time_never_runs_backwards(self) -> None:
        times = [record.time for record in self.world.log]
        assert times == sorted(times)

    @invariant()
    def one_attempt_runs_at_a_time(self) -> None:
        assert len(set(self.world.running().values())) <= 1

    @invariant()
    def every_end_of_an_attempt_has_its_reason(self) -> None:
        for record in self.world.log:
            if isinstance(record, AttemptEnding):
                assert record.because
            if isinstance(record, IncidentOpened):
                assert record.evidence

    @invariant()
    def attempts_are_numbered_without_gaps(self) -> None:
        numbers = [record.attempt for record in self.world.log if isinstance(record, AttemptStarted)]
        assert numbers == list(range(1, len(numbers) + 1))

    def teardown(self) -> None:
        """When the trouble is over, the job runs or has ended for a stated reason."""
        for name, node in self.world.nodes.items():
            self.world.bring_back(name)
            node.connected, node.code_trouble, node.code_is_late = True, "", False
        self.world.turns(30)
        ended = [record for record in self.world.log if isinstance(record, JobEnded)]
        if ended:
            assert ended[0].message
        else:
            assert self.world.running().keys() == {0, 1, 2, 3}


TestAnyJob = AnyJob.TestCase
TestAnyJob.settings = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
