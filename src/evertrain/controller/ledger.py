"""Where did the time go? Every second of a run is productive, or lost to one account and one phase of it.

A run is cut into stretches that lie end to end, so their sum is its wall time. Per attempt, in this order:

    before the loop │ redone steps │ productive │ the step that a fault cut off │ detect │ locate │ (next attempt …)
    └ start, failover ┘ recompute  ┘            └ recompute

What comes before an attempt's first new step is booked on what made the attempt necessary: the start of the run, an
incident, a planned restart, a change of the code, or a restart that repeats steps to compare their losses. An incident
that is only watched costs nothing. After a request to stop all is planned stop. Redone steps are not productive: the
first new step ends them, by the slowest rank's page after an incident, else estimated from the marks in the log. A
script that never names its steps cannot be seen redoing them: its way back ends when all ranks are in their loop.

ETTR is the productive share of a run's wall time (Kokolis et al.; ByteRobust section 8.1). The weighted one counts a
productive second as less when training is slow: by tokens per second between two marks, or steps where the script
reports no tokens, relative to the best median of any attempt of the same run (its arguments, hence its step, are the
same), and never as more than a second. It stands in for MFU, which needs the operations of a step. Where no speed is
known a second counts in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import inf
from statistics import median
from typing import Any, Literal

import msgspec

from evertrain.decide import changes
from evertrain.decide.applying import apply
from evertrain.decide.state import Attempt, Incident, JobState
from evertrain.model.decisions import ActionName, stronger
from evertrain.model.records import AnyRecord, Progress, RunStarted

Phase = Literal["productive", "start", "detect", "locate", "failover", "recompute", "stop"]


class Seconds(msgspec.Struct, frozen=True):
    """The phases of one incident; None: not over yet, or never reached."""

    detect: float | None
    locate: float | None
    failover: float | None
    recompute: float | None


def seconds(incident: Incident) -> Seconds:
    """Fault to news of it, to the verdict, to all ranks back in their loop, to the first new step."""
    seen, located, resumed = incident.opened.time, incident.located_time, incident.resumed_time
    passed = incident.closed.passed_time if incident.closed is not None else None
    return Seconds(
        detect=_length(incident.opened.fault_time, seen),
        locate=_length(seen, located),
        failover=_length(located, resumed),
        recompute=_length(resumed, passed),
    )


def _length(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(max(0.0, end - start), 4)


class Run(msgspec.Struct, frozen=True):
    """One call of `evertrain run`, as far as its log goes."""

    state: JobState
    """When it had ended; its attempts only."""
    end: float
    marks: dict[int, tuple[Progress, ...]] = {}
    """How far each attempt was, oldest mark first."""

    @property
    def start(self) -> float:
        run = self.state.run
        assert run is not None
        return run.time if run.began_time is None else min(run.began_time, run.time)


class Account(msgspec.Struct, frozen=True):
    """What a lost second is booked on."""

    category: str
    mechanism: str
    """What was done about it: an action, or what was going on without an incident."""
    incident: int | None = None


START = Account("start_up", "start_up")
PLANNED_RESTART = Account("planned_restart", "planned_restart")
CODE_CHANGE = Account("code_change", "hot_update")
VERIFICATION = Account("verification", "verification")
PLANNED_STOP = Account("planned_stop", "planned_stop")


class Stretch(msgspec.Struct, frozen=True):
    start: float
    end: float
    phase: Phase
    account: Account | None = None
    """None: productive."""
    attempt: int | None = None
    """Of a productive stretch."""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def run_of(state: JobState, now: float) -> Run | None:
    """The newest run, from the state alone: all that a live status needs."""
    if state.run is None:
        return None
    marks: dict[int, tuple[Progress, ...]] = {
        attempt.number: (attempt.progress,) for attempt in state.attempts if attempt.progress is not None
    }
    return Run(state, max(state.run.time, state.ended.time if state.ended is not None else now), marks)


def runs(log: Iterable[AnyRecord], now: float | None = None) -> list[Run]:
    """All runs of a job, oldest first. One that ended without a word is counted to its last record, or to `now`."""
    found: list[Run] = []
    state, last = JobState(), 0.0
    collected: dict[int, list[Progress]] = {}

    def close(end: float) -> None:
        assert state.run is not None
        marks = {attempt: tuple(seen) for attempt, seen in collected.items()}
        found.append(Run(state, max(state.run.time, state.ended.time if state.ended is not None else end), marks))

    for record in log:
        if isinstance(record, RunStarted):
            if state.run is not None:
                close(last)
            collected = {}
        if isinstance(record, Progress):
            # one every few seconds for months: the list is enough, the state can do without
            collected.setdefault(record.attempt, []).append(record)
        else:
            state = apply(state, record)
        last = record.time
    if state.run is not None:
        close(last if now is None else now)
    return found


def stretches(run: Run) -> list[Stretch]:
    """The whole of `run`, cut into stretches without a gap and without an overlap."""
    stopped = min(_stop_time(run), run.end)
    cut: list[Stretch] = []
    start = run.start
    for until, stretch in [*_until(run, stopped), (run.end, Stretch(0, 0, "stop", PLANNED_STOP))]:
        if until > start:
            cut.append(msgspec.structs.replace(stretch, start=start, end=until))
            start = until
    return cut


def _until(run: Run, end: float) -> Iterator[tuple[float, Stretch]]:
    """Up to when, at most `end`, what was going on; a moment that has passed already adds nothing."""
    for until, phase, account, attempt in _story(run):
        yield min(until, end), Stretch(0, 0, phase, account, attempt)


def _story(run: Run) -> Iterator[tuple[float, Phase, Account | None, int | None]]:
    faults = {one.opened.attempt: one for one in run.state.incidents.values() if not one.opened.tolerated}
    account, led_here = START, None
    way_back: Phase = "start"
    for index, attempt in enumerate(run.state.attempts):
        incident = faults.get(attempt.number)
        is_last = index + 1 == len(run.state.attempts)
        passed = _passed(run, attempt, led_here)
        entered = min(_entered(attempt), passed)
        left = _left(run, attempt, incident, entered, is_last)
        yield min(entered, left), way_back, account, None
        yield min(passed, left), "recompute", account, None
        yield left, "productive", None, attempt.number
        way_back, led_here = "failover", incident
        if incident is None:
            account = VERIFICATION if _is_verified(run, attempt) else _planned(run, index + 1)
            continue
        opened = incident.opened
        account = Account(opened.category, _mechanism(run, incident), incident.number)
        yield opened.fault_time, "recompute", account, None
        yield opened.time, "detect", account, None
        yield incident.located_time, "locate", account, None
    yield inf, way_back, account, None


def _mechanism(run: Run, incident: Incident) -> str:
    """What training was brought back by; a change of the code that came with it, where nothing stronger was done."""
    done: list[ActionName] = [incident.decided.action] if incident.decided is not None else []
    change = changes.led_to_by(run.state, incident)
    if change is not None:
        done.append("hot_update" if change.incident is None else "roll_back")
    return stronger(done) if done else "none"


def _planned(run: Run, following: int) -> Account:
    """What the attempt in this place was there for, where no fault led to it."""
    there = [one.started.change for one in run.state.attempts[following : following + 1]]
    return CODE_CHANGE if any(there) else PLANNED_RESTART


def _is_verified(run: Run, attempt: Attempt) -> bool:
    """Whether it was ended so that its last steps be repeated."""
    name = attempt.ending.restart if attempt.ending is not None else None
    return any(one.asked.restart == name and one.asked.verify is not None for one in run.state.restarts)


def _entered(attempt: Attempt) -> float:
    """When every rank was in its loop."""
    if attempt.resumed is not None:
        return attempt.resumed.resumed_time
    # a program whose steps nobody can see, and that has done its work or long been at it
    ended = attempt.ended
    worked = ended is not None and (ended.outcome == "completed" or (ended.progress and ended.step is None))
    return attempt.started.time if worked else inf


def _passed(run: Run, attempt: Attempt, led_here: Incident | None) -> float:
    """When the attempt had done a step that none had done before."""
    started, entered = attempt.started, _entered(attempt)
    marks = run.marks.get(attempt.number, ())
    if started.reached is None and marks and marks[-1].step is None and marks[-1].relative_step:
        return entered
    if led_here is not None:
        closed = led_here.closed
        mine = led_here.failover_attempt == attempt.number
        return closed.passed_time if mine and closed is not None and closed.passed_time is not None else inf
    resume = -1 if started.resume is None else started.resume
    if started.reached is None or resume >= started.reached:
        return entered
    # no record says when: between the two marks around it steps were about as long as each other
    before, at = entered, resume
    for mark in marks:
        if mark.step is None or mark.progress_time <= before:
            continue
        if mark.step > started.reached:
            return before + (mark.progress_time - before) * (started.reached + 1 - at) / (mark.step - at)
        before, at = mark.progress_time, mark.step
    return inf


def _left(run: Run, attempt: Attempt, incident: Incident | None, entered: float, is_last: bool) -> float:
    """When the attempt did its last whole step before what ended it."""
    marks = run.marks.get(attempt.number, ())
    if incident is None:
        if is_last:
            return inf
        over = attempt.ending or attempt.ended
        return min(marks[-1].progress_time if marks else inf, over.time if over is not None else inf)
    # the last mark is written with the end; until then it is old
    if attempt.ended is None or entered == inf:
        return incident.opened.fault_time
    # without a mark nothing is known that the next attempt could build on
    return min(marks[-1].progress_time if marks else entered, incident.opened.fault_time)


def _stop_time(run: Run) -> float:
    if run.state.stop is None:
        return inf
    newest = run.state.attempt
    marks = run.marks.get(newest.number, ()) if newest is not None else ()
    if newest is not None and newest.ended is not None and newest.ended.outcome == "stopped" and marks:
        return min(marks[-1].progress_time, run.state.stop.time)
    return run.state.stop.time


def ettr(state: JobState, now: float, window_s: float | None = None) -> float | None:
    """The productive share of this run's wall time so far, or of its last `window_s`; None before it has begun."""
    run = run_of(state, now)
    return None if run is None else share([run], window_s)


