"""Which version is gone back to, and from where does training go on then?

Back to the newest earlier version that has proven itself, else to the first one of the run; and to the newest
checkpoint that this version has saved or begun with: what later versions have saved since may have another layout.
Only what a version has saved that had proven itself is gone on from where it fails after all.
"""

from __future__ import annotations

from evertrain.decide import changes
from evertrain.decide.state import Change, JobState
from evertrain.model.change_records import ChangeAsked
from evertrain.model.code import Diff
from evertrain.model.config import CodeConfig
from evertrain.model.copies import Save
from evertrain.model.records import AnyRecord


def target(state: JobState) -> int | None:
    """The version to go back to from the one that runs; None: there is none.

    Source: ByteRobust reference section 17, row 11.
    """
    out = {changes.in_force(state), *_given_up(state)}
    earlier = dict.fromkeys(
        version
        for attempt in state.attempts
        if (version := state.ran.get(attempt.number)) is not None and version not in out and _can_run(state, version)
    )
    proven = [version for version in _latest_last(state) if version in earlier and version in state.proven]
    return proven[-1] if proven else next(iter(earlier), None)


def _given_up(state: JobState) -> set[int]:
    """Versions that were gone back from, and have not been asked for again since."""
    out: set[int] = set()
    for name in state.run_changes:
        if (change := state.changes[name]).attempt is not None:
            out.discard(change.asked.version)
            if change.asked.act == "rollback" and change.asked.parent is not None:
                out.add(change.asked.parent)
    return out


def _latest_last(state: JobState) -> list[int]:
    """Versions of this run in the order in which they ran last."""
    last = {version: attempt.number for attempt in state.attempts if (version := state.ran.get(attempt.number))}
    return sorted(last, key=last.__getitem__)


def _can_run(state: JobState, version: int) -> bool:
    return version == state.own or state.versions[version].code is not None


def recent(state: JobState, config: CodeConfig, now: float) -> Change | None:
    """The change that may be the cause of a failure: it brought what runs now, not long ago; a roll-back is none."""
    applied = [one for name in state.run_changes if (one := state.changes[name]).attempt is not None]
    newest = max(applied, key=lambda one: one.attempt or 0, default=None)
    if newest is None or newest.asked.act == "rollback" or newest.asked.version != changes.in_force(state):
        return None
    began = next((one.started.time for one in state.attempts if one.number == newest.attempt), None)
    return newest if began is not None and now - began <= config.recent_s else None


def ask(state: JobState, incident: int, now: float) -> list[AnyRecord]:
    """The change that an incident leads to; none where there is nothing to go back to."""
    number = target(state)
    if number is None:
        return []
    parent = changes.in_force(state)
    undone = next((one for one in reversed(state.changes.values()) if one.asked.version == parent), None)
    return [
        ChangeAsked(
            time=now,
            change=f"roll-back-{incident}",
            act="rollback",
            version=number,
            parent=parent,
            latest=now,
            author="evertrain",
            reason=f"incident {incident}: {state.incidents[incident].opened.cause}",
            # what a version has done that had proven itself is not given up for one failure
            goes_back=parent not in state.proven,
            incident=incident,
            diff=_inverse(undone.asked.diff) if undone is not None and undone.asked.parent == number else Diff(),
        )
    ]


def _inverse(diff: Diff) -> Diff:
    return Diff(
        added=diff.removed,
        removed=diff.added,
        changed=diff.changed,
        files=diff.files,
        lines_added=diff.lines_removed,
        lines_removed=diff.lines_added,
        args=diff.args,
        env=diff.env,
    )


# -- where training goes on ------------------------------------------------------------------------------------------


def newest_attempt(state: JobState) -> int | None:
    """The last attempt whose saves the next one may go on from; None: of any."""
    change = changes.pending(state)
    if change is None or not change.asked.goes_back:
        return None
    return last_of(state, change.asked.version)


def last_of(state: JobState, version: int) -> int | None:
    """The last attempt of this life of the job that ran a version; None: none did."""
    return max((attempt for attempt, ran in state.ran.items() if ran == version), default=None)


def pinned(state: JobState) -> Save | None:
    """The save that a roll-back from a version that has not proven itself would go on from."""
    version, number = changes.in_force(state), target(state)
    if version is None or version in state.proven or number is None:
        return None
    names = (name for name in reversed(state.run_changes) if state.changes[name].attempt is not None)
    change = next((state.changes[name] for name in names), None)
    if change is None or change.asked.version != version or change.asked.goes_back:
        return None
    last = last_of(state, number)
    started = next((one.started for one in state.attempts if last is not None and one.number > last), None)
    if started is None or started.resume is None or started.resume_attempt is None or started.folder:
        return None
    return started.resume_attempt, started.resume


def begins_anew(state: JobState) -> bool:
    """Whether the version that is gone back to had no save at all when it was left."""
    last = newest_attempt(state)
    if last is None:
        return False
    after = next((resumed for attempt, resumed in state.lineage if attempt > last), None)
    return after == -1
