"""Which version of the code do ranks run next, and from when on?

    asked ──urgent, or its time has come──▶ all nodes have it ──▶ attempt ended ──▶ the next one runs it ──▶ proven
      │ └─────another restart comes first───────────────────────────────────────────▲        └──fails──▶ rolled back
      └──a newer change; a node cannot have it──▶ dropped: training goes on as it is

A run begins with the user's own files, in place. From its first change of the code on, ranks run from folders with the
content of a version. `decide.rollback` says which version is gone back to.
"""

from __future__ import annotations

import msgspec

from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, Change, Incident, JobState
from evertrain.model import records as r
from evertrain.model.change_records import ChangeAsked, ChangeDropped, VersionKept, VersionProven
from evertrain.model.code import ChangeKind, Code, CodeOrder, Diff, Version
from evertrain.model.config import CodeConfig, Config
from evertrain.model.records import AnyRecord
from evertrain.model.words import counted


class Refusal(msgspec.Struct, frozen=True):
    """Why nothing is done, in one line."""

    line: str
    wrong_usage: bool = False
    """What was asked for cannot be; else it is only the wrong moment."""
    soon: bool = False
    """It cannot be said yet: ask again in a moment."""
    is_same: bool = False
    """There is nothing to change."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants ranks to run."""

    change: str
    act: ChangeKind
    code: Code | None = None
    """None: the same code."""
    source: str = ""
    args: tuple[str, ...] | None = None
    """None: the same arguments."""
    env: dict[str, str] = {}
    """Beside what was added before."""
    version: int | None = None
    """One that is known already; the fields above do not count then."""
    within_s: float = 0.0
    """With the next restart, after so long at the latest; 0: at once."""
    goes_back: bool = False
    reason: str = ""
    author: str = ""
    diff: Diff = Diff()


# -- what runs -------------------------------------------------------------------------------------------------------


def pending(state: JobState) -> Change | None:
    """The change that no attempt has carried out yet. A newer one takes the place of an older one for good, also where
    it is dropped: whoever waited for the older one has been told so."""
    newest = state.changes[state.run_changes[-1]] if state.run_changes else None
    return newest if newest is not None and newest.dropped is None and newest.attempt is None else None


def in_force(state: JobState) -> int | None:
    """The version of the newest attempt; None: the user's files, and nobody has captured them yet."""
    attempt = state.attempt
    return state.own if attempt is None else state.ran.get(attempt.number)


def next_version(state: JobState) -> int | None:
    """The version of the attempt to come."""
    change = pending(state)
    return in_force(state) if change is None else change.asked.version


def args(state: JobState, version: int | None) -> tuple[str, ...] | None:
    """The script's arguments with a version; None: those of the command line."""
    return None if version is None or version == state.own else state.versions[version].args


def env(state: JobState, version: int | None) -> dict[str, str]:
    """What a version adds to the environment of ranks."""
    return {} if version is None else state.versions[version].env


def digest(state: JobState, version: int | None) -> str:
    """Of the folder that the attempt to come runs `version` from; empty: it runs in place.

    As long as only arguments and environment have been changed, files that the user edits count as they do with every
    launcher.
    """
    known = state.versions.get(version) if version is not None else None
    if known is None or known.code is None:
        return ""
    own = state.versions[state.own].code if state.own is not None else None
    of_run, waits = (state.changes[name] for name in state.run_changes), pending(state)
    led_here = [one.asked for one in of_run if one.attempt is not None or one is waits]
    stays = all(one.act == "restart" and state.versions[one.version].code == own for one in led_here)
    return "" if stays else known.code.digest


class Prepared(msgspec.Struct, frozen=True):
    """What processes are to be that wait to become ranks."""

    version: int | None
    digest: str
    env: dict[str, str]


def prepared(state: JobState, picture: Picture) -> Prepared:
    """Until all nodes have let an attempt go, it is what that needs."""
    attempt = state.active
    stays = pending(state) is None or (attempt is not None and not _is_let_go(attempt, picture))
    if attempt is not None and attempt.ending is None and stays:
        version = state.ran.get(attempt.number)
        return Prepared(version, attempt.started.code, env(state, version))
    version = next_version(state)
    return Prepared(version, digest(state, version), env(state, version))


