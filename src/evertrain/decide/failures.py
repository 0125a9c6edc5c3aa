"""An attempt has failed: what follows? The part of the ladder that a job climbs, rung by rung.

    stuck ───── `stuck` ──▶ a process that nothing ends: replace its node, whoever is to blame
    hang ────── `hang` ───▶ restart in place; hardware evidence, or again at the same node ──▶ evict
    node lost ─ `lost` ───▶ replace; else go on with fewer; else wait for it
    storage ─── `hold` ───▶ the next start waits, longer each time
    exception ─ `script_error` ─▶ roll back a recent change; else restart; the same at the same step ──▶ stop
    any of these but a lost node, while an update waits for the next restart ──▶ restart with it
    anything else ────────▶ restart in place; again, before training has proven itself ──▶ `climb`

    climb: stop-time checks ──suspects──▶ evict
                │ clean
                ▼
           one more attempt ──fails──▶ roll back ──fails──▶ replay ──suspects──▶ evict
                                                              │ nobody
                                                              ▼
                                                    restart, ask a human

What cannot give an answer is passed over and named. A job that makes progress is never rolled back, and ended only
where the very same exception comes back at the very same step; one that makes none ends when nothing is left to try.
"""

from __future__ import annotations

from evertrain.decide import changes, eviction, memory, replaying, rollback
from evertrain.decide.eviction import Removal, listed
from evertrain.decide.state import Attempt, JobState
from evertrain.model.decisions import (
    Answered,
    AnyAction,
    AttemptFailed,
    Evict,
    Hold,
    Inspect,
    Policy,
    Replay,
    Restart,
    RollBack,
    Rung,
    Stop,
    WaitForNodes,
)

MOST_HOLDS = 8
"""Without progress in between: about three quarters of an hour by default. Storage that is away for longer is no outage
that a job should sit out."""
LONGEST_HOLD_S = 600.0

_RUNG_NAMES: dict[Rung, str] = {"inspect": "stop-time checks", "roll_back": "roll-back", "replay": "replay"}
_DECLARE = '; if it is no hang but takes so long, declare it: `with evertrain.phase("…"):`'
_SURE_HANGS = frozenset(
    f"hang ({kind})"
    for kind in ("stopped", "uninterruptible", "held", "skipped", "order", "mismatch", "deadlock", "device", "network")
)
"""No patience would help these."""


def attempt_failed(state: JobState, event: AttemptFailed, policy: Policy) -> tuple[AnyAction, ...]:
    """What follows from the end of an attempt."""
    assert state.run is not None
    if used_up := restarts_used_up(state):
        return (Stop(because=f"{_what(event)}; {used_up}"),)
    idle = without_progress(state, event)
    actions = _answer(state, event, policy, idle)
    is_new = _is_new(state, actions) or changes.pending(state) is not None
    if idle >= policy.restart.no_progress_attempts and not is_new:
        missing = _missing(policy)
        return (
            Stop(
                because=f"{_what(event)}; {idle} attempts in a row made no progress{f'; {missing}' if missing else ''}"
            ),
        )
    return eviction.grown(state, actions)


def _answer(state: JobState, event: AttemptFailed, policy: Policy, idle: int) -> tuple[AnyAction, ...]:
    if event.source == "lost":
        return lost(state, event, policy)
    if held := eviction.still_active(state, event.stuck):
        return stuck(state, event, policy, held)
    if broken := _known_broken(state, policy, event.time):
        return broken
    if (change := changes.pending(state)) is not None:
        because = f"{_what(event)}: restart with version {change.asked.version}, which was to come with the next one"
        return (Restart(because=because),)
    if event.source == "hang":
        return hang(state, event, policy, idle)
    if event.is_damage:
        return (Restart(because=f"{_what(event)}: restart from other copies"),)
    if event.category == "storage":
        return hold(state, event, policy)
    if event.signature:
        return script_error(state, event, policy, idle)
    if event.category == "numerics":
        return climb(state, event, policy, idle, "the numbers are wrong")
    if again := _repeats(state, event, policy):
        return climb(state, event, policy, idle, again)
    return (Restart(because=f"{_what(event)}: restart in place"),)


