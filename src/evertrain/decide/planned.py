"""What follows from a restart that the user asked for?

    asked ──▶ attempt ended ──▶ the next one starts ──▶ all ranks are in their loop
                                                            └──to verify──▶ the old step is reached again ──▶ compared

It is no fault: no incident is opened, no restart used up, no attempt counted as failed. A change of the code ends the
ranks in the same way (`decide.changes`), and so do other arguments and environment, which are a change as well.
"""

from __future__ import annotations

from evertrain.decide import changes, incidents, resume
from evertrain.decide.blame import Blame
from evertrain.decide.changes import Refusal
from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState, Restart
from evertrain.model import records as r
from evertrain.model.records import AnyRecord
from evertrain.model.report import Compare, Comparison

MOST_VERIFIED = 128
"""Half of what a page remembers: training goes on while losses are compared."""

NO_LOSSES = "no loss was reported together with its step in both attempts: evertrain.report(step=…, loss=…)"


# -- what was asked for ----------------------------------------------------------------------------------------------


def pending(state: JobState) -> Restart | None:
    """The restart whose own attempt has not started yet; with a change that was dropped it is none any more."""
    newest = state.restarts[-1] if state.restarts else None
    attempt = state.attempt
    waits = newest is not None and attempt is not None and attempt.number == newest.asked.attempt
    if newest is None or not waits:
        return None
    came_with_change = newest.asked.restart in state.changes
    # the newest one has taken the place of its own
    is_dropped = came_with_change and state.changes[state.run_changes[-1]].dropped is not None
    return None if is_dropped else newest


def back(state: JobState, restart: Restart) -> Attempt | None:
    """The attempt with which training was back.

    Where nobody ever saw the old ranks in their loop (a program, a script without steps), a start is all that can be
    seen.
    """
    old = next((one for one in state.attempts if one.number == restart.asked.attempt), None)
    unseen = old is not None and old.resumed is None
    later = (one for one in state.attempts if one.number > restart.asked.attempt)
    return next((one for one in later if one.resumed is not None or unseen), None)


def verifying(state: JobState) -> Restart | None:
    """The restart whose attempt is on its way to the step that had been reached."""
    newest = state.restarts[-1] if state.restarts else None
    if newest is None or newest.asked.verify is None or newest.verified is not None or state.attempt is None:
        return None
    return newest if state.attempt.started.restart == newest.asked.restart else None


def refusal(state: JobState, picture: Picture, asked: r.RestartRequested, step: int | None) -> Refusal | None:
    """Why `asked` cannot be done now; None: it can. `step` is how far the running attempt has come, by name."""
    attempt = state.active
    if state.ended is not None or state.closing:
        return Refusal("it is ending")
    if pending(state) is not None:
        return Refusal("it is being restarted already")
    if verifying(state) is not None:
        return Refusal("it still repeats the steps that another restart is to verify")
    if asked.verify is not None and changes.pending(state) is not None:
        return Refusal("an update comes with the next restart; steps can be compared with one version only")
    if state.incident is not None or (attempt is not None and attempt.ending is not None):
        return Refusal("it is recovering; ask again when training is back")
    if attempt is None:
        return Refusal("its ranks have not been started yet")
    if silent := [node for node in state.active_nodes() if not picture.connected(node)]:
        return Refusal(f"nothing is heard from {', '.join(silent)}", soon=True)
    if asked.from_step is None and asked.verify is None:
        return None
    done = 0 if step is None else step - (attempt.started.resume or 0)
    if asked.verify is not None and step is not None and done < asked.verify <= MOST_VERIFIED:
        return Refusal(f"this attempt has done {done} new steps yet, and only those can be compared; ask again later")
    return _no_such_step(asked, available(state, picture), step)


def available(state: JobState, picture: Picture) -> list[int]:
    """Steps that all ranks hold just now; ranks that run may overwrite any of them."""
    copies = {node: seen.report.copies for node, seen in picture.nodes.items()}
    return [one.step for one in resume.common(copies, state.placement(), resume.rules(state))]


def _no_such_step(asked: r.RestartRequested, held: list[int], step: int | None) -> Refusal | None:
    if not held or step is None:
        return Refusal("there is no step that all ranks hold: its script saves none (Checkpointer.save)", True)
    listed = f"the steps that all ranks hold are {', '.join(map(str, held))}"
    if asked.from_step is not None and asked.from_step not in held:
        return Refusal(f"step {asked.from_step} cannot be resumed; {listed}", True)
    if asked.verify is not None and not 1 <= asked.verify <= MOST_VERIFIED:
        return Refusal(f"1 to {MOST_VERIFIED} steps can be verified, not {asked.verify}", True)
    if asked.verify is not None and held[0] > step - asked.verify:
        many = "the last step" if asked.verify == 1 else f"the last {asked.verify} steps"
        return Refusal(f"{many} before step {step} cannot be repeated; {listed}", True)
    return None