def _is_let_go(attempt: Attempt, picture: Picture) -> bool:
    """Whether all ranks of an attempt are processes of their own; of a program nobody sees more of its start."""
    if attempt.resumed is not None:
        return True
    seen = (picture.attempt(node, attempt.number) for node in attempt.by_node())
    return all(one is not None and one.phase in ("running", "ended") for one in seen)


def order(state: JobState, wanted: Prepared, config: CodeConfig) -> CodeOrder | None:
    """The version that nodes are to prepare ranks with; None: the user's files."""
    if not wanted.digest or wanted.version is None:
        return None
    code = state.versions[wanted.version].code
    assert code is not None
    return CodeOrder(version=wanted.version, digest=wanted.digest, archive_bytes=code.archive_bytes, config=config)


# -- what is asked for -----------------------------------------------------------------------------------------------


def kept_own(
    state: JobState, code: Code | None, problem: str, given: tuple[str, ...], source: str, now: float
) -> Version:
    """The version that the files of this run are: one that is known, or a new one."""
    if code is not None and (known := _same(state, code, given, {})) is not None:
        return known
    return Version(number=_next_number(state), code=code, problem=problem, source=source, args=given, time=now)


def ask(state: JobState, wish: Wish, now: float) -> Refusal | list[AnyRecord]:
    """The records of a change, or why it cannot be."""
    if wish.change in state.changes:
        return []
    if state.ended is not None or state.closing:
        return Refusal("it is ending")
    base = next_version(state)
    if base is None:
        return Refusal("its code has not been captured yet", soon=True)
    records: list[AnyRecord] = []
    if wish.version is not None:
        if wish.version not in state.versions:
            return Refusal(f"there is no version {wish.version}; `evertrain versions` lists them", wrong_usage=True)
        number = wish.version
    else:
        version = _wanted(state, state.versions[base], wish, now)
        number = version.number
        if number not in state.versions:
            records.append(VersionKept(time=now, version=version))
    waits = pending(state)
    is_sooner = waits is not None and wish.act != "restart" and now + wish.within_s < waits.asked.latest
    if number == base and not is_sooner:
        what = "is waited for" if waits is not None else "runs"
        line = f"version {number} {what} already: there is nothing to change"
        return Refusal(line, wrong_usage=True, is_same=True)
    known = state.versions.get(number)
    if known is not None and known.code is None and number != state.own:
        return Refusal(f"version {number} was not captured ({known.problem})", wrong_usage=True)
    asked = ChangeAsked(
        time=now,
        change=wish.change,
        act=wish.act,
        version=number,
        parent=in_force(state),
        latest=now + wish.within_s,
        author=wish.author,
        reason=wish.reason,
        goes_back=wish.goes_back,
        diff=wish.diff,
    )
    return [*records, asked]


def _wanted(state: JobState, base: Version, wish: Wish, now: float) -> Version:
    code = base.code if wish.code is None else wish.code
    given = base.args if wish.args is None else wish.args
    added = {**base.env, **wish.env}
    if (known := _same(state, code, given, added)) is not None:
        return known
    return Version(
        number=_next_number(state),
        code=code,
        source=base.source if wish.code is None else wish.source,
        args=given,
        env=added,
        parent=base.number,
        time=now,
    )


def _same(state: JobState, code: Code | None, given: tuple[str, ...], added: dict[str, str]) -> Version | None:
    """The version that has this very content; of files that were not captured nobody knows."""
    digest = code.digest if code is not None else None
    for one in reversed(state.versions.values()):
        theirs = one.code.digest if one.code is not None else None
        if (theirs, one.args, one.env) == (digest, given, added) and (code is not None or one.number == state.own):
            return one
    return None


def _next_number(state: JobState) -> int:
    return max(state.versions, default=0) + 1


# -- when it comes ---------------------------------------------------------------------------------------------------


