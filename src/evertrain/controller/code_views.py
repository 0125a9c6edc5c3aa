"""What do `evertrain versions` and those who wait for a change get to see? JSON of versions, changes and audits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from evertrain.controller.store import read_log
from evertrain.decide import changes
from evertrain.decide.applying import fold
from evertrain.decide.state import Attempt, Change, JobState
from evertrain.model.change_records import ChangeAsked
from evertrain.model.code import Version

Json = dict[str, Any]


def versions(state: JobState) -> Json:
    """All versions of the job and all changes, oldest first."""
    return {
        "versions": [_version(state, one) for one in state.versions.values()],
        "changes": [_change(state, one) for one in state.changes.values()],
    }


def change(state: JobState, name: str) -> Json | None:
    """One change and what has come of it so far; None: there is no such."""
    found = state.changes.get(name)
    return None if found is None else _change(state, found)


def pending(state: JobState) -> Json | None:
    """The change that comes with the next restart."""
    found = changes.pending(state) if state.ended is None else None
    return None if found is None else _change(state, found)


def last_applied(state: JobState) -> Json | None:
    """The newest change that an attempt of this run has carried out."""
    applied = [one for name in state.run_changes if (one := state.changes[name]).attempt is not None]
    newest = max(applied, key=lambda one: one.attempt or 0, default=None)
    return None if newest is None else _change(state, newest)


def left_behind(state: JobState) -> int | None:
    """The version that the run before this one ended with, where this one began with another."""
    first = state.attempts[0].number if state.attempts else state.next_attempt
    before = [version for attempt, version in state.ran.items() if attempt < first]
    known = before[-1] if before else None
    return known if state.own is not None and known != state.own else None


def audit(state: JobState) -> list[Json]:
    """Who tried to have other code run, oldest first; what the job went back to by itself among them."""
    named = ("time", "act", "author", "address", "outcome", "detail")
    asked = [{name: getattr(one, name) for name in named} for one in state.audits]
    by_itself = [_by_itself(one.asked) for one in state.changes.values() if one.asked.incident is not None]
    return sorted([*asked, *by_itself], key=lambda one: float(one["time"]))


def _by_itself(asked: ChangeAsked) -> Json:
    """Nobody has to write it down a second time: an incident led there."""
    detail = f"version {asked.version}: {asked.reason}"
    return {
        "time": asked.time,
        "act": asked.act,
        "author": asked.author,
        "address": "",
        "outcome": "done",
        "detail": detail,
    }


def versions_of(database: Path) -> Json:
    return versions(fold(read_log(database)))


def change_of(database: Path, name: str) -> Json | None:
    return change(fold(read_log(database)), name)


def audit_of(database: Path) -> list[Json]:
    return audit(fold(read_log(database)))


def _version(state: JobState, version: Version) -> Json:
    ran = [attempt for attempt, number in state.ran.items() if number == version.number]
    led_here = [one for one in state.changes.values() if one.asked.version == version.number]
    newest = led_here[-1] if led_here else None
    # what the job began with no change has made, also where one has led back to it
    made = led_here[0] if led_here and version.parent is not None else None
    steps = [step for attempt in ran for step in _steps(state, attempt)]
    proven = state.proven.get(version.number)
    is_live = state.ended is None and state.run is not None
    return {
        "version": version.number,
        "digest": version.code.digest if version.code is not None else "",
        "files": version.code.files if version.code is not None else 0,
        "bytes": version.code.bytes if version.code is not None else 0,
        "problem": version.problem,
        "source": version.source,
        "args": list(version.args),
        # values may be secrets
        "env": sorted(version.env),
        "parent": version.parent,
        "own": version.number == state.own,
        "runs": is_live and version.number == changes.in_force(state),
        "proven": proven is not None,
        "proven_because": proven.because if proven is not None else "",
        "attempts": ran,
        "first_step": min(steps, default=None),
        "last_step": max(steps, default=None),
        "time": made.asked.time if version.time is None and made is not None else version.time,
        "author": made.asked.author if made is not None else "",
        "reason": made.asked.reason if made is not None else "",
        "outcome": _outcome(state, newest) if newest is not None else "",
        "changes": [one.asked.change for one in led_here],
    }


def _steps(state: JobState, number: int) -> list[int]:
    """From where an attempt of this run went on, and how far it came."""
    attempt = next((one for one in state.attempts if one.number == number), None)
    if attempt is None:
        return []
    marks = (
        attempt.started.resume or 0,
        attempt.ended.step if attempt.ended is not None else None,
        attempt.progress.step if attempt.progress is not None else None,
    )
    return [step for step in marks if step is not None]


def _change(state: JobState, found: Change) -> Json:
    asked = found.asked
    attempt = next((one for one in state.attempts if one.number == found.attempt), None)
    resumed = attempt.resumed if attempt is not None else None
    return {
        "change": asked.change,
        "act": asked.act,
        "version": asked.version,
        "parent": asked.parent,
        "urgent": asked.is_urgent,
        "latest": asked.latest,
        "time": asked.time,
        "author": asked.author,
        "reason": asked.reason,
        "goes_back": asked.goes_back,
        "incident": asked.incident,
        "diff": asdict(asked.diff),
        "outcome": _outcome(state, found),
        "because": _because(state, found),
        "attempt": found.attempt,
        "resume": attempt.started.resume if attempt is not None else None,
        "resume_version": state.ran.get(attempt.started.resume_attempt or 0) if attempt is not None else None,
        "back": attempt is not None and _is_back(state, attempt),
        "seconds": _seconds(state, attempt),
        "applied_time": attempt.started.time if attempt is not None else None,
        "resumed_time": resumed.resumed_time if resumed is not None else None,
        "ended": state.ended.message if state.ended is not None else None,
    }


def _is_back(state: JobState, attempt: Attempt) -> bool:
    """Whether training goes on with it: a step has been done, where steps are named. Programs have none."""
    if attempt.resumed is None:
        unseen = all(one.resumed is None for one in state.attempts if one.number < attempt.number)
        return unseen and attempt.ended is None
    started, mark = attempt.started, attempt.progress
    if started.reached is None:
        return True
    # code may fail between the load of its state and its first step
    return mark is not None and mark.step is not None and mark.step > (-1 if started.resume is None else started.resume)


def _seconds(state: JobState, attempt: Attempt | None) -> float | None:
    """From the end of training to being back."""
    if attempt is None or attempt.resumed is None:
        return None
    before = next((one for one in reversed(state.attempts) if one.number < attempt.number), None)
    if before is None:
        return None
    over = before.ending or before.ended
    return None if over is None else round(max(0.0, attempt.resumed.resumed_time - over.time), 3)


def _outcome(state: JobState, found: Change) -> str:
    asked = found.asked
    if found.dropped is not None:
        return "dropped"
    if found.attempt is None:
        if changes.pending(state) is not found:
            return "superseded"
        return "pending" if state.ended is None else "dropped"
    if _undone_by(state, found) is not None:
        return "rolled_back"
    return "proven" if asked.version in state.proven else "applied"


def _undone_by(state: JobState, found: Change) -> Change | None:
    """The roll-back that left its version while it was what ran."""
    later = (one for one in state.changes.values() if one.attempt is not None and one.attempt > (found.attempt or 0))
    follower = min(later, key=lambda one: one.attempt or 0, default=None)
    undone = follower is not None and follower.asked.act == "rollback" and follower.asked.parent == found.asked.version
    return follower if undone else None


def _because(state: JobState, found: Change) -> str:
    if found.dropped is not None:
        return found.dropped.because
    if found.attempt is None and state.ended is not None and changes.pending(state) is found:
        return f"the job ended before: {state.ended.message}"
    undone = _undone_by(state, found)
    if undone is not None:
        return undone.asked.reason or f"{undone.asked.author or 'somebody'} has asked for it"
    proven = state.proven.get(found.asked.version)
    return proven.because if proven is not None and found.attempt is not None else ""
