"""`evertrain trace query`: ask the last seconds of all ranks in SQL, by DuckDB (the extra `evertrain[trace]`).

Tables: operations, flows, hosts, groups. Times are seconds by the wall clock, `t_…` and `t`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evertrain.cli import trace_source
from evertrain.model.errors import TroubleError, UsageError

if TYPE_CHECKING:
    from evertrain.trace.reading import Array
    from evertrain.trace.scene import Scene

TABLES = ("operations", "flows", "hosts", "groups")
_HIDDEN = frozenset({"crc", "check", "number", "pad", "pad8", "pad16"})
ROWS_SHOWN = 200


def main(argv: Sequence[str]) -> int:
    parser = trace_source.parser(
        "query",
        f"Ask the last seconds of all ranks in SQL; tables: {', '.join(TABLES)}. The statement is one word of "
        "the command line: put it in quotes.",
    )
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    parser.usage = "%(prog)s [flags] [JOB|DIR] SQL"
    sql = next((word for word in argv if _is_statement(word)), None)
    # wherever it stands: flags may come before it and after it
    args = parser.read([word for word in argv if word is not sql])
    if sql is None:
        raise UsageError('trace query: what is to be asked? As "SELECT op, count(*) FROM operations GROUP BY op"')
    duckdb = needs_duckdb()
    connection = _connection(trace_source.scene(args))
    try:
        answer = connection.execute(sql)
        names, rows = [column[0] for column in answer.description or ()], answer.fetchall()
    except duckdb.Error as error:
        raise UsageError(f"trace query: {' '.join(str(error).split())[:400]}") from error
    if args.json:
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=str))
        return 0
    from rich.table import Table

    from evertrain.cli import tables

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name)
    for row in rows[:ROWS_SHOWN]:
        table.add_row(*(f"{value:.6g}" if isinstance(value, float) else str(value) for value in row))
    out = tables.console()
    out.print(table)
    if len(rows) > ROWS_SHOWN:
        out.print(f"and {len(rows) - ROWS_SHOWN} rows more (--json shows all)")
    return 0


def _is_statement(word: str) -> bool:
    return " " in word.strip() and not word.startswith("-") and not Path(word).exists()


def needs_duckdb() -> Any:
    try:
        import duckdb
    except ImportError as error:
        raise TroubleError("this takes DuckDB, which is not installed: `pip install 'evertrain[trace]'`") from error
    return duckdb


def write_parquet(scene: Scene, folder: Path) -> str:
    connection = _connection(scene)
    folder.mkdir(parents=True, exist_ok=True)
    for name in TABLES:
        file = str(folder / f"{name}.parquet").replace("'", "''")
        connection.execute(f"COPY {name} TO '{file}' (FORMAT PARQUET)")
    counts = ", ".join(
        f"{connection.execute(f'SELECT count(*) FROM {name}').fetchall()[0][0]} {name}" for name in TABLES
    )
    return f"{counts} in {folder}"


def _connection(scene: Scene) -> Any:
    duckdb = needs_duckdb()
    connection = duckdb.connect()
    for name, columns in _tables(scene).items():
        connection.register(f"{name}_", columns)
        connection.execute(f"CREATE TABLE {name} AS SELECT * FROM {name}_")
    return connection


def _tables(scene: Scene) -> dict[str, dict[str, Any]]:
    import numpy as np

    from evertrain.trace import layout, reading
    from evertrain.trace import scene as scenes

    def together(body: str, dtype: Any) -> dict[str, Any]:
        found: list[tuple[Array, int, str, str]] = []
        for track in scene.tracks:
            found.append((getattr(track.records, body), track.wall_ns, track.node, track.writer))
            if body == "operations":
                found.append((track.table, track.wall_ns, track.node, track.writer))
        whole = np.concatenate([part for part, *_ in found]) if found else np.empty(0, dtype)
        shift = np.concatenate([np.full(len(part), by) for part, by, *_ in found] or [np.empty(0, np.int64)])
        columns: dict[str, Any] = {
            "node": np.array([node for part, _, node, _ in found for _ in range(len(part))], dtype=object),
            "writer": np.array([writer for part, _, _, writer in found for _ in range(len(part))], dtype=object),
        }
        for name in whole.dtype.names or ():
            if name in _HIDDEN:
                continue
            values = whole[name]
            if name == "t" or name.startswith("t_"):
                columns[name] = np.where(values > 0, (values.astype(np.int64) + shift) / 1e9, np.nan)
            elif name == "comm":
                columns[name] = np.array([f"{one:016x}" for one in values.tolist()], dtype=object)
            elif name == "kind":
                columns[name] = _words(values, {number: kind for kind, number in layout.KINDS.items()})
            elif name == "op":
                columns[name] = _words(values, dict(enumerate(layout.OPS)))
            elif name == "seen":
                columns[name] = _words(values, {number: how for how, number in layout.SEEN.items()})
            elif name == "state" and body == "hosts":
                columns[name] = np.array([chr(one) for one in values.tolist()], dtype=object)
            else:
                columns[name] = np.ascontiguousarray(values)
        return columns

    made = {
        "operations": together("operations", reading.OPERATION),
        "flows": together("flows", reading.FLOW),
        "hosts": together("hosts", reading.HOST),
    }
    groups = sorted(scene.groups.items())
    made["groups"] = {
        "comm": np.array([f"{comm:016x}" for comm, _ in groups], dtype=object),
        "name": np.array([scenes.named(group) for _, group in groups], dtype=object),
        "members": np.array([",".join(map(str, group.ranks)) for _, group in groups], dtype=object),
    }
    return made


def _words(values: Array, names: dict[int, str]) -> Array:
    import numpy as np

    return np.array([names.get(one, str(one)) for one in values.tolist()], dtype=object)
