"""What does a user see of a job? The JSON of `status` and `incidents`, from the log and, while it runs, the picture.

One builder serves the live API and the look at a database after the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import asdict

from evertrain.controller import check_views, code_views, ledger, node_views, sensor_views
from evertrain.controller.store import read_log
from evertrain.decide import changes, joining, planned, resume, storing
from evertrain.decide.applying import fold
from evertrain.decide.picture import Picture
from evertrain.decide.progress import steps
from evertrain.decide.state import Attempt, Incident, JobState
from evertrain.model.change_records import ChangeAsked
from evertrain.model.decisions import AskHuman, stronger
from evertrain.model.records import StoreCommitted
from evertrain.model.report import PageReport

# what later versions of this list grow by is stated where it is missing, never left out in silence
_ACTIVE = (
    "process deaths (pidfd)",
    "exit codes, signals and tracebacks",
    "steps and collectives (telemetry pages)",
    "hangs: stopped, still and busy ranks, operations that never meet",
    "restart in place",
    "checkpoints in shared memory, now and then on disk",
)
_SEVERAL_ACTIVE = ("copies of checkpoints in the memory of other nodes",)


# ranks never end in the same instant; so long one may be first without a word
_NOTEWORTHY_S = 5.0

_UNKILLABLE = (
    ": it sleeps in the kernel (a dead disk or network file system, a driver); training goes on by itself as soon as "
    "it is let go; if nothing helps, `evertrain stop` brings the newest step to disk, and the machine needs a restart"
)


def status_of(database: Path) -> dict[str, Any]:
    """`status` of a job that no controller serves any more."""
    log = read_log(database)
    state = fold(log)
    # a run that ended without a word is as old as its last record
    last = log[-1].time if log else 0.0
    return status(state, Picture(), job=database.parent.name, now=last, live=False)


def incidents_of(database: Path) -> list[dict[str, Any]]:
    return incidents(fold(read_log(database)))


def restart_of(database: Path, name: str) -> dict[str, Any] | None:
    return restart(fold(read_log(database)), name)


def attempts_of(database: Path) -> list[dict[str, Any]]:
    return ledger.attempts(fold(read_log(database)))


def store_of(database: Path) -> str | None:
    """The shared store that a job has last written to, as its script gave it."""
    return next((one.url for one in reversed(read_log(database)) if isinstance(one, StoreCommitted)), None)


def status(state: JobState, picture: Picture, *, job: str, now: float, live: bool = True) -> dict[str, Any]:
    """DESIGN section 6, and a few keys more: message, exit_code, resume, restarts."""
    attempt = state.attempt
    # a run that ended without a word has no clock of its own: count to its last record
    step, kind = _step(state, picture)
    return {
        "job": job,
        "state": job_state(state, live),
        "step": step,
        "step_kind": kind,
        "attempt": attempt.number if attempt else 0,
        "ettr": ledger.ettr(state, now),
        "ettr_hour": ledger.ettr(state, now, window_s=3600.0),
        "steps_at_risk": _steps_at_risk(state, picture, step) if live and kind == "absolute" else None,
        "start": _start(picture, state),
        "workers": _workers(state, picture),
        "nodes": [_node(state, picture, node) for node in state.known_nodes()],
        "sensors": sensor_views.sensors(state, picture) if live else [],
        "active": _active(state, picture),
        "blind": _blind(state, picture, live),
        "message": _message(state, picture, now),
        "exit_code": state.ended.exit_code if state.ended else None,
        "restarts": max(0, len(state.attempts) - 1),
        "resume": attempt.started.resume if attempt else None,
        "restart": _newest_restart(state),
        "version": changes.in_force(state),
        "change": code_views.pending(state) if live else None,
        "last_change": code_views.last_applied(state),
        "left_version": code_views.left_behind(state),
        "steps_seen": kind != "none",
        "incidents": len(state.incidents),
        "watched": _watched(picture),
    }


def _active(state: JobState, picture: Picture) -> list[str]:
    """What is looked after; the store as far as something has got there."""
    active = [*_ACTIVE, *(_SEVERAL_ACTIVE if len(state.active_nodes()) > 1 else ())]
    if len(state.roster) > 1:
        active.append(f"eviction of nodes ({_standbys(state)})")
    if (own := state.versions.get(state.own or 0)) is not None and own.code is not None:
        active.append(f"code: version {changes.in_force(state)}, changed and rolled back without giving up a node")
    if traced := sum(seen.report.traced for seen in picture.nodes.values()):
        watched = f"; of {found} every second is read" if (found := len(_watched(picture))) else ""
        active.append(f"collectives and connections of {traced} ranks (trace rings{watched})")
    if inside := sorted({seen.report.nccl for seen in picture.nodes.values() if seen.report.nccl}):
        active.append(f"the inside of NCCL's collectives ({'; '.join(inside)})")
    return [*active, f"the shared store: step {state.stored[-1].step}"] if state.stored else active


def _watched(picture: Picture) -> list[int]:
    """Ranks whose collectives are read second by second while all is well."""
    return sorted({one.rank for seen in picture.nodes.values() for one in seen.report.pulses})


def _standbys(state: JobState) -> str:
    ready = len(state.usable_standbys())
    return f"{ready} of {state.standby} standbys ready" if state.standby else "no standby"


def _cry(state: JobState) -> str:
    """What somebody should look at, from the incident that this attempt or the one before it had."""
    attempt = state.attempt
    here = frozenset(state.active_nodes())
    for incident in reversed(state.incidents.values()):
        if attempt is None or incident.opened.attempt < max(attempt.number - 1, state.attempts[0].number):
            return ""
        asks = [action for one in incident.decisions for action in one.actions if isinstance(action, AskHuman)]
        if asks and (not incident.opened.nodes or here.intersection(incident.opened.nodes)):
            return f"a human is needed: {asks[-1].because}"
    return ""


def _newest_restart(state: JobState) -> dict[str, Any] | None:
    """The last that the user asked for as such: ends of ranks for an update or a roll-back are shown as these."""
    names = [one.asked.restart for one in state.restarts]
    asked = [name for name in names if name not in state.changes or state.changes[name].asked.act == "restart"]
    return restart(state, asked[-1]) if asked else None


def restart(state: JobState, name: str) -> dict[str, Any] | None:
    """A restart that was asked for in this run: what was wanted, and what has come of it so far."""
    found = next((one for one in state.restarts if one.asked.restart == name), None)
    if found is None:
        return None
    asked, attempt = found.asked, planned.back(state, found)
    change = state.changes[name].asked if name in state.changes else None
    verified = None
    if found.verified is not None:
        named = ("attempt", "first_step", "last_step", "ranks", "problem")
        verified = {field: getattr(found.verified, field) for field in named}
        difference = found.verified.difference
        verified["difference"] = asdict(difference) if difference is not None else None
    resumed = attempt.resumed if attempt is not None else None
    old = next((one.ending for one in state.attempts if one.number == asked.attempt), None)
    return {
        "restart": name,
        "from_step": asked.from_step,
        "verify": asked.verify,
        "args": list(state.versions[change.version].args) if change is not None and change.diff.args else None,
        # values may be secrets
        "env": list(change.diff.env) if change is not None else [],
        "version": change.version if change is not None else None,
        "brings": _brought(state, asked.attempt),
        "back": attempt is not None,
        "attempt": attempt.number if attempt is not None else None,
        "resume": attempt.started.resume if attempt is not None else None,
        "seconds": round(resumed.resumed_time - (old or asked).time, 3) if resumed is not None else None,
        "verified": verified,
        "ended": state.ended.message if state.ended is not None else None,
    }


def _brought(state: JobState, ended: int) -> str | None:
    """The change, the restart's own or one that waited, that came with the first attempt after the one that `ended`."""
    first = next((one.number for one in state.attempts if one.number > ended), None)
    names = (name for name in state.run_changes if first is not None and state.changes[name].attempt == first)
    return next(names, None)