def _is_new(state: JobState, actions: tuple[AnyAction, ...]) -> bool:
    """Whether this has not been tried since training last proved itself."""
    chain = state.memory.chain
    for action in actions:
        match action:
            case Stop() | Inspect() | RollBack() | Replay():
                return True
            case Evict() | WaitForNodes() if not chain.evictions:
                return True
            case Hold() if chain.holds < MOST_HOLDS:
                return True
    return False


def _known_broken(state: JobState, policy: Policy, now: float) -> tuple[AnyAction, ...]:
    """Nodes that should have gone before, and can be replaced by now."""
    oldest = now - policy.ladder.repeat_window_s
    faults = state.memory.faults
    known = eviction.still_active(state, [node for node, fault in faults.items() if fault.time >= oldest])
    nodes = known[: len(state.usable_standbys())]
    while nodes and eviction.over_budget(state, policy.ladder, now, len(nodes)):
        nodes = nodes[:-1]
    if not nodes:
        return ()
    why = "; ".join(f"{node}: {faults[node].signal.replace('_', ' ')}, and now it can be replaced" for node in nodes)
    evidence = tuple(f"{node}: {faults[node].evidence}" for node in nodes)
    return eviction.remove(state, policy, now, Removal(nodes=nodes, why=why, evidence=evidence))


def stuck(state: JobState, event: AttemptFailed, policy: Policy, nodes: tuple[str, ...]) -> tuple[AnyAction, ...]:
    """A process sleeps in the kernel: whoever is to blame for the failure, a restart in place would wait for it."""
    seen = f"a process on {listed(nodes)} does not end, SIGKILL notwithstanding"
    removal = Removal(nodes=nodes, why=f"{_what(event)}; {seen}", evidence=(seen, *event.evidence))
    return eviction.remove(state, policy, event.time, removal)


# -- hang --------------------------------------------------------------------------------------------------------------


def hang(state: JobState, event: AttemptFailed, policy: Policy, idle: int) -> tuple[AnyAction, ...]:
    """A hang alone never convicts a node; one that a change of the code has brought comes back after a restart."""
    if idle > 1 and _can_roll_back(state, policy, event.time, event):
        return (_roll_back(state, _what(event)),)
    named = eviction.still_active(state, event.nodes)
    if not named or event.category in memory.NO_HARDWARE:
        return (Restart(because=f"{_what(event)}: restart in place{_advice(event)}"),)
    if policy.hang_policy == "paper":
        reason = f"{'the group of those ' if event.is_group else ''}named in a hang (hang.policy: paper)"
        return _if_replaceable(state, event, policy, named, reason, group=event.is_group)
    if event.is_group:
        return _if_replaceable(state, event, policy, named, "one of this group hangs, nothing says which", group=True)
    reasons = {node: reason for node in named if (reason := eviction.against(state, policy, node, event))}
    if not reasons:
        return (Restart(because=f"{_what(event)}: restart in place, the first time{_advice(event)}"),)
    return _if_replaceable(state, event, policy, tuple(reasons), "; ".join(reasons.values()))


def _advice(event: AttemptFailed) -> str:
    return "" if event.cause in _SURE_HANGS else _DECLARE


def _if_replaceable(
    state: JobState, event: AttemptFailed, policy: Policy, nodes: tuple[str, ...], reason: str, *, group: bool = False
) -> tuple[AnyAction, ...]:
    """Evict nodes of which it is not certain that they are broken: only where others stand ready."""
    ready = len(state.usable_standbys())
    if ready < len(nodes):
        because = f"{_what(event)}; {reason}; restart in place: {ready} standbys are ready for {len(nodes)} nodes"
        return (Restart(because=because),)
    window_s = policy.ladder.reading_window_s
    seen = tuple(line for node in nodes for line in eviction.signs(state.memory, node, event.time, window_s))
    removal = Removal(
        nodes=nodes,
        why=f"{_what(event)}; {reason}",
        evidence=(reason, *seen, *event.evidence),
        is_group=group,
    )
    return eviction.remove(state, policy, event.time, removal)


