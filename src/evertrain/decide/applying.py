"""How does a record change what is known of a job? A fold over the log, and nothing else.

`apply(state, record)` is the only way a `JobState` changes, so a controller that takes over, an offline `status`, and a
test all see the same job. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from evertrain.decide import episode, tested
from evertrain.decide.memory import MOST_NODES, Chain, Memory, evolve, with_other_code
from evertrain.decide.state import Attempt, Capture, Change, Incident, JobState, Restart, Round
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.capture_records import CaptureAsked, HangLocated
from evertrain.model.change_records import Audited, ChangeAsked, ChangeDropped, VersionKept, VersionProven
from evertrain.model.collective_records import CauseFound, CollectivesOdd, CollectivesWell
from evertrain.model.diagnosis import StageAsked, StageDone
from evertrain.model.exam_records import ExamAsked, ExamOver
from evertrain.model.records import AnyRecord
from evertrain.model.replays import ReplayAsked, ReplayDone

_MOST_AUDITS = 1000
_MOST_CAPTURES = 32
_MOST_KEYS = 512
"""Of one node: several times of what an agent reports at once."""


def fold(log: Iterable[AnyRecord], state: JobState | None = None) -> JobState:
    """The state after all of `log`."""
    state = state or JobState()
    for record in log:
        state = apply(state, record)
    return state


def apply(state: JobState, record: AnyRecord) -> JobState:
    """The state after one more record."""
    match record:
        case r.Decided():  # the most frequent one by far, so it is asked for first
            return _decided(state, record)
        case r.RunStarted():
            return _run_started(state, record)
        case r.NodeJoined():
            return replace(state, joined={**state.joined, record.node: record})
        case r.NodesSettled():
            # who had a seat and never came has none any more
            joined = {node: seen for node, seen in state.joined.items() if node in record.nodes}
            return _settled(replace(state, roster=record.nodes, standby=record.standby, joined=joined))
        case r.TermStarted():
            return _term_started(state, record)
        case r.AttemptStarted():
            return _attempt_started(state, record)
        case r.RanksEnded():
            attempt = _attempt(state, record.attempt)
            ends = {**attempt.ends, **{end.rank: end for end in record.ends}}
            return _with_attempt(state, replace(attempt, ends=ends))
        case r.AttemptEnding():
            attempt = _attempt(state, record.attempt)
            told = attempt.told_to_end or record.signal == 15
            return _with_attempt(state, replace(attempt, ending=record, told_to_end=told))
        case r.AttemptEnded():
            state = _with_attempt(_of_script(state, record), replace(_attempt(state, record.attempt), ended=record))
            return replace(state, best_step=_max(state.best_step, record.step))
        case r.AttemptResumed():
            return _attempt_resumed(state, record)
        case r.Progress():
            return _with_attempt(state, replace(_attempt(state, record.attempt), progress=record))
        case r.IncidentOpened():
            state = state if record.tolerated else replace(state, suspicion=None)
            if state.communication is not None and record.component:
                state = replace(state, communication=replace(state.communication, incident=record.incident))
            return _with_incident(state, Incident(opened=record, located_time=record.time))
        case r.IncidentCorrected():
            incident = state.incidents[record.incident]
            fields = {name: getattr(record, name) for name in record.__struct_fields__ if name != "time"}
            for name in ("source", "component", "links", "path"):
                if fields[name] is None:
                    fields[name] = getattr(incident.opened, name)
            opened = replace(incident.opened, **fields)
            return _with_incident(state, replace(incident, opened=opened, located_time=record.time))
        case r.PolicyAdopted():
            return replace(state, policies={**state.policies, record.hash: record.policy}, policy=record.hash)
        case r.IncidentClosed():
            return _with_incident(state, replace(state.incidents[record.incident], closed=record))
        case r.NodeChanged():
            state = tested.forgotten(state, (record.node,)) if record.state == "lost" else state
            return replace(state, nodes={**state.nodes, record.node: record})
        case r.SignalRaised():
            return _signal_raised(state, record)
        case r.AllowAsked() | r.DrainAsked():
            known = any(type(one) is type(record) and one.node == record.node for one in state.asked)
            return state if known else replace(state, asked=(*state.asked, record))
        case r.HangSuspected():
            return replace(state, suspicion=record)
        case r.HangCleared():
            return replace(state, suspicion=None)
        case CaptureAsked():
            if record.capture < state.next_capture:
                return state  # two have asked at once: it is one look
            captures = (*state.captures, Capture(asked=record))[-_MOST_CAPTURES:]
            return replace(state, captures=captures, next_capture=record.capture + 1)
        case HangLocated():
            captures = tuple(
                replace(one, located=record) if one.asked.capture == record.capture else one for one in state.captures
            )
            return replace(state, captures=captures)
        case CollectivesOdd() | CauseFound() | CollectivesWell():
            return replace(
                state,
                communication=episode.after(state.communication, record),
                next_episode=max(state.next_episode, record.episode + 1),
            )
        case StageAsked() | StageDone():
            return tested.stage(state, record, _with_incident)
        case ReplayAsked() | ReplayDone():
            return _replay(state, record)
        case ExamAsked() | ExamOver():
            return tested.exam(state, record)
        case r.StopRequested():
            return replace(state, stop=state.stop or record)
        case r.RestartRequested():
            known = any(restart.asked.restart == record.restart for restart in state.restarts)
            return state if known else replace(state, restarts=(*state.restarts, Restart(asked=record)))
        case r.RestartVerified():
            return replace(
                state,
                restarts=tuple(
                    replace(restart, verified=record) if restart.asked.restart == record.restart else restart
                    for restart in state.restarts
                ),
            )
        case VersionKept():
            return _version_kept(state, record)
        case ChangeAsked():
            if record.change in state.changes:
                return state
            changes = {**state.changes, record.change: Change(asked=record)}
            return replace(state, changes=changes, run_changes=(*state.run_changes, record.change))
        case ChangeDropped():
            return _with_change(state, replace(state.changes[record.change], dropped=record))
        case VersionProven():
            return replace(state, proven={**state.proven, record.version: record})
        case Audited():
            return replace(state, audits=(*state.audits, record)[-_MOST_AUDITS:])
        case r.Flushed():
            return replace(state, flushed=record)
        case r.StoreCommitted():
            return replace(state, stored=(*state.stored, record))
        case r.JobEnded():
            return replace(state, ended=record)


def _term_started(state: JobState, record: r.TermStarted) -> JobState:
    same = record.clock is not None and record.clock == state.clock
    counted_since = state.counted_since if same else record.time
    return replace(state, term=record.term, term_time=record.time, clock=record.clock, counted_since=counted_since)


def _run_started(state: JobState, record: r.RunStarted) -> JobState:
    incidents = {
        number: incident if incident.closed else replace(incident, closed=_abandoned(incident, record.time))
        for number, incident in state.incidents.items()
    }
    again = replace(
        state,
        run=record,
        attempts=(),
        incidents=incidents,
        open_incidents=(),
        joined={},
        roster=_in_their_places(state, record) if record.seats is None else (),
        earlier_roster=state.roster or state.earlier_roster,
        nodes={},
        signals=(),
        known_signs=_signs_after(state, record),
        asked=_still_asked(state, record),
        answers={},
        suspicion=None,
        captures=(),
        communication=None,
        takes_replays=False,
        learnt_mesh="",
        exams=(),
        examined={},
        stop=None,
        restarts=(),
        own=None,
        run_changes=(),
        flushed=None,
        ended=None,
        # whoever calls again has seen to it: what failed before is known, how far the ladder was climbed is not
        memory=replace(state.memory, chain=Chain(), hold_until=0.0),
    )
    again = replace(again, standby=record.standby - (len(record.nodes) - len(again.roster)) if again.roster else 0)
    if state.run is None:
        again = replace(again, life=record.time)
    if record.fresh:
        again = replace(
            again,
            first_attempt=state.next_attempt,
            best_step=None,
            lineage=(),
            stored=(),
            ran={},
            memory=Memory() if record.forgets else Memory(blocked=state.memory.blocked),
            life=record.time,
            is_anew=True,
        )
        return _settled(again) if again.roster else again
    # an attempt that a killed run left open had reached what its last mark says
    for attempt in state.attempts:
        if attempt.progress is not None and attempt.ended is None:
            again = replace(again, best_step=_max(again.best_step, attempt.progress.step))
    return _settled(again) if again.roster else again


def _still_asked(state: JobState, record: r.RunStarted) -> tuple[r.AllowAsked | r.DrainAsked, ...]:
    """Who was allowed back since the last run; nobody is shut out of a life that begins anew."""
    return () if record.forgets else tuple(one for one in state.asked if isinstance(one, r.AllowAsked))


def _in_their_places(state: JobState, record: r.RunStarted) -> tuple[str, ...]:
    """Nodes keep the ranks that they had in the run before. Those that were evicted are left out, as far as the job can
    do without them."""
    allowed = [one.node for one in _still_asked(state, record)]
    out = [] if record.forgets else [node for node in state.memory.blocked if node not in allowed]
    active = len(record.nodes) - record.standby
    fit = [node for node in record.nodes if node not in out]
    fit += [node for node in record.nodes if node in out][: max(0, active - len(fit))]
    before = [] if record.fresh else list(state.roster or state.earlier_roster)
    places = {node: place for place, node in enumerate(before[:active]) if node in fit}
    rest = iter([node for node in fit if node not in places])
    kept = {place: node for node, place in places.items()}
    return tuple(kept[place] if place in kept else next(rest) for place in range(len(fit)))


def _settled(state: JobState) -> JobState:
    """Who is out stays out; who was needed all the same is none of them any more."""
    blocked = {node: one for node, one in state.memory.blocked.items() if node not in state.roster}
    here = (*state.run.nodes, *state.joined) if state.run is not None else ()
    out = {
        node: r.NodeChanged(time=one.since, node=node, state="evicted", because=one.because)
        for node, one in blocked.items()
        if node in here
    }
    return replace(state, nodes={**state.nodes, **out}, memory=replace(state.memory, blocked=blocked))


def _abandoned(incident: Incident, time: float) -> r.IncidentClosed:
    return r.IncidentClosed(time=time, incident=incident.number, first_new_step=None, passed_time=None)


def _attempt_started(state: JobState, record: r.AttemptStarted) -> JobState:
    incident = state.incident
    if incident is not None and incident.decided is not None:
        state = _with_incident(state, replace(incident, failover_attempt=record.attempt))
    restart = next((one.asked for one in state.restarts if one.asked.restart == record.restart), None)
    change = state.changes[record.change] if record.change is not None else None
    goes_back = change is not None and change.asked.goes_back
    if goes_back or (restart is not None and restart.from_step is not None):
        # what lies behind that step was given up: going on from there is progress again
        state = replace(state, best_step=record.resume)
    if change is not None:
        state = _with_change(state, replace(change, attempt=record.attempt))
        if change.asked.act != "rollback":
            state = replace(state, memory=with_other_code(state.memory))
    return replace(
        state,
        communication=None,
        ran={**state.ran, record.attempt: record.version},
        attempts=(*state.attempts, Attempt(started=record)),
        next_attempt=record.attempt + 1,
        lineage=(*state.lineage, (record.attempt, -1 if record.resume is None else record.resume)),
    )


def _replay(state: JobState, record: ReplayAsked | ReplayDone) -> JobState:
    incident = state.incidents[record.incident]
    if isinstance(record, ReplayAsked):
        rounds = (*incident.replays, Round(asked=record))
        state = replace(state, next_replay=record.round + 1)
    else:
        *earlier, newest = incident.replays
        rounds = (*earlier, replace(newest, done=record))
    return _with_incident(state, replace(incident, replays=rounds))


def _of_script(state: JobState, record: r.AttemptResumed | r.AttemptEnded) -> JobState:
    """What an attempt has shown of the script that all of this run have."""
    takes, mesh = state.takes_replays or record.takes_replays, record.mesh or state.learnt_mesh
    return replace(state, takes_replays=takes, learnt_mesh=mesh)


def _signal_raised(state: JobState, record: r.SignalRaised) -> JobState:
    state = replace(state, signals=(*state.signals, record))
    if not record.key:
        return state
    known = state.known_signs.copy()
    keys = known.pop(record.node, ())
    known[record.node] = (*keys[1 - _MOST_KEYS :], record.key)
    if len(known) > MOST_NODES:
        # who is still heard must not be forgotten: it would be told again, and again the next one be forgotten
        heard = frozenset(state.known_nodes())
        gone = next((node for node in known if node not in heard), None)
        if gone is not None:
            del known[gone]
    return replace(state, known_signs=known)


def _signs_after(state: JobState, record: r.RunStarted) -> dict[str, tuple[str, ...]]:
    """Of which signs the next run need not be told: not of those about which nothing has been decided."""
    if record.forgets:
        return {}
    open_keys = {(raised.node, raised.key) for raised in state.signals}
    return {
        node: tuple(key for key in keys if (node, key) not in open_keys) for node, keys in state.known_signs.items()
    }


def _version_kept(state: JobState, record: VersionKept) -> JobState:
    version = record.version
    state = replace(state, versions={**state.versions, version.number: version})
    if not record.is_own:
        return state
    # what an earlier run ran that was never captured may have been something else
    theirs = {attempt.number: version.number for attempt in state.attempts if state.ran[attempt.number] is None}
    return replace(state, own=version.number, ran={**state.ran, **theirs})


def _with_change(state: JobState, changed: Change) -> JobState:
    return replace(state, changes={**state.changes, changed.asked.change: changed})


def _attempt_resumed(state: JobState, record: r.AttemptResumed) -> JobState:
    state = _with_attempt(_of_script(state, record), replace(_attempt(state, record.attempt), resumed=record))
    incident = state.incident
    if incident is not None and incident.failover_attempt == record.attempt:
        state = _with_incident(state, replace(incident, resumed_time=record.resumed_time))
    return state


def _attempt(state: JobState, number: int) -> Attempt:
    return next(attempt for attempt in reversed(state.attempts) if attempt.number == number)


def _with_attempt(state: JobState, changed: Attempt) -> JobState:
    attempts = tuple(changed if attempt.number == changed.number else attempt for attempt in state.attempts)
    return replace(state, attempts=attempts)


def _with_incident(state: JobState, changed: Incident) -> JobState:
    number = changed.number
    others = tuple(one for one in state.open_incidents if one != number)
    still_open = others if changed.closed is not None else tuple(sorted((*others, number)))
    return replace(state, incidents={**state.incidents, number: changed}, open_incidents=still_open)


# -- decisions ---------------------------------------------------------------------------------------------------------


_ASKED: dict[type[d.Event], type[r.Record]] = {d.NodeAllowed: r.AllowAsked, d.DrainRequested: r.DrainAsked}


def _decided(state: JobState, record: r.Decided) -> JobState:
    """What was written down is what holds: who takes part follows from the actions, not from deciding again."""
    if record.incident is not None:
        incident = state.incidents[record.incident]
        decided = record if _is_final(record) else incident.decided
        state = _with_incident(state, replace(incident, decisions=(*incident.decisions, record), decided=decided))
    for action in record.actions:
        match action:
            case d.Evict():
                state = _evicted(state, action, record.time)
            case d.Enlist() if action.node not in state.roster:
                joining = r.NodeChanged(time=record.time, node=action.node, state="joining", because=action.because)
                nodes = {**state.nodes, action.node: joining}
                state = replace(state, roster=(*state.roster, action.node), standby=state.standby + 1, nodes=nodes)
            case d.Grow():
                active, spare = state.active_nodes(), state.standbys()
                spare = tuple(node for node in spare if node not in action.nodes)
                state = replace(state, roster=(*active, *action.nodes, *spare), standby=len(spare))
    if record.event is None:
        # of an older version, for which an incident had dealt with all signals there were
        return replace(state, signals=()) if state.signals else state
    memory = evolve(state.memory, record.event, record.actions, record.incident)
    state = replace(state, memory=memory) if memory is not state.memory else state
    if state.signals and isinstance(
        record.event, d.NodeFault | d.NetworkAlert | d.HardwareReading | d.Oddity | d.SensorBlind
    ):
        return replace(state, signals=state.signals[1:])
    if isinstance(record.event, d.NodeAllowed | d.DrainRequested):
        kind, node = _ASKED[type(record.event)], record.event.node
        rest = tuple(one for one in state.asked if not (isinstance(one, kind) and one.node == node))
        return replace(state, asked=rest, answers={**state.answers, node: record})
    return state


def _is_final(record: r.Decided) -> bool:
    """Whether training goes on, or ends, after this decision; nobody is waited for first."""
    if record.event is None:
        return True  # of an older version
    if isinstance(record.event, d.NobodyCame):
        return True  # nothing is left to wait for
    return any(isinstance(action, d.Restart | d.Evict | d.Stop | d.Hold) for action in record.actions)


def _evicted(state: JobState, evict: d.Evict, time: float) -> JobState:
    active = [evict.replacements.get(node, node) for node in state.active_nodes()]
    taken = {*evict.nodes, *evict.replacements.values()}
    active = [node for node in active if node not in evict.nodes]
    spare = [node for node in state.standbys() if node not in taken]
    state = tested.forgotten(state, evict.nodes)
    word = "lost" if evict.lost else "evicted"
    changed = {
        node: r.NodeChanged(time=time, node=node, state=word, because=evict.because)  # type: ignore[arg-type]
        for node in evict.nodes
    }
    return replace(state, roster=(*active, *spare), standby=len(spare), nodes={**state.nodes, **changed})


def _max(one: int | None, other: int | None) -> int | None:
    return max((step for step in (one, other) if step is not None), default=None)