def drop(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """Give a change up that a node cannot have, or does not get: nothing healthy is ended for it."""
    change = pending(state)
    if change is None or not (wanted := digest(state, change.asked.version)):
        return []
    late = state.active is None or now >= change.asked.latest
    since = state.since(max(change.asked.time, change.asked.latest if state.active is not None else _ended(state)))
    waited_s = now - since
    for node in state.active_nodes():
        report = picture.report(node)
        if report is None or not picture.connected(node) or report.code == wanted:
            continue
        if report.code_failed == wanted:
            return [_dropped(change, report.code_problem, now)]
        if late and waited_s > config.code.fetch_s:
            return [_dropped(change, f"{node} had not got it after {waited_s:.0f} s", now)]
    return []


def _ended(state: JobState) -> float:
    attempt = state.attempt
    return attempt.ended.time if attempt is not None and attempt.ended is not None else 0.0


def _dropped(change: Change, because: str, now: float) -> ChangeDropped:
    return ChangeDropped(time=now, change=change.asked.change, because=because)


def due(state: JobState, picture: Picture, attempt: Attempt, patience_s: float, now: float) -> list[AnyRecord]:
    """End the ranks for a change when its time has come and every node could start them anew at once.

    They train on while the nodes get the code and import what they need; not longer than `patience_s`.
    """
    change = pending(state)
    if change is None or now < change.asked.latest:
        return []
    name = change.asked.change
    if any(one.asked.restart == name for one in state.restarts):
        return []  # `decide.planned` ends them
    incident = state.incident
    if incident is not None and incident.decided is None:
        return []
    waited_s = now - state.since(max(change.asked.latest, change.asked.time))
    if not may_end(state, picture, waited_s, patience_s):
        return []
    return [r.RestartRequested(time=now, restart=name, attempt=attempt.number)]


def may_end(state: JobState, picture: Picture, waited_s: float, patience_s: float) -> bool:
    """Whether ranks need not go on any more until the next ones are prepared.

    Imports may take for ever; without its code nothing is ended at all.
    """
    wanted = prepared(state, picture)
    if wanted.version != next_version(state):
        return False
    reports = [picture.report(node) for node in state.active_nodes()]
    has_code = all(one is not None and one.code == wanted.digest for one in reports)
    is_ready = all(one is not None and one.env == wanted.env and one.starter.state == "ready" for one in reports)
    return has_code and (is_ready or waited_s > patience_s)


# -- what has come of it ---------------------------------------------------------------------------------------------


def proven(
    state: JobState, attempt: Attempt, step: int | None, relative: int, config: Config, now: float
) -> list[AnyRecord]:
    """Training has come so far with a version that it is fit to be gone back to.

    Source: ByteRobust reference section 17, row 11.
    """
    version = state.ran.get(attempt.number)
    if version is None or version in state.proven or attempt.resumed is None:
        return []
    limits = config.code
    done = relative if step is None else step - (attempt.started.resume or 0) + _done_before(state, attempt, version)
    ran_s = now - attempt.resumed.resumed_time
    if done >= limits.proven_steps:
        because = f"{counted(done, 'step')} done with it"
    elif ran_s >= limits.proven_s:
        because = f"it has run for {ran_s:.0f} s"
    else:
        return []
    return [VersionProven(time=now, version=version, because=because)]


def _done_before(state: JobState, attempt: Attempt, version: int) -> int:
    """Steps that earlier attempts have done with a version, and that count: what was gone back behind does not."""
    done, behind = 0, attempt.started.resume or 0
    for one in reversed(state.attempts):
        if one.number >= attempt.number:
            continue
        reached = one.ended.step if one.ended is not None and one.ended.step is not None else 0
        began = one.started.resume or 0
        if state.ran.get(one.number) == version:
            done += max(0, min(reached, behind) - began)
        behind = min(behind, began)
    return done


def led_to_by(state: JobState, incident: Incident) -> ChangeAsked | None:
    """The change that the recovery from an incident carried out."""
    number = incident.failover_attempt
    found = (one.asked for one in state.changes.values() if number is not None and one.attempt == number)
    return next(found, None)