# -- lost, storage, exceptions -----------------------------------------------------------------------------------------


def lost(state: JobState, event: AttemptFailed, policy: Policy) -> tuple[AnyAction, ...]:
    """One that is gone is replaced at once; one that is back already is taken back, the first time."""
    named = eviction.still_active(state, event.nodes)
    gone = tuple(node for node in named if (seen := state.nodes.get(node)) is not None and seen.state == "lost")
    if gone:
        because = "; ".join(f"{node} is lost: {state.nodes[node].because}" for node in gone[:4])
        removal = Removal(
            nodes=gone,
            why=because,
            evidence=(because, *event.evidence),
            lost=True,
            may_wait=False,
            is_grave=False,
        )
        return _or_wait(eviction.remove(state, policy, event.time, removal), policy)
    oldest = event.time - policy.ladder.repeat_window_s
    before = {
        node: one.incident
        for one in state.memory.past
        if one.source == "lost" and one.time >= oldest and one.incident != event.incident
        for node in one.nodes
    }
    again = tuple(node for node in named if node in before)
    if not again:
        return (Restart(because=f"{_what(event)}: restart in place; {listed(named) or 'the node'} is back"),)
    reason = "; ".join(f"{node} was lost before, in incident {before[node]}" for node in again)
    return _if_replaceable(state, event, policy, again, reason)


def _or_wait(actions: tuple[AnyAction, ...], policy: Policy) -> tuple[AnyAction, ...]:
    """A restart without the node waits until it is back."""
    waits = f", which waits up to {policy.restart.node_return_s:.0f} s for it to come back"
    return tuple(Restart(because=one.because + waits) if isinstance(one, Restart) else one for one in actions)


def hold(state: JobState, event: AttemptFailed, policy: Policy) -> tuple[AnyAction, ...]:
    """Storage does not answer: no node is to blame, and to start at once would only fail again."""
    holds = state.memory.chain.holds
    seconds = min(policy.ladder.hold_s * 2.0 ** min(holds, 30), LONGEST_HOLD_S)
    because = f"{_what(event)}: storage; the next start waits {seconds:.0f} s"
    return (Hold(until=event.time + seconds, because=because),)


def script_error(state: JobState, event: AttemptFailed, policy: Policy, idle: int) -> tuple[AnyAction, ...]:
    """The script has raised an exception: no machine is to blame."""
    times = _same_error(state, event)
    if idle and _can_roll_back(state, policy, event.time, event):
        return (_roll_back(state, _what(event)),)
    if times >= policy.restart.same_error_limit:
        often = {2: "twice"}.get(times, f"{times} times")
        return (Stop(because=f"{who(event)} ended {often} with the same {event.cause} at the same step"),)
    return (Restart(because=f"{_what(event)}: restart in place"),)


def _can_roll_back(state: JobState, policy: Policy, now: float, event: AttemptFailed | None) -> bool:
    """Whether a recent change of the code may be the cause, and undoing it has not been tried yet."""
    if "roll_back" not in policy.sources or "roll_back" in state.memory.chain.asked:
        return False
    oldest, faults = now - policy.ladder.repeat_window_s, state.memory.faults
    if event is not None and any(node in faults and faults[node].time >= oldest for node in event.nodes):
        return False  # it is known to be broken, and only could not be replaced
    return rollback.recent(state, policy.code, now) is not None and rollback.target(state) is not None


def _roll_back(state: JobState, what: str, notes: tuple[str, ...] = ()) -> RollBack:
    runs, back = changes.in_force(state), rollback.target(state)
    return RollBack(because=_with_notes(f"{what}: roll back from version {runs} of the code to version {back}", notes))


