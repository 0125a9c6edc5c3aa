"""What have the tests of stopped nodes brought, and the replays? All of an incident, with every number, as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from evertrain.decide import replaying
from evertrain.decide.state import Incident, JobState, Round, Stage
from evertrain.model.words import counted


def checks(incident: Incident) -> list[dict[str, Any]]:
    """In the order in which they ran."""
    return [_check(one) for one in incident.stages]


def under_way(state: JobState) -> str:
    """What the next start waits for, while stopped nodes are tested; empty: they are not. No seconds: whoever prints
    what has changed would print a line each second."""
    incident, exam = state.incident, state.exam
    if state.closing:
        return ""
    if exam is not None and exam.asked.holds:
        now = f", now {exam.stages[-1].asked.name}" if exam.stages else ""
        nodes = counted(len(exam.asked.nodes), "node")
        return f"the start waits for tests of {nodes} that `evertrain diagnose` has asked for{now}"
    if incident is None or incident.decided is not None:
        return ""
    if incident.replays:
        return f"the start waits for a replay of the job on groups of its {len(incident.replays[-1].asked.nodes)} nodes"
    if not incident.stages:
        return ""
    newest = incident.stages[-1].asked
    nodes = counted(len(newest.nodes), "node")
    return f"the start waits for tests of {nodes}, now {newest.name}"


def replay(incident: Incident) -> dict[str, Any] | None:
    """Its rounds in the order in which they ran, and what they have come to; None: nothing was replayed."""
    if not incident.replays:
        return None
    found = replaying.conclusion(incident)
    return {
        "rounds": [_round(one, replaying.usual(incident)) for one in incident.replays],
        "nodes": list(found.nodes) if found is not None else [],
        "suspects": list(found.suspects) if found is not None else [],
        "confidence": found.confidence if found is not None else None,
        "because": found.because if found is not None else "",
    }


def _round(one: Round, usual: str | None) -> dict[str, Any]:
    asked, done = one.asked, one.done
    digests = done.digests if done is not None else (None,) * len(asked.groups)
    whys = done.because if done is not None else ("",) * len(asked.groups)
    return {
        "round": asked.round,
        "seconds": round(done.time - asked.time, 3) if done is not None else None,
        "settings": msgspec.to_builtins(asked.settings),
        "groups": [
            {
                "phase": group.phase,
                "number": group.number,
                "nodes": list(group.nodes),
                "digest": digest,
                "differs": digest is not None and usual is not None and digest != usual,
                "because": why,
            }
            for group, digest, why in zip(asked.groups, digests, whys, strict=True)
        ],
    }


def exam(state: JobState, number: int) -> dict[str, Any] | None:
    """An examination, as far as it has come; None: this run knows no such one."""
    found = next((one for one in state.exams if one.asked.exam == number), None)
    if found is None:
        return None
    asked, over = found.asked, found.over
    return {
        "exam": number,
        "reason": asked.reason,
        "nodes": list(asked.nodes),
        "over": over is not None,
        "outcome": over.outcome if over is not None else None,
        "because": over.because if over is not None else "",
        "checks": [_check(one) for one in found.stages],
    }


def _check(stage: Stage) -> dict[str, Any]:
    asked, done = stage.asked, stage.done
    return {
        "name": asked.name,
        "again": asked.again,
        "groups": [list(group) for group in asked.groups],
        "seconds": round(done.time - asked.time, 3) if done is not None else None,
        "accused": dict(done.accused) if done is not None else {},
        "notes": list(done.notes) if done is not None else [],
        "results": msgspec.to_builtins(done.results) if done is not None else {},
    }
