"""`evertrain status`: how is the job doing? From the live controller, or from the log when nothing runs any more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from evertrain.cli import look, narrate

RANKS_SHOWN = 32


def main(argv: Sequence[str]) -> int:
    parser = look.parser("status", "How is the job doing? State, step, ranks, nodes, what is watched and what is not.")
    parser.add_argument("name", nargs="?", metavar="JOB", help="the same as --job")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    args = parser.read(argv)
    seen = look.at(look.find(args.job or args.name, args.run_dir))
    if args.json:
        print(json.dumps(seen.status))
    else:
        _show(seen)
    return 0


def _show(seen: look.Look) -> None:
    from evertrain.cli import tables

    status = seen.status
    out = tables.console()
    out.print(f"job {status['job']}: ", tables.coloured(status["state"]), sep="", end="")
    out.print(f", {_message(status)}" if status.get("message") else "")
    out.print(_progress(status))
    out.print(_start(status))
    for line in _code(status):
        out.print(line)
    nodes = tables.coloured("")
    for node in status["nodes"]:
        nodes.append(f"  {node['id']} ").append_text(tables.coloured(node["state"]))
        if node.get("early", {}).get("state") == "waiting":
            nodes.append(" (in evertrain.init())")
    out.print("nodes", nodes, sep="")
    if workers := status["workers"]:
        out.print(tables.workers(workers[:RANKS_SHOWN]))
    if len(workers) > RANKS_SHOWN:
        out.print(f"and {len(workers) - RANKS_SHOWN} ranks more (--json shows all)")
    if recent := seen.incidents[-3:]:
        out.print(tables.incidents(recent))
    if sensors := status.get("sensors"):
        out.print(tables.sensors(sensors))
    out.print(f"active: {tables.listed(status['active'])}")
    out.print(f"blind: {tables.listed(status['blind'])}")


def _message(status: dict[str, Any]) -> str:
    return str(status["message"]).strip()


def _progress(status: dict[str, Any]) -> str:
    from evertrain.cli.tables import share, step

    risk = status["steps_at_risk"]
    at_risk = "" if risk is None else f", {risk} steps at risk if a node is lost"
    return f"{step(status)}, attempt {status['attempt']}, ETTR {share(status['ettr'])}{at_risk}"


def _code(status: dict[str, Any]) -> list[str]:
    """What ranks run and what comes next; nothing where nobody has ever changed it."""
    version, pending = status.get("version"), status.get("change")
    if version in (None, 1) and pending is None:
        return []
    runs = f"version {version} of the code runs" if version is not None else "the code as it was at the start runs"
    return [runs, *([f"pending: {narrate.change(pending)}"] if pending is not None else [])]


def _start(status: dict[str, Any]) -> str:
    start = status["start"]
    if start["mode"] == start["wanted"]:
        return f"ranks are started by {start['mode']}"
    return f"ranks are started by {start['mode']} instead of {start['wanted']}: {start['reason']}"