def _same_error(state: JobState, event: AttemptFailed) -> int:
    """How often in this run the script has raised this very exception at this step, this time included."""
    mine = memory.signature(event)
    first = state.attempts[0].number if state.attempts else 0
    before = {
        one.incident
        for one in state.memory.past
        if one.signature == mine
        and (incident := state.incidents.get(one.incident)) is not None
        and incident.opened.attempt >= first
    }
    return len(before | {event.incident})


# -- the rungs ---------------------------------------------------------------------------------------------------------


def _repeats(state: JobState, event: AttemptFailed, policy: Policy) -> str:
    """Why this is not the first time; empty when it is."""
    chain = [number for number in state.memory.chain.incidents if number != event.incident]
    if chain:
        return f"training had not proven itself since incident {chain[-1]}"
    mine = memory.signature(event)
    oldest = event.time - policy.ladder.repeat_window_s
    for one in reversed(state.memory.past):
        if mine and one.signature == mine and one.time >= oldest and one.incident != event.incident:
            return f"the same as incident {one.incident}, {(event.time - one.time) / 3600:.1f} h ago"
    return ""


def climb(state: JobState, event: AttemptFailed, policy: Policy, idle: int, again: str) -> tuple[AnyAction, ...]:
    """It failed before: look for the cause, cheap and certain first."""
    chain = state.memory.chain
    what = f"{_what(event)}; {again}"
    can_compare = "inspect" in policy.sources and len(state.active_nodes()) > 1
    # a job that makes progress is not held up the second time already
    is_due = idle or event.category == "numerics" or chain.reattempts >= policy.ladder.reattempts
    if can_compare and is_due and "inspect" not in chain.asked:
        return (Inspect(nodes=state.active_nodes(), because=f"{what}: stop-time checks on all nodes"),)
    notes: tuple[str, ...] = ()
    if not can_compare:
        notes = ("stop-time checks: not available",)
        window_s = policy.ladder.reading_window_s
        seen = {
            node: lines
            for node in eviction.still_active(state, event.nodes)
            if (lines := eviction.signs(state.memory, node, event.time, window_s))
        }
        if seen:
            evidence = tuple(line for lines in seen.values() for line in lines)
            why = f"{what}; stop-time checks: not available, and its hardware was odd within {window_s / 60:.0f} min"
            removal = Removal(nodes=tuple(seen), why=why, evidence=(*evidence, *event.evidence))
            return eviction.remove(state, policy, event.time, removal)
    tried = idle >= policy.restart.no_progress_attempts or ("inspect" in chain.asked and chain.evictions > 0)
    if not tried and chain.reattempts < policy.ladder.reattempts:
        return (Restart(because=_with_notes(f"{what}: one more attempt in place", notes)),)
    return _after_reattempt(state, policy, event.time, event, idle, what, notes)


def _after_reattempt(
    state: JobState,
    policy: Policy,
    now: float,
    event: AttemptFailed | None,
    idle: int,
    what: str,
    notes: tuple[str, ...],
) -> tuple[AnyAction, ...]:
    """Another attempt on the same nodes with the same code is no news: the code, then the machines one by one."""
    if not idle:
        because = f"{_with_notes(what, notes)}: restart in place; it makes progress, so nothing is rolled back"
        return eviction.restart_and_ask(because, f"{what}; it goes on, but somebody should look")
    asked = state.memory.chain.asked
    if _can_roll_back(state, policy, now, event):
        return (_roll_back(state, what, notes),)
    if "roll_back" not in asked:
        notes = (
            *notes,
            "roll-back: no recent change of the code" if "roll_back" in policy.sources else "roll-back: not available",
        )
    if "replay" not in policy.sources:
        notes = (*notes, "replay: not available")
    elif "replay" not in asked and (why := replaying.why_not(state)):
        notes = (*notes, f"replay: {why}")
    elif "replay" not in asked:
        return (Replay(because=_with_notes(f"{what}: replay the failing steps on groups of nodes", notes)),)
    because = _with_notes(f"{what}: restart in place", notes)
    if idle >= policy.restart.no_progress_attempts:
        because = _with_notes(f"{what}; {idle} attempts in a row made no progress", notes)
        return (Stop(because=because),)
    return eviction.restart_and_ask(because, f"{what}; nothing that can be asked has found the cause")


