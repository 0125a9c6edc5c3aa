"""What was seen of nodes, or asked for about them, that calls for a decision?

One thing at a time: a sign of trouble, a wish of the user, a node that would like to join, a test of one that was
evicted. Each returns the decision and what follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from evertrain.decide import answering, captures, examining, failures, incidents, joining, reaching, resume, standbys
from evertrain.decide.blame import Blame
from evertrain.decide.picture import Picture
from evertrain.decide.progress import steps
from evertrain.decide.state import JobState
from evertrain.detect import readings
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.config import Config
from evertrain.model.records import AnyRecord

_SAME_NUMBERS = 3
"""Numbers that are none have come back so often at the same place, also from older copies: it is the code or the data,
which a restart does not change, and the script may well know how to deal with it."""
_MOST_SIGNS = 128
"""Of one report; the fold remembers several times as many keys, so that none is taken for new while it is reported."""
_SAME_EVENT_S = 60.0
_MORE = "network_reading"
"""One cable may be seen by several sensors, and as several ports: what they report soon after an alert is about the
same event, and no second alert that would evict the node."""


def look(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """The first that there is."""
    if not state.policy or not state.roster or state.closing:
        return []
    if state.signals:
        return _signal(state, picture, state.signals[0], now)
    if new := _new_signs(state, picture, now):
        return new
    if cut_off := reaching.look(state, picture, now):
        return [*cut_off]
    for event in _asked(state, now):
        return answering.answer(state, event)
    if late := _replaceable_now(state, picture, now):
        return late
    for event in (*_arrivals(state, picture, now), *_tests(state, picture, config, now)):
        decided = answering.decision(state, event)
        # a node that stays out, again and again, is no news: one a minute would fill the log
        if any(isinstance(action, d.Enlist) for action in decided.actions):
            if isinstance(event, d.NodeTested):
                first = examining.of_returning(state, picture, event.node, config, now)
                if first is not None and not first:
                    continue
                if first:
                    return first
            return [decided]
    return []


# -- signs of trouble --------------------------------------------------------------------------------------------------


def _new_signs(state: JobState, picture: Picture, now: float) -> list[AnyRecord]:
    """What the sensors of nodes report and the log does not know, oldest first; also of nodes that are out."""
    new: list[tuple[float, r.SignalRaised]] = []
    for node in state.known_nodes():
        report = picture.report(node)
        if report is None or not report.signs:
            continue
        known = {*state.known_signs.get(node, ()), ""}
        alerts = state.memory.alerts.get(node, ())
        is_alerted = bool(alerts) and now - alerts[-1].time < _SAME_EVENT_S
        for sign in report.signs[-_MOST_SIGNS:]:
            if sign.key in known:
                continue
            known.add(sign.key)
            kind = sign.kind
            if readings.grade(kind) == "network":
                kind = _MORE if is_alerted else kind
                is_alerted = True
            raised = r.SignalRaised(
                time=now, node=node, signal=kind, evidence=sign.evidence, key=sign.key, attempt=sign.attempt
            )
            new.append((sign.time, raised))
    return [raised for _, raised in sorted(new, key=lambda one: (one[0], one[1].node))]


def _signal(state: JobState, picture: Picture, raised: r.SignalRaised, now: float) -> list[AnyRecord]:
    seen: dict[str, Any] = {"time": now, "node": raised.node, "evidence": raised.evidence}
    grade = readings.grade(raised.signal)
    if grade == "fault":
        return _incident_of(state, picture, raised, d.NodeFault(signal=raised.signal, **seen))
    if grade == "network":
        return _incident_of(state, picture, raised, d.NetworkAlert(signal=raised.signal, **seen))
    if grade == "condition":
        return answering.answer(state, d.Oddity(signal=raised.signal, **seen))
    if grade == "metric":
        return _odd_numbers(state, picture, raised, now)
    if grade == "reading":
        return answering.answer(state, d.HardwareReading(signal=raised.signal, **seen))
    return answering.answer(state, d.SensorBlind(sensor=raised.signal, **seen))


def _incident_of(
    state: JobState, picture: Picture, raised: r.SignalRaised, event: d.NodeFault | d.NetworkAlert
) -> list[AnyRecord]:
    """What is acted upon, or knowingly not, is an incident: one that is over at once where nothing is done."""
    now, number = event.time, max(state.incidents, default=0) + 1
    decided = answering.decision(state, event, number)
    evict = next((action for action in decided.actions if isinstance(action, d.Evict)), None)
    waits = any(isinstance(action, d.WaitForNodes) for action in decided.actions)
    acts = bool(answering.evicted_ranks_of(state, decided)) or waits
    if acts and state.waiting is not None:
        # one more node for the same wait, or the end of it
        return answering.answer(state, event, state.waiting.number)
    if not acts and (raised.node in state.memory.faults or raised.node not in state.roster):
        return answering.answer(state, event)  # it is known, and has been told: a sensor may say so every second
    attempt = state.attempt
    verdict = Blame(
        source="signal",
        fault_time=raised.time,
        cause=raised.signal.replace("_", " "),
        category=_category(raised.signal),
        nodes=(raised.node,),
        evidence=evict.evidence if evict is not None else (raised.evidence,),
    )
    number_of_attempt = attempt.number if attempt is not None else 0
    step = steps(attempt, picture)[0] if attempt is not None else state.best_step
    opened = incidents.opened(state, number_of_attempt, verdict, step, now, tolerated=not acts)
    if acts:
        return [*incidents.over(state, now), opened, decided, *answering.consequences(state, decided)]
    # it disturbs nothing that is going on
    return [opened, decided, r.IncidentClosed(time=now, incident=number, first_new_step=None, passed_time=None)]


def _odd_numbers(state: JobState, picture: Picture, raised: r.SignalRaised, now: float) -> list[AnyRecord]:
    """Numbers that are none end the attempt, once, whoever says so first; all else is told, once an attempt."""
    attempt, signal = state.active, raised.signal
    is_current = attempt is not None and raised.attempt in (None, attempt.number)
    runs = attempt if is_current and attempt is not None and attempt.ending is None else None
    assert state.run is not None
    undecided = state.incident is not None and state.incident.decided is None
    is_fatal = signal in readings.FATAL and runs is not None and not undecided and not state.run.observe_only
    # nothing would start again: a script that leaves such a step out has gone on, and another ends by itself
    is_fatal = is_fatal and not failures.restarts_used_up(state)
    step = steps(runs, picture)[0] if runs is not None else None
    is_fatal = is_fatal and _came_back(state, step) < _SAME_NUMBERS
    event = d.Oddity(time=now, node=raised.node, signal=signal, evidence=raised.evidence, is_fatal=is_fatal)
    told = answering.answer(state, event)
    if signal == "slow" and runs is not None:
        told = [*told, *captures.begin_rounds(state, now)]
    cause = signal.replace("_", " ")
    known = (one.opened for one in state.incidents.values() if one.opened.source == "metrics")
    if runs is None or any(one.attempt == runs.number and one.cause == cause for one in known):
        return told
    verdict = Blame(
        source="metrics",
        fault_time=raised.time,
        cause=cause,
        # of gradients that are averaged every rank has the same: who says so first is not to blame for it
        category="numerics" if "loss" in signal or "norm" in signal else "unknown",
        evidence=(f"{raised.node}: {raised.evidence}",),
    )
    if is_fatal:
        return [*told, *incidents.act(state, runs, verdict, step, now)]
    opened = incidents.opened(state, runs.number, verdict, step, now, tolerated=True)
    # it disturbs nothing that is going on
    closed = r.IncidentClosed(time=now, incident=opened.incident, first_new_step=None, passed_time=None)
    return [*told, opened, closed]


def _came_back(state: JobState, step: int | None) -> int:
    """How often in this run numbers that are none have ended an attempt about here, or anywhere where steps have no
    names."""
    first = state.attempts[0].number if state.attempts else 0
    ended = (
        one.opened
        for one in state.incidents.values()
        if one.opened.source == "metrics" and not (one.opened.tolerated or one.opened.located)
        if one.opened.attempt >= first
    )
    return sum(step is None or one.step is None or abs(one.step - step) <= resume.SOON_STEPS for one in ended)


def _replaceable_now(state: JobState, picture: Picture, now: float) -> list[AnyRecord]:
    """A node is known to be broken and had to stay, and a standby has become ready since."""
    if not state.memory.faults or state.active is None or state.active.ending is not None:
        return []
    oldest = now - state.policies[state.policy].ladder.repeat_window_s
    broken = [fault for fault in state.memory.faults.values() if fault.time >= oldest and _is_active(state, fault.node)]
    for fault in broken if state.usable_standbys() else ():
        # an alert that is old by now is none any more
        event = replace(fault, time=now)
        if answering.evicted_ranks_of(state, answering.decision(state, event)):
            again = r.SignalRaised(time=now, node=fault.node, signal=fault.signal, evidence=fault.evidence)
            return _incident_of(state, picture, again, event)
    return []


def _is_active(state: JobState, node: str) -> bool:
    return node in state.roster and node not in state.standbys()


def _category(signal: str) -> str:
    if readings.grade(signal) == "network":
        return "network_ib"
    if signal.startswith(("gpu", "xid", "row_remap")):
        return "gpu_hardware"
    return "storage" if signal.startswith("disk") else "host_os"


# -- nodes that come, and come back ------------------------------------------------------------------------------------


def _asked(state: JobState, now: float) -> Iterator[d.AnyEvent]:
    """What the user asked for and nobody has answered yet."""
    for asked in state.asked:
        if isinstance(asked, r.AllowAsked):
            yield d.NodeAllowed(time=now, node=asked.node, because=asked.because)
        elif state.incident is None:  # a recovery comes first
            yield d.DrainRequested(time=now, node=asked.node, because=asked.because)


def _arrivals(state: JobState, picture: Picture, now: float) -> Iterator[d.AnyEvent]:
    for node in joining.arrivals(state, picture):
        yield d.NodeArrived(time=now, node=node)


def _tests(state: JobState, picture: Picture, config: Config, now: float) -> Iterator[d.AnyEvent]:
    """What evicted nodes say of themselves, whenever they have been tested again."""
    for node in state.memory.blocked:
        report = picture.report(node)
        if report is None or not picture.connected(node):
            continue
        number = standbys.check_number(state, picture, node, config, now)
        checked = standbys.verdict(report, number)
        if checked is not None:
            if held := [sign for sign in report.signs if readings.grade(sign.kind) in ("fault", "network")]:
                # told once, and it still holds or did so minutes ago: that is not quiet
                yield d.NodeTested(time=now, node=node, passed=False, evidence=tuple(one.evidence for one in held))
                continue
            evidence = tuple(f"{check.name}: {check.detail}" for check in (checked.failed or checked.checks))
            yield d.NodeTested(time=now, node=node, passed=not checked.failed, evidence=evidence)