def share(of: list[Run], window_s: float | None = None, *, weighted: bool = False) -> float | None:
    """ETTR over several runs, the time between them left out; `window_s`: the last so many seconds only."""
    since = -inf if window_s is None or not of else of[-1].end - window_s
    wall = sum(max(0.0, run.end - max(run.start, since)) for run in of)
    if wall <= 0:
        return None
    return round(sum(_productive(run, since, weighted) for run in of) / wall, 4)


def _productive(run: Run, since: float, weighted: bool) -> float:
    parts = [
        (max(part.start, since), part.end, part.attempt)
        for part in stretches(run)
        if part.attempt is not None and part.end > since
    ]
    if not weighted:
        return sum(end - start for start, end, _ in parts)
    by_tokens = any(mark.tokens for marks in run.marks.values() for mark in marks)
    speeds = {number: _speeds(marks, by_tokens) for number, marks in run.marks.items()}
    # the median of a short attempt is chance: it counts only where there is no long one
    medians = [median(speed for *_, speed in seen) for seen in speeds.values() if len(seen) >= 3]
    medians = medians or [median(speed for *_, speed in seen) for seen in speeds.values() if seen]
    return sum(
        _weigh(start, end, speeds.get(number or 0, []), max(medians, default=0.0)) for start, end, number in parts
    )