# -- the way back ----------------------------------------------------------------------------------------------------


def end(state: JobState, picture: Picture, attempt: Attempt, patience_s: float, now: float) -> list[AnyRecord]:
    """End the ranks of the attempt that the restart is meant for.

    They train on while processes of another version import what they need; not longer than `patience_s`.
    """
    restart = pending(state)
    if restart is None:
        return []
    change = changes.pending(state)
    if change is None:
        because, signal = "a restart was asked for", 9
    else:
        if not changes.may_end(state, picture, now - restart.asked.time, patience_s):
            return []
        # they may have something to save that nobody else does
        because, signal = f"{change.asked.act} to version {change.asked.version}", 15
    name = restart.asked.restart
    return [r.AttemptEnding(time=now, attempt=attempt.number, signal=signal, because=because, restart=name)]


def latest_step(state: JobState) -> int | None:
    """The latest step at which the attempt that is about to start may resume; None: any."""
    restart = pending(state)
    if restart is None:
        return None
    if restart.asked.from_step is not None:
        return restart.asked.from_step
    old = state.attempt
    reached = old.ended.step if old is not None and old.ended is not None else None
    return None if restart.asked.verify is None or reached is None else reached - restart.asked.verify


def has_passed(attempt: Attempt, step: int | None) -> bool:
    """Whether the attempt of a restart has just done a step that none had done before, and no mark says so yet."""
    reached, mark = attempt.started.reached, attempt.progress
    if attempt.started.restart is None or reached is None or step is None or step <= reached:
        return False
    return mark is None or mark.step is None or mark.step <= reached


# -- verification ----------------------------------------------------------------------------------------------------


def compare(state: JobState) -> Compare | None:
    """What the agents are to compare."""
    restart, attempt = verifying(state), state.active
    if restart is None or attempt is None:
        return None
    last = _reached(state, restart)
    after = attempt.started.resume
    if last is None or after is None:
        return None
    return Compare(earlier=restart.asked.attempt, later=attempt.number, after=after, last=last)


def verify(state: JobState, picture: Picture, attempt: Attempt, now: float, *, over: bool = False) -> list[AnyRecord]:
    """What came out, as soon as every rank has been compared; `over`: no more will come."""
    restart = verifying(state)
    if restart is None:
        return []
    last, resumed = _reached(state, restart), attempt.started.resume
    if last is None or resumed is None or resumed >= last:
        return [_nothing(restart, attempt, "there was no step to repeat: the copies before it are gone", now)]
    found = [one for seen in picture.nodes.values() for one in seen.report.comparisons if one.later == attempt.number]
    if {one.rank for one in found} >= set(attempt.started.placement):
        return _outcome(state, restart, attempt, found, now)
    if over:
        return [_nothing(restart, attempt, f"attempt {attempt.number} ended before step {last} was reached again", now)]
    return []


def _reached(state: JobState, restart: Restart) -> int | None:
    old = next((one for one in state.attempts if one.number == restart.asked.attempt), None)
    return old.ended.step if old is not None and old.ended is not None else None


def _nothing(restart: Restart, attempt: Attempt, problem: str, now: float) -> r.RestartVerified:
    return r.RestartVerified(time=now, restart=restart.asked.restart, attempt=attempt.number, problem=problem)


def _outcome(
    state: JobState, restart: Restart, attempt: Attempt, found: list[Comparison], now: float
) -> list[AnyRecord]:
    firsts = [one.first_step for one in found if one.first_step is not None]
    lasts = [one.last_step for one in found if one.last_step is not None]
    if not firsts:
        return [_nothing(restart, attempt, NO_LOSSES, now)]
    differing = sorted(
        (one.difference for one in found if one.difference is not None), key=lambda one: (one.step, one.rank)
    )
    first = differing[0] if differing else None
    verified = r.RestartVerified(
        time=now,
        restart=restart.asked.restart,
        attempt=attempt.number,
        first_step=min(firsts),
        last_step=max(lasts),
        ranks=len(firsts),
        difference=first,
    )
    if first is None or state.incident is not None:
        return [verified]  # with an incident going on, the record has to do
    verdict = Blame(
        source="verification",
        fault_time=now,
        cause="not reproducible",
        category="unknown",
        ranks=(first.rank,),
        nodes=(first.node,),
        confidence=0.5,
        evidence=tuple(
            f"rank {one.rank} on {one.node}, step {one.step}: loss {one.before} in attempt {restart.asked.attempt}, "
            f"{one.again} in attempt {attempt.number}"
            for one in differing[:8]
        ),
    )
    opened = incidents.watch(state, attempt, verdict, first.step, now)
    number = max(one.incident for one in opened if isinstance(one, r.IncidentOpened))
    # nothing goes on that could be over later: it is told, and training continues
    return [verified, *opened, r.IncidentClosed(time=now, incident=number, first_new_step=None, passed_time=None)]
