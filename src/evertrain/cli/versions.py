"""`evertrain versions`: which versions of its code has a job run, how far did each come, and who changed what?

`--audit` asks another question: who has tried to have other code run, and was refused?
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from evertrain.cli import look, narrate
from evertrain.cli.registry import KnownJob

Json = dict[str, Any]
DIGEST = 12
"""So many of its digits are shown; six are enough to name a version."""
_LONG_DIGEST = re.compile(rf"\b([0-9a-f]{{{DIGEST}}})[0-9a-f]{{{64 - DIGEST}}}\b")
_PIPED_WIDTH = 2000
"""Of lines that no terminal has to hold: nothing is cut off."""


def main(argv: Sequence[str]) -> int:
    parser = look.parser("versions", "Which versions of its code has a job run, and how did each of them do?")
    parser.add_argument("name", nargs="?", metavar="JOB", help="the same as --job")
    parser.add_argument("--audit", action="store_true", help="who has tried to have other code run, well or not")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    args = parser.read(argv)
    job = look.find(args.job or args.name, args.run_dir)
    seen = _audit(job) if args.audit else _versions(job)
    if args.json:
        print(json.dumps(seen))
    elif args.audit:
        _show_audit(job, seen)
    else:
        _show(job, seen)
    return 0


def _versions(job: KnownJob) -> Any:
    if (answers := look.ask(job, "/v1/versions")) is not None:
        return answers[0]
    from evertrain.controller import code_views

    return look.read(job, code_views.versions_of)


def _audit(job: KnownJob) -> Any:
    if (answers := look.ask(job, "/v1/audit")) is not None:
        return answers[0]
    from evertrain.controller import code_views

    return look.read(job, code_views.audit_of)


def _show(job: KnownJob, seen: Json) -> None:
    from evertrain.cli import tables

    out = _console()
    if not seen["versions"]:
        out.print(f"job {job.job}: nothing of its code has been captured yet")
        return
    changes = seen["changes"]
    table = tables.plain_table("version", "digest", "when", "who", "from", "steps", "state", "reason")
    for version in seen["versions"]:
        change = next((one for one in reversed(changes) if one["version"] == version["version"]), None)
        table.add_row(
            f"{'*' if version['runs'] else ' '} {version['version']}",
            version["digest"][:DIGEST] or "-",
            narrate.day(version["time"]) if version["time"] is not None else "-",
            version["author"] or "-",
            _from(version, seen["versions"]),
            _steps(version),
            state(version, change),
            version["reason"],
        )
    out.print(table)
    for change in changes:
        if change["outcome"] == "pending":
            out.print(f"pending: {narrate.change(change)}")


def _console() -> Any:
    from evertrain.cli import tables

    out = tables.console()
    if not out.is_terminal:
        out.width = _PIPED_WIDTH
    return out


def _from(version: Json, others: Sequence[Json]) -> str:
    """Where its files are from; for what differs in its arguments or environment only, that."""
    parent = next((one for one in others if one["version"] == version["parent"]), None)
    if parent is None:
        return version["source"] or "-"
    parts = [version["source"]] if version["source"] and version["digest"] != parent["digest"] else []
    if version["args"] != parent["args"]:
        parts.append(f"arguments: {shlex.join(version['args']) or 'none'}")
    if version["env"] != parent["env"]:
        parts.append(f"environment: {', '.join(version['env']) or 'none'}")
    return "; ".join(parts) or version["source"] or f"version {version['parent']}"


def _steps(version: Json) -> str:
    first, last = version["first_step"], version["last_step"]
    if first is None or last is None:
        return "-"
    return str(first) if first == last else f"{first}–{last}"


def state(version: Json, change: Json | None) -> str:
    """`running, proven`; of one that did not come to run, or does not any more, why. `change` led to it last."""
    outcome = version["outcome"]
    because = f": {change['because']}" if change is not None and change["because"] else ""
    if version["runs"]:
        words = ["running"]
    elif outcome == "pending" and change is not None:
        words = [f"pending until {narrate.day(change['latest'])}"]
    elif outcome == "superseded" and version["attempts"]:
        words = ["earlier"]  # by another change
    elif outcome in ("dropped", "rolled_back", "superseded"):
        words = [outcome.replace("_", " ") + because]
    else:
        words = ["earlier"]
    if version["proven"]:
        words.append("proven")
    if version["problem"]:
        words.append(f"not captured: {version['problem']}")
    return ", ".join(words)


def _show_audit(job: KnownJob, entries: Sequence[Json]) -> None:
    from evertrain.cli import tables

    out = _console()
    if not entries:
        out.print(f"job {job.job}: nobody has tried to have other code run")
        return
    table = tables.plain_table("when", "what", "who", "from", "outcome", "detail")
    for one in entries:
        table.add_row(
            narrate.day(one["time"]),
            one["act"],
            one["author"] or "-",
            one["address"],
            one["outcome"],
            _LONG_DIGEST.sub(r"\1", one["detail"]),
        )
    out.print(table)
