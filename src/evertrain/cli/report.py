"""`evertrain report [JOB]`: where did the time go? Productive and lost seconds of all runs: text, Markdown or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from evertrain.cli import look
from evertrain.cli.plain import plain
from evertrain.cli.registry import KnownJob
from evertrain.model.words import counted

Json = dict[str, Any]

PHASES = ("start", "detect", "locate", "failover", "recompute", "stop")


class Section(NamedTuple):
    """One table, whatever it is shown as."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    words: frozenset[str] = frozenset()
    """Columns that hold words, not numbers."""


def main(argv: Sequence[str]) -> int:
    parser = look.parser("report", "Where did the time go? Productive and lost seconds of a job, over all its runs.")
    parser.add_argument("name", nargs="?", metavar="JOB", help="the same as --job")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    form.add_argument("--markdown", action="store_true", help="Markdown, for an issue or a mail")
    args = parser.read(argv)
    report = _of(look.find(args.job or args.name, args.run_dir))
    if args.json:
        print(json.dumps(report))
    elif args.markdown:
        print(markdown(report))
    else:
        _show(report)
    return 0


def _of(job: KnownJob) -> Json:
    """From the live controller, else from the event store."""
    if (answers := look.ask(job, "/v1/report")) is not None:
        report: Json = answers[0]
        return report
    from evertrain.controller import accounts

    live = look.lives(job)
    return look.read(job, lambda database: accounts.of_database(database, job.job, live=live))


def markdown(report: Json) -> str:
    """Headings and tables."""
    lines = [f"# {_title(report)}"]
    for section in sections(report):
        lines += ["", f"## {section.title}", "", _markdown_row(section.columns)]
        lines.append(_markdown_row([":---" if name in section.words else "---:" for name in section.columns]))
        lines += [_markdown_row(row) for row in section.rows]
    return "\n".join(lines)


def _markdown_row(cells: Sequence[str]) -> str:
    escaped = (plain(" ".join(cell.replace("|", "\\|").split())) for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _show(report: Json) -> None:
    from rich.table import Table

    from evertrain.cli import tables

    out = tables.console()
    out.print(_title(report))
    for section in sections(report):
        out.print()
        table = Table(
            box=None, pad_edge=False, header_style="bold", title=section.title, title_justify="left", title_style="bold"
        )
        for name in section.columns:
            words = name in section.words
            table.add_column(name, justify="left" if words else "right", overflow="fold", no_wrap=not words)
        for row in section.rows:
            table.add_row(*row)
        out.print(table)


def _title(report: Json) -> str:
    runs = len(report["runs"])
    return f"job {report['job']}: {counted(runs, 'run')}, {counted(len(report['attempts']), 'attempt')}"


def sections(report: Json) -> Iterator[Section]:
    """What is shown, in this order; a table without rows is left out."""
    views = [("all runs", report["all"]), ("this run", report["run"])]
    if len(report["runs"]) < 2:
        views = views[1:]
    yield Section("Time", ("", *(name for name, _ in views)), _time(views), frozenset({""}))
    whole = report["all"]
    found = [
        _incidents(whole),
        _shares("Lost by phase", "phase", whole["by_phase"], whole),
        _shares("Lost by cause", "cause", whole["by_category"], whole),
        _shares("Lost by mechanism", "mechanism", whole["by_mechanism"], whole),
        _runs(report["runs"]),
        _attempts(report["attempts"]),
    ]
    yield from (section for section in found if section.rows)


def _time(views: Sequence[tuple[str, Json]]) -> list[tuple[str, ...]]:
    def line(title: str, name: str, form: Any) -> tuple[str, ...]:
        return (title, *(form(view[name]) for _, view in views))

    return [
        line("wall time", "wall_s", duration),
        line("productive", "productive_s", duration),
        line("lost", "lost_s", duration),
        line("not running", "not_running_s", duration),
        line("ETTR (productive / running)", "ettr", _share),
        line("ETTR of the last hour", "ettr_hour", _share),
        line("ETTR weighted by speed", "ettr_weighted", _share),
        line("the same of the last hour", "ettr_weighted_hour", _share),
    ]


def _incidents(view: Json) -> Section:
    phases = [name for name in PHASES if name in view["by_phase"]]
    rows = [
        (
            "-" if row["incident"] is None else str(row["incident"]),
            row["cause"],
            _words(row["category"]),
            _words(row["mechanism"]),
            *(_seconds(row["seconds"].get(name)) for name in phases),
            _seconds(row["total_s"]),
        )
        for row in view["by_incident"]
    ]
    columns = ("incident", "what", "cause", "mechanism", *(f"{name} s" for name in phases), "total s")
    return Section("Lost by incident", columns, rows, frozenset({"what", "cause", "mechanism"}))


def _shares(title: str, column: str, sums: dict[str, float], view: Json) -> Section:
    running = view["wall_s"] - view["not_running_s"]
    rows = [(_words(name), _seconds(spent), _share(spent / running)) for name, spent in sums.items()]
    return Section(title, (column, "seconds", "of running time"), rows, frozenset({column}))


def _runs(runs: list[Json]) -> Section:
    rows = [
        (
            str(number),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run["started"])),
            duration(run["wall_s"]),
            run["state"],
            _share(run["ettr"]),
        )
        for number, run in enumerate(runs, 1)
    ]
    return Section("Runs", ("run", "started", "wall time", "state", "ETTR"), rows, frozenset({"started", "state"}))


def _attempts(attempts: list[Json]) -> Section:
    rows = [
        (
            str(attempt["run"]),
            str(attempt["attempt"]),
            _number(attempt["resume"]),
            _number(attempt["step"] if attempt["step"] is not None else attempt["relative_step"]),
            _seconds(attempt["seconds"]),
            attempt["outcome"],
        )
        for attempt in attempts
    ]
    columns = ("run", "attempt", "from step", "to step", "seconds", "outcome")
    return Section("Attempts", columns, rows, frozenset({"outcome"}))


def duration(seconds: float) -> str:
    """`12.34 s`, `3 min 05 s`, `2 h 03 min`, `4 d 07 h`."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _words(name: str) -> str:
    return name.replace("_", " ")
