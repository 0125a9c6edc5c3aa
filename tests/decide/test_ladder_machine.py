"""Whatever happens, in whatever order: no eviction without evidence, no endless loop, and every incident ends.

The world answers as a conductor would: who is asked answers or lets the deadline pass, a restart that was decided
happens, nodes come or do not.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from evertrain.decide import ladder
from evertrain.decide.applying import apply, fold
from evertrain.decide.eviction import full_size
from evertrain.decide.replay import replay
from evertrain.decide.state import JobState
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.config import LadderConfig
from evertrain.model.decisions import AnyAction, Policy
from support.effort import examples
from support.ladders import Job

NODES = tuple(f"node-{index}" for index in range(10))
SOURCES = (("inspect", "replay", "roll_back"), ("inspect",), ())
CATEGORIES = ("unknown", "numerics", "data", "host_os", "storage")
some_node = st.sampled_from(NODES)
BUDGET = 1


class Seen:
    """What speaks against nodes, kept by the test itself and not by the code that it judges."""

    def __init__(self, *, is_paper: bool) -> None:
        self.is_paper = is_paper
        self.reasons: dict[str, set[str]] = defaultdict(set)
        self.signs: dict[str, list[float]] = defaultdict(list)
        self.alerts: dict[str, list[float]] = defaultdict(list)
        self.hung: dict[str, list[float]] = defaultdict(list)
        self.gone: dict[str, list[float]] = defaultdict(list)

    def look(self, event: d.AnyEvent) -> None:
        now = event.time
        match event:
            case d.NodeFault():
                self.reasons[event.node].add("fault")
                self.signs[event.node].append(now)
            case d.HardwareReading():
                self.signs[event.node].append(now)
            case d.NetworkAlert():
                self.signs[event.node].append(now)
                self.alerts[event.node].append(now)
                if sum(at >= now - 300 for at in self.alerts[event.node]) >= 2:
                    self.reasons[event.node].add("alerts")
            case d.DrainRequested():
                self.reasons[event.node].add("drained")
            case d.Answered() if event.outcome == "suspects":
                for node in event.nodes:
                    self.reasons[node].add("suspect")
            case d.AttemptFailed():
                for node in event.stuck:
                    self.reasons[node].add("stuck")
                for node in event.nodes:
                    self._failed(node, event)

    def _failed(self, node: str, event: d.AttemptFailed) -> None:
        reasons = self.reasons[node]
        if any(at >= event.time - 600 for at in self.signs[node]):
            reasons.add("odd hardware")
        if event.source == "hang":
            if self.is_paper or event.is_group or self.hung[node]:
                reasons.add("hang")
            self.hung[node].append(event.time)
        if event.source == "lost":
            reasons.add("lost")

    def forget(self, node: str) -> None:
        for table in (self.reasons, self.signs, self.alerts, self.hung):
            table.pop(node, None)


class Witnessed(Job):
    """A job of which every decision is looked at."""

    def __init__(self, policy: Policy, **options: Any) -> None:
        self.seen = Seen(is_paper=policy.hang_policy == "paper")
        self.sighted = JobState()
        """The same job with none of its sensors ever blind."""
        self.counted: list[tuple[float, int, bool]] = []
        super().__init__(policy=policy, **options)

    def write(self, record: r.AnyRecord) -> None:
        super().write(record)
        if not (isinstance(record, r.Decided) and isinstance(record.event, d.SensorBlind)):
            self.sighted = apply(self.sighted, record)

    def tell(self, event: d.AnyEvent) -> tuple[AnyAction, ...]:
        self.seen.look(event)
        before, sighted = self.state, self.sighted
        actions = super().tell(event)
        if isinstance(event, d.SensorBlind):
            assert all(isinstance(action, d.Tolerate) for action in actions)
        else:
            assert actions == ladder.decide(sighted, event, self.policy), "a blind sensor has changed a decision"
        assert all(action.because for action in actions)
        size = len(before.active_nodes())
        for action in actions:
            if isinstance(action, d.Evict):
                self._judge(before, event, action)
                size -= 0 if action.spare else len(action.nodes) - len(action.replacements)
            elif isinstance(action, d.Grow):
                size += len(action.nodes)
        assert len(self.state.active_nodes()) == size, "the size changed by itself"
        return actions

    def _judge(self, before: JobState, event: d.AnyEvent, evict: d.Evict) -> None:
        assert evict.evidence and all(evict.evidence)
        assert len(set(evict.nodes)) == len(evict.nodes) > 0
        assert set(evict.replacements) <= set(evict.nodes)
        for new in evict.replacements.values():
            assert new in before.standbys() and before.nodes[new].state == "standby"
        for node in evict.nodes:
            assert node in before.roster
            assert self.seen.reasons[node], f"{node} was evicted and nothing speaks against it"
            if evict.lost:
                assert before.nodes[node].state == "lost"
            self.seen.forget(node)
        if not (evict.lost or evict.planned or evict.spare):
            is_group = isinstance(event, d.AttemptFailed) and event.is_group
            self.counted.append((event.time, len(evict.nodes), is_group))
            recent = [(nodes, group) for at, nodes, group in self.counted if at >= event.time - 3600]
            groups = [nodes for nodes, group in recent if group]
            assert len(groups) <= 1 or sum(groups[1:]) <= BUDGET
            assert sum(nodes for nodes, group in recent if not group) <= BUDGET


class Anything(RuleBasedStateMachine):
    @initialize(
        standby=st.integers(0, 3),
        least=st.sampled_from([None, 2]),
        has_platform=st.booleans(),
        is_stored=st.booleans(),
        sources=st.sampled_from(SOURCES),
        hang_policy=st.sampled_from(["careful", "careful", "paper"]),
    )
    def begin(self, standby: int, hang_policy: Any, sources: Any, **options: Any) -> None:
        self.hang_policy = hang_policy
        policy = Policy(sources=sources, hang_policy=hang_policy, ladder=LadderConfig(budget_nodes=BUDGET))
        self.job = Witnessed(nodes=4, standby=standby, policy=policy, **options)
        self.moved = True

    # -- what the world does -------------------------------------------------------------------------------------------

    def waits(self) -> bool:
        incident = self.job.state.incident
        return incident is not None and incident.decided is None

    def trains(self) -> bool:
        return self.job.state.active is not None and not self.waits() and not self.job.state.closing

    @rule(seconds=st.sampled_from([0.0, 1.0, 100.0, 301.0, 700.0, 3601.0, 90_000.0]))
    def time_passes(self, seconds: float) -> None:
        self.job.now += seconds

    @rule(node=some_node, kind=st.sampled_from(["fault", "alert", "alert", "reading", "reading", "blind"]))
    def a_sensor_speaks(self, node: str, kind: str) -> None:
        job = self.job
        if self.trains() and self.acts(node, kind):
            job.opens(node)
            getattr(job, kind)(node)
            if not self.waits():
                self.training_follows()
            return
        getattr(job, kind)(node)

    def acts(self, node: str, kind: str) -> bool:
        """Whether training is to be interrupted: only then is there an incident."""
        job = self.job
        event = {"fault": d.NodeFault, "alert": d.NetworkAlert}.get(kind)
        if event is None:
            return False
        actions = ladder.decide(job.state, event(time=job.now, node=node, signal="", evidence=""), job.policy)
        return not any(isinstance(one, d.Tolerate) or (isinstance(one, d.Evict) and one.spare) for one in actions)

    def training_follows(self) -> None:
        """An attempt that a sign has cut short is over."""
        job, attempt = self.job, self.job.state.attempt
        assert attempt is not None
        job.write(
            r.AttemptEnded(
                time=job.now, attempt=attempt.number, outcome="failed", step=job.step, relative_step=0, progress=True
            )
        )
        if not job.state.closing:
            job.restarts()

    @precondition(lambda self: self.trains())
    @rule(
        source=st.sampled_from(["exit", "exit", "hang", "hang", "saves"]),
        nodes=st.lists(st.sampled_from(NODES[:7]), max_size=2, unique=True),
        category=st.sampled_from(CATEGORIES),
        progress=st.booleans(),
        flags=st.sampled_from(["", "", "stuck", "is_group", "is_damage"]),
    )
    def an_attempt_fails(self, source: str, nodes: list[str], category: str, progress: bool, flags: str) -> None:
        job = self.job
        named = tuple(node for node in nodes if node in job.state.active_nodes())
        if flags == "is_group" and len(named) < 2:
            flags = ""
        if flags == "stuck" and not named:
            flags = ""
        actions = job.fails(
            source,
            nodes=named,
            ranks=(),
            category=category,
            progress=progress,
            **({flags: named if flags == "stuck" else True} if flags else {}),
        )
        self.moved = progress
        self.follow(actions)

    @precondition(lambda self: self.trains())
    @rule(node=st.sampled_from(NODES[:7]), stays=st.booleans(), progress=st.booleans())
    def a_node_is_lost(self, node: str, stays: bool, progress: bool) -> None:
        if node not in self.job.state.active_nodes():
            return
        self.job.becomes(node, "lost" if stays else "active")
        self.moved = progress
        self.follow(self.job.fails("lost", nodes=(node,), cause="node lost", progress=progress))

    def follow(self, actions: tuple[AnyAction, ...]) -> None:
        if self.moved:
            assert not any(isinstance(one, d.Stop | d.RollBack) for one in actions), "it was making progress"
        if not self.waits() and not self.job.state.closing:
            for node in self.job.state.active_nodes():
                if self.job.state.nodes[node].state == "lost":
                    self.job.becomes(node, "active")
            self.job.restarts()

    @precondition(lambda self: self.waits())
    @rule(outcome=st.sampled_from(["suspects", "clean", "done", "not_available"]), node=some_node)
    def somebody_answers(self, outcome: str, node: str) -> None:
        job = self.job
        assert job.state.incident is not None
        asked = [one for one in job.state.incident.decisions[-1].actions if not isinstance(one, d.Tolerate)]
        match asked:
            case [d.Inspect()]:
                actions = job.answers("inspect", outcome, *([node] if outcome == "suspects" else []))
            case [d.RollBack()]:
                actions = job.answers("roll_back", "done" if outcome == "done" else "not_available")
            case [d.Replay()]:
                actions = job.answers("replay", outcome, *([node] if outcome == "suspects" else []))
            case _:
                job.now += 300
                actions = job.nobody_came()
        if job.state.active is not None and not self.waits():
            self.training_follows()
            return
        self.follow(actions)

    @precondition(lambda self: self.trains() and self.job.state.incident is not None)
    @rule()
    def training_proves_itself(self) -> None:
        self.job.is_proven()

    @rule(node=some_node, what=st.sampled_from(["arrives", "allowed", "drain", "tested"]))
    def nodes_come_and_go(self, node: str, what: str) -> None:
        job = self.job
        if what == "allowed":
            job.seen.forget(node)
        getattr(job, what)(node)

    @rule(node=some_node)
    def a_standby_is_ready(self, node: str) -> None:
        if node in self.job.state.standbys():
            before = self.waits()
            actions = self.job.ready(node)
            if before and not self.waits() and not self.job.state.closing:
                if self.job.state.active is not None:
                    self.training_follows()
                else:
                    self.follow(actions)

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def the_roster_is_sound(self) -> None:
        state = self.job.state
        assert len(set(state.roster)) == len(state.roster)
        assert not set(state.roster) & set(state.memory.blocked)
        assert all(state.nodes[node].state != "evicted" for node in state.roster)
        least = state.run.least if state.run is not None and state.run.least is not None else 4
        assert least <= len(state.active_nodes()) <= full_size(state)

    def teardown(self) -> None:
        if not hasattr(self, "job"):
            return
        for _ in range(8):
            if not self.waits():
                break
            self.somebody_answers("not_available", "node-0")
        job = self.job
        assert not self.waits(), "an incident does not end though every deadline has passed"
        assert all(one.decided is not None or one.closed is not None for one in job.state.incidents.values())
        assert fold(job.log) == job.state
        for number in job.state.incidents:
            assert all(again.agrees for again in replay(job.log, number))


Anything.TestCase.settings = settings(
    max_examples=examples(300), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAnything = Anything.TestCase


failure = st.tuples(
    st.sampled_from(["exit", "hang", "lost", "saves", "verification"]),
    st.sampled_from(CATEGORIES),
    st.lists(st.sampled_from(NODES[:5]), max_size=2, unique=True),
    st.sampled_from(["", "", "ValueError at t.py:7"]),
    st.sampled_from(["suspects", "clean", "done", "not_available"]),
    st.booleans(),
)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    failures=st.lists(failure, min_size=40, max_size=40),
    only=st.sampled_from(["", "", "exit", "hang", "lost"]),
    standby=st.integers(0, 3),
    sources=st.sampled_from(SOURCES),
)
def test_without_progress_it_ends(failures: list[Any], only: str, standby: int, sources: Any) -> None:
    """Whatever fails, whoever answers what, and however many nodes could be evicted: it does not go on for ever."""
    job = Witnessed(nodes=5, standby=standby, policy=Policy(sources=sources))
    for source, category, nodes, signature, outcome, is_odd in failures:
        named = tuple(node for node in nodes if node in job.state.active_nodes())
        if is_odd:
            for node in named:
                job.reading(node)
        job.fails(only or source, nodes=named, ranks=(), category=category, signature=signature)
        for _ in range(4):
            incident = job.state.incident
            if incident is None or incident.decided is not None:
                break
            rung = {d.Inspect: "inspect", d.RollBack: "roll_back", d.Replay: "replay"}[
                type(incident.decisions[-1].actions[0])  # type: ignore[index]
            ]
            job.answers(rung, outcome, *(job.state.active_nodes()[:1] if outcome == "suspects" else ()))
        if job.state.closing:
            return
        job.now += 3600.0  # the budget is new each time
        job.restarts()
    raise AssertionError("40 failures without any progress, and it still goes on")