def job_state(state: JobState, live: bool = True) -> str:
    if state.ended is not None:
        return state.ended.state
    if not live:
        return "stopped"
    if state.closing:
        return "stopping"
    if state.incident is not None:
        return "recovering"
    return "running" if state.active is not None and state.active.resumed is not None else "starting"


def _step(state: JobState, picture: Picture) -> tuple[int | None, str]:
    attempt = state.attempt
    if attempt is None:
        return state.best_step, "absolute" if state.best_step is not None else "none"
    if attempt.ended is not None:
        absolute, relative = attempt.ended.step, attempt.ended.relative_step
    else:
        absolute, relative = steps(attempt, picture)
    flushed = state.flushed.step if state.flushed is not None else None
    # a keeper that was killed took the pages along, and with them what they said
    known = [step for step in (absolute, attempt.started.resume, flushed) if step is not None]
    absolute = max(known, default=None)
    if absolute is not None:
        return absolute, "absolute"
    return (relative, "relative") if relative else (None, "none")


def _steps_at_risk(state: JobState, picture: Picture, step: int | None) -> int | None:
    """What the loss of a whole node would cost now."""
    if step is None or state.run is None:
        return None
    if state.flushed is not None and state.flushed.step is not None:
        return max(0, step - state.flushed.step)
    stored = storing.newer_than(None, state, picture, None)
    in_store = stored.step if stored is not None and stored.life == state.life else 0
    return max(0, step - max(in_store, _safe_step(state, picture) or 0))


