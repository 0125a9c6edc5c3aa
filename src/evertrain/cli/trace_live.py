"""`evertrain trace live`: how far has each group of ranks come, and who lags behind?

The table is shown again every second on a terminal; `--once` and `--json` show it once.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evertrain.cli import look, trace_source
from evertrain.cli.registry import KnownJob
from evertrain.locate.words import span
from evertrain.model.errors import TroubleError

if TYPE_CHECKING:
    from rich.table import Table

    from evertrain.trace.progress import Row
    from evertrain.trace.scene import Scene

EVERY_S = 1.0
TAKEOVER_S = 20.0
"""So long nobody may answer."""
ROWS_SHOWN = 40


def main(argv: Sequence[str]) -> int:
    parser = trace_source.parser(
        "live", "How far has each group of ranks come in its collectives, and who lags behind?"
    )
    parser.add_argument("--once", action="store_true", help="show the table once, as it is without a terminal")
    parser.add_argument("--json", action="store_true", help="once, as JSON on stdout and nothing else")
    args = parser.read(argv)
    trace_source.seconds_of(args.seconds)
    is_live = args.incident is None and not (args.name is not None and Path(args.name).exists())
    job = look.find(args.job or args.name, args.run_dir) if is_live else None
    if job is not None and not look.lives(job):
        job = None
    if args.json:
        found = _scene(args, job)
        print(json.dumps(_as_json(found)))
        return 0
    from evertrain.cli import tables

    out = tables.console()
    if args.once or job is None or not out.is_terminal:
        _print(out, _scene(args, job))
        return 0
    from rich.live import Live

    with Live(console=out, auto_refresh=False, transient=False) as live:
        answered = time.monotonic()
        while True:
            began = time.monotonic()
            try:
                live.update(_table(_scene(args, job)), refresh=True)
                answered = time.monotonic()
            except TroubleError as error:
                # an agent or a controller that has died is there again in a moment
                if not look.lives(job) or time.monotonic() - answered > TAKEOVER_S:
                    live.stop()
                    print(f"evertrain: {error}", file=sys.stderr)
                    return 1
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))


def _scene(args: Any, job: KnownJob | None) -> Scene:
    return trace_source.window(job, EVERY_S, brief=True) if job is not None else trace_source.scene(args)


def _as_json(scene: Scene) -> dict[str, Any]:
    from evertrain.trace import progress

    return {
        "groups": [_row(row) for row in progress.rows(scene)],
        "missing": list(scene.missing),
        "problems": list(scene.problems),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "comm": f"{row.comm:016x}",
        "name": row.name,
        "members": list(row.members),
        "op": row.op,
        "least": row.least,
        "most": row.most,
        "lagging": list(row.lagging),
        "unseen": list(row.unseen),
        "in_flight": row.in_flight,
        "blocked_s": round(row.blocked_s, 3) if row.blocked_s is not None else None,
        "ranks": {
            str(rank): {"done": place.done, "reached": place.reached, "in_flight": place.in_flight}
            for rank, place in sorted(row.places.items())
        },
    }


def _print(out: Any, scene: Scene) -> None:
    out.print(_table(scene))
    for line in (*scene.missing, *scene.problems):
        out.print(line)


def _table(scene: Scene) -> Table:
    from rich.table import Table

    from evertrain.cli.plain import plain
    from evertrain.trace import progress

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("group", "members", "op", "least", "most", "lags", "in flight", "blocked s"):
        table.add_column(name)
    found = progress.rows(scene)
    for row in found[:ROWS_SHOWN]:
        lags = span(row.lagging) if row.lagging else "-"
        lags += f" (unseen: {span(row.unseen)})" if row.unseen else ""
        blocked = f"{row.blocked_s:.1f}" if row.blocked_s is not None else "-"
        table.add_row(
            plain(row.name), span(row.members), row.op or "-", str(row.least), str(row.most), lags,
            str(row.in_flight), blocked,
        )  # fmt: skip
    if len(found) > ROWS_SHOWN:
        table.add_row(f"and {len(found) - ROWS_SHOWN} groups more (--json shows all)")
    if not found:
        table.add_row("no collective yet")
    return table
