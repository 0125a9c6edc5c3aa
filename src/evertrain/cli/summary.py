"""What does `evertrain run` say at the end, and with which code does it end? One screen, on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from evertrain.cli import supervisor as supervising
from evertrain.cli.places import Places
from evertrain.cli.plain import plain
from evertrain.model.words import counted

Json = dict[str, Any]
SHOWN = 12
"""Rows of a table; the rest is in `evertrain incidents`."""


def show(here: Places, result: Json, seconds: float) -> int:
    """The controller's result in words; the exit code."""
    from evertrain.cli import tables

    status, incidents, attempts = result["status"], result["incidents"], result["attempts"]
    out = tables.console(sys.stderr)
    out.print(f"evertrain: job {here.job} {result['state']}{_because(result)}")
    out.print(
        f"  {tables.step(status)}, {counted(len(attempts), 'attempt')}, {counted(len(incidents), 'incident')}, "
        f"ETTR {tables.share(status['ettr'])}, {seconds:.1f} s",
    )
    if incidents:
        out.print(tables.incidents(incidents[-SHOWN:]))
    if result["state"] == "failed":
        out.print(tables.attempts(attempts[-SHOWN:]))
        _failure(out, result.get("first_failure"))
    out.print(f"  active: {tables.listed(status['active'])}")
    out.print(f"  blind: {tables.listed(status['blind'])}")
    if incidents or result["state"] != "done":
        out.print(f"  more: evertrain incidents --job {here.job}; logs in {here.log_root}")
    return int(result["exit_code"])


def _because(result: Json) -> str:
    # what the status says is the same, and what is left to do
    message = result["status"].get("message") or result.get("message")
    return f": {message}" if message else ""


def _failure(out: Any, failure: Json | None) -> None:
    if failure is None:
        return
    how = "" if failure["status"] is None else f", {supervising.in_words(failure['status'])}"
    out.print(f"  first failing rank: {failure['rank']} on {failure['node']}{how}")
    if failure["traceback"]:
        out.print(failure["traceback"].rstrip())


def give_up(name: str, log: Path, lines: int = 15) -> int:
    """A process of ours cannot be kept alive; the end of its log says why."""
    print(f"evertrain: {name} cannot be started; the job is given up. The end of {log}:", file=sys.stderr)
    try:
        tail = log.read_text(errors="replace").splitlines()[-lines:]
    except OSError as error:
        tail = [str(error)]
    for line in tail:
        print(f"  {plain(line)}", file=sys.stderr)
    return 1
