"""`evertrain incidents ID --replay`: would the ladder decide so again? Each decision from the log, beside what it would
be now."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from evertrain.cli import look
from evertrain.cli.registry import KnownJob
from evertrain.decide.replay import Again, replay
from evertrain.model.decisions import AnyAction, AnyEvent
from evertrain.model.errors import TroubleError
from evertrain.model.records import AnyRecord, IncidentOpened
from evertrain.model.words import counted

_LONGEST = 100


def show(job: KnownJob, incident: int, *, as_json: bool) -> int:
    """0: every decision is taken so again; 1: one is not, or cannot be taken again."""
    from evertrain.controller.store import read_log

    log = look.read(job, read_log)
    if not any(isinstance(record, IncidentOpened) and record.incident == incident for record in log):
        raise TroubleError(f"job {job.job} has no incident {incident}; `evertrain incidents` lists them")
    found = replay(log, incident)
    if as_json:
        print(json.dumps([_as_json(one) for one in found]))
    else:
        print("\n".join(_lines(incident, log, found)))
    return 0 if all(one.agrees for one in found) else 1


def _as_json(one: Again) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(one.decided)
    return {
        "time": one.decided.time,
        "policy": one.decided.policy,
        "event": plain.get("event"),
        "recorded": plain["actions"] if one.decided.event is not None else [{"action": one.decided.action}],
        "now": msgspec.to_builtins(one.now) if not one.problem else None,
        "agrees": one.agrees,
        "problem": one.problem or None,
    }


def _lines(incident: int, log: list[AnyRecord], found: list[Again]) -> list[str]:
    if not found:
        return [f"incident {incident}: there was nothing to decide: it was written down and watched"]
    begin = log[0].time
    lines = [f"incident {incident}: {counted(len(found), 'decision')}, taken again from the log"]
    for one in found:
        decided = one.decided
        policy = f", policy {decided.policy}" if decided.policy else ""
        what = _event(decided.event) if decided.event is not None else "an event that was not noted"
        lines.append(f"{decided.time - begin:10.3f} s  {what}{policy}")
        lines += [f"    recorded  {_action(action)}" for action in decided.actions] or [
            f"    recorded  {decided.action}: {decided.because}"
        ]
        if one.problem:
            lines.append(f"    cannot be replayed: {one.problem}")
        elif one.agrees:
            lines.append("    agrees")
        else:
            lines += [f"    now       {_action(action)}" for action in one.now] or ["    now       nothing"]
            lines.append("    differs")
    return lines


def _event(event: AnyEvent) -> str:
    """The event with what it carries, on one line."""
    return _one_line(type(event).__name__, msgspec.to_builtins(event), skip=("event", "time", "incident"))


def _action(action: AnyAction) -> str:
    head = _one_line(type(action).__name__, msgspec.to_builtins(action), skip=("action", "because", "evidence"))
    return f"{head}: {action.because}"


def _one_line(name: str, fields: dict[str, Any], *, skip: tuple[str, ...]) -> str:
    shown = [f"{key}={_short(value)}" for key, value in fields.items() if key not in skip and _says(value)]
    return f"{name} {' '.join(shown)}".rstrip()


def _says(value: Any) -> bool:
    return value is not None and value is not False and value not in ("", (), {})


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{old}→{new}" for old, new in value.items()]
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
