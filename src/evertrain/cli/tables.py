"""How do jobs, attempts and incidents look as text? The tables that `run`, `status` and `incidents` share."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evertrain.cli import narrate
from evertrain.cli.plain import plain

Json = dict[str, Any]
PHASES = ("detect", "locate", "failover", "recompute")
COLOURS = {
    "running": "green",
    "done": "green",
    "active": "green",
    "starting": "cyan",
    "standby": "cyan",
    "recovering": "yellow",
    "stopping": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "lost": "red",
    "unusable": "red",
    "evicted": "red",
}


class _Plain(Console):
    """Shows strings as they are, whatever they hold."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)


def console(file: TextIO | None = None) -> Console:
    out = file if file is not None else sys.stdout
    # piped output keeps its lines whole, whatever the width of some terminal
    return _Plain(
        file=out, highlight=False, markup=False, soft_wrap=not out.isatty(), width=None if out.isatty() else 200
    )


def coloured(state: str) -> Text:
    return Text(state, style=COLOURS.get(state, ""))


def incidents(rows: Sequence[Json]) -> Table:
    table = _table("id", "attempt", "where", "cause", "action", "step", *(f"{name} s" for name in PHASES), "total s")
    for row in rows:
        seconds = [row["seconds"][name] for name in PHASES]
        known = [value for value in seconds if value is not None]
        total = _seconds(sum(known)) if known else "-"
        table.add_row(
            str(row["id"]),
            str(row["attempt"]),
            narrate.where(row),
            row["cause"],
            narrate.action(row),
            "-" if row["step"] is None else str(row["step"]),
            *(_seconds(value) for value in seconds),
            total,
        )
    return table


def attempts(rows: Sequence[Json]) -> Table:
    table = _table("attempt", "from step", "to step", "seconds", "outcome")
    for row in rows:
        last = row["step"] if row["step"] is not None else row["relative_step"]
        table.add_row(
            str(row["attempt"]),
            "-" if row["resume"] is None else str(row["resume"]),
            "-" if last is None else str(last),
            _seconds(row["seconds"]),
            row["outcome"],
        )
    return table


def workers(rows: Sequence[Json]) -> Table:
    table = _table("rank", "node", "pid", "step", "phase")
    for row in rows:
        step = "-" if row["step"] is None else str(row["step"])
        table.add_row(str(row["rank"]), row["node"], str(row["pid"] or "-"), step, row["phase"])
    return table


def sensors(rows: Sequence[Json]) -> Table:
    """One line a kind: on how many nodes it sees, and what it saw last on the first of them."""
    table = plain_table("sensor", "sees", "blind", "none there", "last reading")
    for row in rows:
        where = f"{row['last_node']}: " if row["last_node"] is not None and row["ok"] > 1 else ""
        table.add_row(
            row["name"], str(row["ok"]), str(row["blind"]), str(row["absent"]), f"{where}{row['last']}" or "-"
        )
    return table


def plain_table(*columns: str) -> Table:
    """Text to the left, whole lines."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="fold")
    return table


def step(status: Json) -> str:
    """`step 40`; where the script names no steps, how many this attempt has done."""
    if status["step"] is None:
        return "no step seen"
    return f"step {status['step']}" if status["step_kind"] == "absolute" else f"{status['step']} steps in this attempt"


def listed(names: Sequence[str]) -> str:
    return "; ".join(names) if names else "nothing"


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        is_text = column in ("where", "cause", "action", "outcome", "node", "phase")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