def _safe_step(state: JobState, picture: Picture) -> int | None:
    """The newest step that nodes keep through the loss of one: with several, others have it, as disks go along."""
    if len(state.active_nodes()) > 1:
        reports = {node: seen.report for node, seen in picture.nodes.items() if seen.connected}
        return resume.survives_any_node(reports, state.placement(), resume.rules(state))
    on_disk = {
        node: [copy for copy in seen.report.copies if copy.tier == "disk"] for node, seen in picture.nodes.items()
    }
    safe = resume.choose(on_disk, state.placement(), resume.rules(state))
    return safe.step if safe is not None else None


def _start(picture: Picture, state: JobState) -> dict[str, Any]:
    nodes = {
        node: {
            "mode": seen.report.starter.mode,
            "state": seen.report.starter.state,
            "reason": seen.report.starter.reason,
        }
        for node, seen in sorted(picture.nodes.items())
    }
    first = next(iter(nodes.values()), None)
    wanted = state.run.start if state.run else "zygote"
    return {
        "wanted": wanted,
        "mode": first["mode"] if first else wanted,
        "reason": next((node["reason"] for node in nodes.values() if node["reason"]), ""),
    }


def _workers(state: JobState, picture: Picture) -> list[dict[str, Any]]:
    attempt = state.attempt
    if attempt is None:
        return []
    pages = picture.pages(attempt.number)
    return [_worker(attempt, rank, node, pages.get(rank), picture) for rank, node in attempt.started.placement.items()]


def _worker(attempt: Attempt, rank: int, node: str, page: PageReport | None, picture: Picture) -> dict[str, Any]:
    listed = picture.attempt(node, attempt.number)
    process = next((seen for seen in listed.ranks if seen.rank == rank), None) if listed else None
    end = attempt.ends.get(rank)
    step = None
    if page is not None:
        step = page.step if page.step is not None else page.relative_step
    elif attempt.ended is not None:
        step = attempt.ended.step if attempt.ended.step is not None else attempt.ended.relative_step
    return {
        "rank": rank,
        "node": node,
        "pid": process.pid if process else (end.pid if end else None),
        "step": step,
        "phase": "ended" if end is not None else page.phase if page is not None else "unknown",
        "collective": page.collective if page is not None else "",
        # JSON has no NaN; the rank itself says when its loss is none
        "loss": page.loss if page is not None and page.loss is not None and math.isfinite(page.loss) else None,
    }


def _node(state: JobState, picture: Picture, node: str) -> dict[str, Any]:
    """With `early` where the ranks of a standby run ahead of their start, or cannot."""
    changed = state.nodes.get(node)
    shown: dict[str, Any] = {
        "id": node,
        "state": node_views.node_state(state, node),
        "because": changed.because if changed else "",
    }
    report = picture.report(node)
    if report is not None and report.early.state:
        shown["early"] = asdict(report.early)
    return shown


def _blind(state: JobState, picture: Picture, live: bool) -> list[str]:
    if not live:
        return []
    blind = sensor_views.blind(state, picture)
    for node in state.active_nodes() if state.run else ():
        report = picture.report(node)
        if report is None or not picture.connected(node):
            blind.append(f"{node}: its agent cannot be heard")
        else:
            blind += [f"{node}: {line}" for line in report.blind]
    return blind