def answered(state: JobState, event: Answered, policy: Policy) -> tuple[AnyAction, ...]:
    """Whoever was asked has answered: evict the suspects, or go on to the next rung."""
    failed = _failure_of(state, event.incident)
    what, name = _what(failed) if failed is not None else f"incident {event.incident}", _RUNG_NAMES[event.rung]
    suspects = eviction.still_active(state, event.nodes) if event.outcome == "suspects" else ()
    if suspects:
        why = f"{what}; {name}: {listed(suspects)}"
        evidence = event.evidence or (f"{name} named {listed(suspects)}",)
        removal = Removal(nodes=suspects, why=why, evidence=evidence)
        return eviction.grown(state, eviction.remove(state, policy, event.time, removal))
    if event.rung == "roll_back" and event.outcome == "done":
        return eviction.grown(state, (Restart(because=f"{what}: restart with the code before that change"),))
    chain, idle = state.memory.chain, without_progress(state, failed)
    said = "no answer" if event.outcome == "not_available" else "nobody is suspect"
    if event.rung == "replay" and event.evidence:
        said = "; ".join(event.evidence)
    notes = (f"{name}: {said}",)
    if event.rung == "inspect" and chain.reattempts < policy.ladder.reattempts:
        again = Restart(because=_with_notes(f"{what}: one more attempt in place", notes))
        return eviction.grown(state, (again,))
    return eviction.grown(state, _after_reattempt(state, policy, event.time, failed, idle, what, notes))


def _failure_of(state: JobState, incident: int) -> AttemptFailed | None:
    known = state.incidents.get(incident)
    decisions = known.decisions if known is not None else ()
    return next((one.event for one in reversed(decisions) if isinstance(one.event, AttemptFailed)), None)


def _with_notes(text: str, notes: tuple[str, ...]) -> str:
    return f"{text} ({'; '.join(notes)})" if notes else text


def _missing(policy: Policy) -> str:
    names = [name for rung, name in _RUNG_NAMES.items() if rung not in policy.sources]
    return f"not available: {', '.join(names)}" if names else ""


# -- what speaks against going on --------------------------------------------------------------------------------------


def restarts_used_up(state: JobState) -> str:
    assert state.run is not None
    limit, used = state.run.max_restarts, state.restarts_used
    return f"{used} of {limit} restarts are used (--max-restarts)" if limit is not None and used >= limit else ""


def without_progress(state: JobState, event: AttemptFailed | None) -> int:
    """Attempts in a row, up to the one that failed now, after which training had come no further."""
    damaged = {one.incident for one in state.memory.past if one.is_damage}
    if event is not None and event.is_damage:
        damaged.add(event.incident)
    # the next one goes on from another copy
    excused = {state.incidents[number].opened.attempt for number in damaged if number in state.incidents}
    count = 0
    for attempt in reversed(state.attempts):
        if _has_progress(state, attempt):
            break
        if attempt.number in excused or (attempt.ended is not None and attempt.ended.outcome == "restarted"):
            continue  # it was not given the time
        count += 1
    return count


def _has_progress(state: JobState, attempt: Attempt) -> bool:
    if attempt.ended is not None:
        return attempt.ended.progress
    mark = attempt.progress
    # it still runs, as far as it can: what it has come to is judged when it has ended; nobody is hurried
    return mark is not None and (mark.step is None or state.best_step is None or mark.step > state.best_step)


# -- in words ----------------------------------------------------------------------------------------------------------


def who(event: AttemptFailed) -> str:
    if event.source == "metrics":
        return "training"
    if len(event.ranks) == 1 and event.nodes:
        return f"rank {event.ranks[0]} on {event.nodes[0]}"
    return listed(event.nodes) or "an unknown rank"


def _what(event: AttemptFailed) -> str:
    return f"{who(event)} ({event.cause})"
