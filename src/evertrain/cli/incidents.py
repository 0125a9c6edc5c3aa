"""`evertrain incidents [ID]`: what went wrong, who was to blame, what was done, and what did it cost?

`--replay` asks another question: would it be decided so again?
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from evertrain.cli import look, narrate
from evertrain.model.errors import TroubleError, UsageError

SAME_FAULT_S = 60.0


def main(argv: Sequence[str]) -> int:
    parser = look.parser(
        "incidents", "What went wrong, what was done, and what did it cost? With a number: all of one."
    )
    parser.add_argument("what", nargs="*", metavar="JOB|ID", help="the same as --job; the number of one incident")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    parser.add_argument(
        "--replay", action="store_true", help="decide again from the log; exit code 1 where the answer is another one"
    )
    args = parser.read(argv)
    name, number = _meant(args.what)
    job = look.find(args.job or name, args.run_dir)
    if args.replay:
        if number is None:
            raise UsageError("--replay needs the number of an incident; `evertrain incidents` lists them")
        from evertrain.cli import replayed

        return replayed.show(job, number, as_json=args.json)
    everything = incidents = look.at(job).incidents
    if number is not None:
        incidents = [incident for incident in everything if incident["id"] == number]
        if not incidents:
            raise TroubleError(f"job {job.job} has no incident {number}; `evertrain incidents` lists them")
    if args.json:
        print(json.dumps(incidents))
    elif number is not None:
        _show_one(incidents[0], _beside(incidents[0], everything))
    else:
        _show_all(job.job, incidents)
    return 0


def _meant(words: Sequence[str]) -> tuple[str | None, int | None]:
    """Which job and which incident, in any order."""
    numbers = [word for word in words if word.isdecimal()]
    names = [word for word in words if not word.isdecimal()]
    if len(numbers) > 1 or len(names) > 1:
        raise UsageError(f"{' '.join(words)}: one job and the number of one of its incidents can be shown")
    return names[0] if names else None, int(numbers[0]) if numbers else None


def _show_all(job: str, incidents: list[dict[str, Any]]) -> None:
    from evertrain.cli import tables

    out = tables.console()
    if not incidents:
        out.print(f"job {job} has had no incident")
        return
    out.print(tables.incidents(incidents))
    out.print("one of them in full: evertrain incidents ID")


def _beside(incident: dict[str, Any], everything: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Others of the same attempt and the same ranks or nodes, soon before or after: it may be the same fault, seen by
    another sensor.
    """

    def touches(other: dict[str, Any]) -> bool:
        return bool({*incident["ranks"]} & {*other["ranks"]} or {*incident["nodes"]} & {*other["nodes"]})

    return [
        other
        for other in everything
        if other["id"] != incident["id"]
        and other["attempt"] == incident["attempt"]
        and abs(other["time"] - incident["time"]) <= SAME_FAULT_S
        and touches(other)
    ]


def _show_one(incident: dict[str, Any], beside: Sequence[dict[str, Any]]) -> None:
    from evertrain.cli import tables

    out = tables.console()
    out.print(f"incident {incident['id']}: {narrate.where(incident)}: {incident['cause']}")
    for name, value in _facts(incident):
        out.print(f"  {name:<11} {value}")
    for other in beside:
        out.print(f"  {'see also':<11} incident {other['id']}: {narrate.where(other)}: {other['cause']}")
    for line in incident["evidence"]:
        out.print(f"  {'evidence':<11} {line}")
    _show_checks(out, incident.get("checks") or ())
    if incident.get("replay"):
        from evertrain.cli import replays

        for line in replays.lines(incident["replay"]):
            out.print(f"  {'replay':<11} {line}")
    if incident.get("traceback"):
        out.print(incident["traceback"].rstrip())


def _show_checks(out: Any, checks: Sequence[dict[str, Any]]) -> None:
    """The tests of stopped nodes; a controller of an older version knows of none."""
    if not checks:
        return
    from evertrain.cli import readings

    for line in readings.lines(checks):
        out.print(f"  {'test':<11} {line}")
    if (numbers := readings.table(checks)) is not None:
        out.print(numbers)


def _training(incident: dict[str, Any]) -> str:
    if incident["action"] in ("tolerate", "human") and incident["seconds"]["failover"] is None:
        return "was not interrupted"
    step = incident["first_new_step"]
    return "did not reach new ground" if step is None else f"reached new ground with step {step}"


def _facts(incident: dict[str, Any]) -> list[tuple[str, str]]:
    step = incident["step"]
    seconds = {name: value for name, value in incident["seconds"].items() if value is not None}
    phases = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items())
    action = narrate.action(incident)
    return [
        ("when", time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(incident["time"]))),
        ("attempt", str(incident["attempt"]) + ("" if step is None else f", step {step}")),
        ("category", f"{incident['category'].replace('_', ' ')}, confidence {incident['confidence']:.2f}"),
        ("action", action + (f": {incident['because']}" if incident.get("because") else "")),
        ("seconds", f"{sum(seconds.values()):.3f} ({phases})" if seconds else "not known yet"),
        ("training", _training(incident)),
    ]