def _speeds(marks: tuple[Progress, ...], by_tokens: bool) -> list[tuple[float, float, float]]:
    """From when to when the attempt did how many tokens or steps a second."""
    found: list[tuple[float, float, float]] = []
    before: Progress | None = None
    for mark in marks:
        if before is None:
            before = mark
            continue
        done = mark.tokens - before.tokens if by_tokens else _steps(before, mark)
        length = mark.progress_time - before.progress_time
        # a mark without a new step (a save, an evaluation) belongs to the interval of the next step
        if done > 0 and length > 0:
            found.append((before.progress_time, mark.progress_time, done / length))
            before = mark
    return found


def _steps(before: Progress, mark: Progress) -> int:
    if mark.step is not None and before.step is not None:
        return mark.step - before.step
    return mark.relative_step - before.relative_step


def _weigh(start: float, end: float, speeds: list[tuple[float, float, float]], best: float) -> float:
    if not speeds or best <= 0:
        return end - start
    known = [(min(end, until) - max(start, since), speed) for since, until, speed in speeds]
    known = [(length, speed) for length, speed in known if length > 0]
    rest = end - start - sum(length for length, _ in known)
    typical = min(1.0, median(speed for *_, speed in speeds) / best)
    return sum(length * min(1.0, speed / best) for length, speed in known) + rest * typical


def attempts(state: JobState) -> list[dict[str, Any]]:
    """Each attempt of this run in one flat dict, for tables and reports."""
    return [
        {
            "attempt": attempt.number,
            "started": attempt.started.time,
            "resume": attempt.started.resume,
            "step": attempt.ended.step if attempt.ended else None,
            "relative_step": attempt.ended.relative_step if attempt.ended else None,
            "outcome": attempt.ended.outcome if attempt.ended else "running",
            "seconds": round(attempt.ended.time - attempt.started.time, 3) if attempt.ended else None,
        }
        for attempt in state.attempts
    ]
