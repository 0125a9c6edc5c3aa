"""An attempt has failed: which event is that, and what is its incident waiting for?

    failed ──▶ decided: restart, evict, stop, hold
       └─────▶ somebody is asked, or a node waited for ──answer, node, deadline──▶ decided

Every wait has its deadline here.
"""

from __future__ import annotations

from typing import Literal

from evertrain.decide import answering, closing, incidents, inspection, replaying, rollback
from evertrain.decide.applying import apply, fold
from evertrain.decide.blame import Blame
from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, Incident, JobState
from evertrain.detect import exits
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.config import Config
from evertrain.model.records import AnyRecord


def look(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """What follows for the incident that nobody has decided yet."""
    incident = state.incident
    if incident is None or incident.decided is not None or state.closing or not state.policy:
        return []
    if incident.decisions:
        return _waiting(state, picture, incident, config, now)
    attempt = state.attempt
    if attempt is None or attempt.number != incident.opened.attempt:
        return []
    is_stuck = attempt.ended is None and attempt.ending is not None and closing.at_rest(state, picture)
    if attempt.ended is None and not (is_stuck and state.usable_standbys()):
        return []  # it may let go yet, and nobody else could take its place
    stuck = tuple(attempt.alive_by_node()) if is_stuck else ()
    event = _failed(attempt, incident, now, stuck=stuck, policy=state.policies[state.policy])
    return answering.answer(state, event, incident.number)


def _failed(
    attempt: Attempt, incident: Incident, now: float, *, stuck: tuple[str, ...], policy: d.Policy
) -> d.AttemptFailed:
    opened = incident.opened
    # a group is what is left where nobody in it can be named; ByteRobust takes it out in any case
    is_group = bool(opened.group_nodes) and (not opened.ranks or policy.hang_policy == "paper")
    ends = [attempt.ends[rank] for rank in opened.ranks if rank in attempt.ends]
    own = next((end.error for end in ends if end.error is not None and not end.follower), None)
    raised = own is not None and len(opened.ranks) == 1 and not exits.is_damage(own)
    return d.AttemptFailed(
        time=now,
        incident=incident.number,
        source=_seen_by(opened.source),
        cause=opened.cause,
        category=opened.category,
        ranks=opened.ranks,
        nodes=opened.group_nodes if is_group else opened.nodes,
        is_group=is_group,
        # an exception says itself in which step it was raised
        step=own.step if raised and own is not None else opened.step,
        signature=own.signature() if raised and own is not None else "",
        confidence=opened.confidence,
        evidence=opened.evidence,
        stuck=stuck,
        is_damage=any(exits.is_damage(end.error) for end in attempt.ends.values()),
    )


def _seen_by(source: r.Source) -> d.FailureSource:
    if source == "signal":
        return "exit"
    return "metrics" if source == "communication" else source


def _waiting(state: JobState, picture: Picture, incident: Incident, config: Config, now: float) -> list[AnyRecord]:
    """Nodes that are ready now; a wait that is over; an answer that has not come in time."""
    last = incident.decisions[-1]
    if (wait := incident.wait) is not None:
        return _for_nodes(state, incident, wait, now)
    asked = next((action for action in last.actions if type(action) in _RUNGS), None)
    if isinstance(asked, d.RollBack):
        return _roll_back(state, incident, now)
    if isinstance(asked, d.Inspect) and config.diagnose.enabled:
        found = inspection.look(state, picture, incident, asked, last.time, config.diagnose, now)
        return answering.answer(state, found, incident.number) if isinstance(found, d.Answered) else found
    if isinstance(asked, d.Replay) and config.diagnose.replay:
        found = replaying.look(state, picture, incident, last.time, config.diagnose, now)
        return answering.answer(state, found, incident.number) if isinstance(found, d.Answered) else found
    if asked is None or now - state.since(last.time) > config.ladder.inspect_limit_s:
        rung = _RUNGS[type(asked)] if asked is not None else "inspect"
        silent = d.Answered(time=now, incident=incident.number, rung=rung, outcome="not_available")
        return answering.answer(state, silent, incident.number)
    return []


def _roll_back(state: JobState, incident: Incident, now: float) -> list[AnyRecord]:
    """It is decided at once; whether the nodes get that version is seen when it is to start."""
    records = rollback.ask(state, incident.number, now)
    outcome: Literal["done", "not_available"] = "done" if records else "not_available"
    event = d.Answered(time=now, incident=incident.number, rung="roll_back", outcome=outcome)
    return [*records, *answering.answer(fold(records, state), event, incident.number)]


_RUNGS: dict[type[d.Action], d.Rung] = {d.Inspect: "inspect", d.RollBack: "roll_back", d.Replay: "replay"}


def _for_nodes(state: JobState, incident: Incident, wait: d.WaitForNodes, now: float) -> list[AnyRecord]:
    told = {one.event.node for one in incident.decisions if isinstance(one.event, d.NodeReady)}
    new = next((node for node in state.usable_standbys() if node not in told), None)
    if new is None and now < wait.until:
        return []
    event = d.NodeReady(time=now, node=new) if new is not None else d.NobodyCame(time=now, incident=incident.number)
    decided, *more = answering.answer(state, event, incident.number)
    trains_on = state.active is not None and state.active.ending is None and not more
    if trains_on and apply(state, decided).incidents[incident.number].decided is not None:
        # it has trained all the time
        more = [r.IncidentClosed(time=now, incident=incident.number, first_new_step=None, passed_time=None)]
    return [decided, *more]


def nodes_wanted(state: JobState) -> tuple[int, str]:
    """How many nodes the platform should bring, and why; 0: none."""
    if state.closing or state.ended is not None or state.run is None or state.run.seats is None:
        return 0, ""
    if state.waiting is not None and (wait := state.waiting.wait) is not None:
        return wait.nodes, wait.because
    lost = [node for node in state.active_nodes() if node in state.nodes and state.nodes[node].state == "lost"]
    missing = len(lost) - len(state.usable_standbys())
    return (missing, f"{', '.join(lost[:4])}: lost, and nobody can take over") if lost and missing > 0 else (0, "")


def missing(state: JobState, node: str, because: str, now: float) -> list[AnyRecord]:
    """A node that the next attempt needs does not come back, and a standby can take its place."""
    lost = r.NodeChanged(time=now, node=node, state="lost", because=because)
    if (incident := state.incident) is not None:
        # it has been decided how training goes on, and what came of it waits for this node in vain
        ready = d.NodeReady(time=now, node=state.usable_standbys()[0])
        return [lost, *answering.answer(apply(state, lost), ready, incident.number)]
    verdict = Blame(
        source="lost",
        fault_time=now,
        cause="node lost",
        category="host_os",
        ranks=tuple(rank for rank, placed in state.placement().items() if placed == node),
        nodes=(node,),
        evidence=(f"{node}: {because}",),
    )
    last = state.attempt.number if state.attempt is not None else 0
    records: list[AnyRecord] = [lost, incidents.opened(state, last, verdict, state.best_step, now)]
    number = max(state.incidents, default=0) + 1
    event = d.AttemptFailed(
        time=now,
        incident=number,
        source="lost",
        cause=verdict.cause,
        category=verdict.category,
        ranks=verdict.ranks,
        nodes=verdict.nodes,
        step=state.best_step,
        evidence=verdict.evidence,
    )
    return [*records, *answering.answer(fold(records, state), event, number)]


def proven(state: JobState, attempt: Attempt, step: int | None, config: Config, now: float) -> list[AnyRecord]:
    """Training has come so far beyond the failing step that its restart counts as a success."""
    chain = state.memory.chain.incidents
    if not chain or not state.policy or attempt.resumed is None:
        return []
    last = state.incidents.get(chain[-1])
    failed_at = last.opened.step if last is not None else None
    if failed_at is None or step is None:
        if now - attempt.resumed.resumed_time < config.ladder.proven_s:
            return []
    elif step < failed_at + config.ladder.proven_steps:
        return []
    return answering.answer(state, d.Proven(time=now, incident=chain[-1]))