def _message(state: JobState, picture: Picture, now: float) -> str:
    """The one line that matters now."""
    if state.ended is not None:
        return "; ".join(filter(None, (state.ended.message, _cry(state))))
    if waits := joining.missing(state, picture) or check_views.under_way(state):
        return waits
    waiting = state.standbys()
    unusable = {node: seen.because for node, seen in sorted(state.nodes.items()) if seen.state == "unusable"}
    for node, because in unusable.items():
        if node not in waiting:
            return f"{node} is unusable: {because}{_UNKILLABLE}"
    if cry := _cry(state):
        return cry
    attempt = state.active
    if attempt is not None and attempt.ending is None:
        gone = sorted(rank for rank, end in attempt.ends.items() if now - end.ended_time > _NOTEWORTHY_S)
        if gone and attempt.alive():
            return f"{_ranks(gone)} exited with 0; {_ranks(attempt.alive())} still running"
    if attempt is not None and attempt.started.resume is None and attempt.started.passed_over:
        return attempt.started.passed_over[-1]
    if state.suspicion is not None:
        return "no step for a while: " + "; ".join(state.suspicion.evidence)
    for node, because in unusable.items():
        return f"{node} is no standby: {because}"
    if picture.problems:
        return picture.problems[-1]
    for node in sorted(picture.nodes):
        report = picture.nodes[node].report
        if report.gpus_held:
            return f"{node}: the start waits: {report.gpus_held}"
        if problems := (*report.problems, *report.copy_problems):
            return f"{node}: {problems[-1]}"
        if report.early.state == "failed":
            return f"{node} waits before the script, not in evertrain.init(): {report.early.reason}"
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"


def incidents(state: JobState) -> list[dict[str, Any]]:
    """DESIGN section 6; times, the failing rank's traceback and the decision's reason beside it."""
    return [_incident(state, incident) for _, incident in sorted(state.incidents.items())]


def _incident(state: JobState, incident: Incident) -> dict[str, Any]:
    opened, closed = incident.opened, incident.closed
    attempt = next((seen for seen in state.attempts if seen.number == opened.attempt), None)
    end = attempt.ends.get(opened.ranks[0]) if attempt is not None and opened.ranks else None
    after = next((seen for seen in state.attempts if seen.number == incident.failover_attempt), None)
    led_to = changes.led_to_by(state, incident)
    return {
        "id": opened.incident,
        "attempt": opened.attempt,
        "this_run": attempt is not None,
        "cause": opened.cause,
        "category": opened.category,
        "ranks": list(opened.ranks),
        "nodes": list(opened.nodes),
        "links": [list(link) for link in opened.links],
        "component": opened.component,
        "path": msgspec.to_builtins(opened.path),
        "action": _action(incident, led_to),
        "from_version": led_to.parent if led_to is not None else None,
        "to_version": led_to.version if led_to is not None else None,
        "class": opened.located,
        "group": list(opened.group),
        "captures": list(opened.captures),
        "confidence": opened.confidence,
        "evidence": [*opened.evidence, *(after.started.passed_over if after is not None else ())],
        "checks": check_views.checks(incident),
        "replay": check_views.replay(incident),
        "step": opened.step,
        "first_new_step": closed.first_new_step if closed else None,
        "seconds": asdict(ledger.seconds(incident)),
        "time": opened.fault_time,
        "because": _because(incident),
        "open": closed is None and state.ended is None,
        "status": end.status if end is not None else None,
        "traceback": end.error.traceback if end is not None and end.error is not None else "",
    }


def _action(incident: Incident, change: ChangeAsked | None) -> str:
    """The strongest that was done."""
    if change is not None and change.incident is None:
        # what was waiting for the next restart came with it
        return stronger(("hot_update", *(one.action for one in incident.decisions)))
    if not incident.decisions:
        return "tolerate" if incident.opened.tolerated else "none"
    return stronger(one.action for one in incident.decisions)


def _because(incident: Incident) -> str:
    newest = incident.decided or (incident.decisions[-1] if incident.decisions else None)
    return newest.because if newest is not None else ""
