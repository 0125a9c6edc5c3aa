"""What happened here? `evertrain explain`: a verdict from any pile of logs and dumps, without a job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from evertrain.cli import tables
from evertrain.cli.pile import Pile
from evertrain.cli.plain import plain
from evertrain.detect.catalogue import Catalogue, build
from evertrain.detect.sieve import Sieve
from evertrain.locate import incident
from evertrain.model.errors import EvertrainError, UsageError
from evertrain.model.findings import Verdict
from evertrain.model.signals import Signals
from evertrain.model.words import counted
from evertrain.observe import documents, rules

_DO = {
    "evict": "take this host out, bring another in, and go on from the last good checkpoint",
    "retry": "start again with the same code; nobody is convicted",
    "user_code": "do not restart: hand this to the owner of the code, the options or the data",
    "rollback_user_code": "go back to the version before the change, and start again",
    "storage": "evict nobody: hold or retry with back-off, tell the storage's owner, check the newest checkpoint",
    "human": "a person must decide",
    "none": "leave the job alone",
}
_COLOURS = {
    "evict": "red",
    "user_code": "yellow",
    "rollback_user_code": "yellow",
    "storage": "magenta",
    "human": "cyan",
    "retry": "green",
    "none": "green",
}


def main(argv: Sequence[str]) -> int:
    """Exit code 0 whenever a verdict was printed."""
    flags = _parser().parse_args(argv)
    catalogue = build(rules.contents(flags.catalogue or ()), flags.without or ())
    if flags.cases is not None:
        return _cases(flags, catalogue)
    if not flags.paths:
        raise UsageError("explain what? Name files or folders, or `-` for standard input")
    found = Pile(Sieve(catalogue), host=flags.host)
    found.take(documents.read(flags.paths, found.refuse))
    for trouble in found.unreadable:
        print(f"evertrain: {plain(trouble)}", file=sys.stderr)
    if not found.kinds:
        raise EvertrainError("nothing could be read")
    verdict = incident.judge(found.sieve, _with_exitcode(found.signals, flags.exitcode), catalogue, found.findings)
    if flags.json:
        print(json.dumps([_row(0, verdict)], ensure_ascii=False))
    else:
        _show(verdict, found)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="evertrain explain",
        description="Says what failed, who is at fault and what to do, from logs, kernel messages, stack dumps, flight "
        "recorder dumps, NCCL RAS output and trace rings, of any number of ranks and hosts.",
    )
    parser.add_argument("paths", nargs="*", metavar="FILE|DIR|-", help="what to read; `-` is standard input")
    parser.add_argument("--json", action="store_true", help="one JSON list of verdicts on standard output")
    parser.add_argument("--cases", type=Path, metavar="FILE.jsonl", help="one case a line; only its `signals` are read")
    parser.add_argument(
        "--catalogue", type=Path, action="append", metavar="FILE", help="more rules, or others of the same name"
    )
    parser.add_argument("--without", action="append", metavar="GROUP", help="switch a group of rules off")
    parser.add_argument("--host", metavar="NAME", help="where lines that name no host were collected")
    parser.add_argument("--exitcode", type=int, metavar="N", help="of the process that failed, if it is known")
    return parser


def _with_exitcode(signals: Signals, exitcode: int | None) -> Signals:
    return msgspec.structs.replace(signals, exitcode=exitcode) if exitcode is not None else signals


def _cases(flags: argparse.Namespace, catalogue: Catalogue) -> int:
    rows = []
    try:
        lines = flags.cases.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {flags.cases}: {error}") from error
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            signals = msgspec.convert(json.loads(line)["signals"], Signals)
        except (ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise UsageError(f"{flags.cases}:{index + 1}: not a case: {error}") from error
        rows.append(_row(index, incident.explain(signals, catalogue)))
    if flags.json:
        print(json.dumps(rows, ensure_ascii=False))
        return 0
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("case", "category", "action", "culprit", "confidence", "why"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            str(row["index"]),
            row["category"],
            Text(row["action"], _COLOURS[row["action"]]),
            _culprit(row["culprit"]["type"], row["culprit"]["id"]),
            f"{row['confidence']:.2f}",
            row["summary"],
        )
    tables.console().print(table)
    return 0


def _row(index: int, verdict: Verdict) -> dict[str, Any]:
    return {
        "index": index,
        "category": verdict.category,
        "action": verdict.action,
        "culprit": {"type": verdict.culprit.type, "id": msgspec.to_builtins(verdict.culprit.id)},
        "confidence": verdict.confidence,
        "evidence": list(verdict.evidence),
        "summary": verdict.summary,
        "considered": [{"rule": rule, "why_not": reason} for rule, reason in verdict.considered],
    }


def _show(verdict: Verdict, found: Pile) -> None:
    out = tables.console()
    head = Text()
    head.append(f"{verdict.category.replace('_', ' ')}", style="bold")
    head.append(f"   {plain(verdict.summary)}\n\n")
    head.append("culprit     ", style="dim")
    head.append(_culprit(verdict.culprit.type, verdict.culprit.id) + "\n")
    head.append("action      ", style="dim")
    head.append(verdict.action, style=f"bold {_COLOURS[verdict.action]}")
    head.append(f": {_DO[verdict.action]}\n")
    head.append("confidence  ", style="dim")
    head.append(f"{verdict.confidence:.2f}")
    out.print(Panel(head, expand=False, border_style=_COLOURS[verdict.action], title="verdict", title_align="left"))
    if verdict.evidence:
        out.print("\nDecisive lines", style="bold")
        for line in verdict.evidence:
            out.print(_indented(out, plain(line)[:400]))
    if verdict.considered:
        out.print("\nAlso considered", style="bold")
        for rule, reason in verdict.considered[:12]:
            out.print(_indented(out, f"{rule}: {plain(reason)}"), style="dim")
    read = ", ".join(counted(count, kind) for kind, count in sorted(found.kinds.items())) or "nothing"
    if found.sieve.lines:
        read += f"; {counted(found.sieve.lines, 'line')}, {found.sieve.looked} of them looked at closely"
    out.print(f"\nRead: {read}.", style="dim")


def _indented(out: Console, text: str) -> RenderableType:
    """On a terminal lines that are wrapped stay indented; in a pipe lines stay whole."""
    return Padding(text, (0, 0, 0, 2), expand=False) if out.is_terminal else f"  {text}"


def _culprit(kind: str, name: str | int | Sequence[str] | Sequence[int]) -> str:
    text = ", ".join(map(str, name)) if isinstance(name, (list, tuple)) else str(name)
    return f"{kind} {plain(text)}".strip()
