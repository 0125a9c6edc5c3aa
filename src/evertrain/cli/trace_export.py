"""`evertrain trace export`: the last seconds as a file. For Perfetto and Chrome as JSON, or as tables in Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evertrain.cli import trace_source
from evertrain.model.errors import TroubleError, UsageError

if TYPE_CHECKING:
    from evertrain.trace.scene import Scene, Track

Json = dict[str, Any]
_OPERATIONS, _BLOCKED, _CONNECTIONS, _NCCL = 1, 2, 3, 4
"""Threads of a rank's process in the viewer: operations; what it waits in; counters."""


def main(argv: Sequence[str]) -> int:
    parser = trace_source.parser(
        "export", "The last seconds of all trace rings as a file, for ui.perfetto.dev, chrome://tracing, or as Parquet."
    )
    parser.add_argument("--out", metavar="FILE", help="where to write; with --parquet, a folder")
    parser.add_argument("--parquet", action="store_true", help="tables for pandas, DuckDB and others, one file each")
    args = parser.read(argv)
    if args.out is None:
        raise UsageError("trace export: --out names the file to write")
    out = Path(args.out)
    if args.parquet:
        from evertrain.cli import trace_query

        trace_query.needs_duckdb()
    scene = trace_source.scene(args)
    try:
        written = trace_query.write_parquet(scene, out) if args.parquet else write_chrome(scene, out)
    except OSError as error:
        raise TroubleError(f"{out} cannot be written: {error.strerror or error}") from error
    for line in (*scene.missing, *scene.problems):
        print(f"evertrain: {line}")
    print(written)
    return 0


def write_chrome(scene: Scene, out: Path) -> str:
    events = list(chrome(scene))
    out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    count = sum(one["ph"] == "X" for one in events)
    return f"{count} operations of {len({one['pid'] for one in events})} ranks in {out}; open it in ui.perfetto.dev"


def chrome(scene: Scene) -> Iterator[Json]:
    """Events as the Trace Event Format has them, times in microseconds by the wall clock."""
    began = min((_first_ns(track) for track in scene.tracks if len(track.records) or len(track.table)), default=0)
    named: set[int] = set()
    for track in sorted(scene.tracks, key=lambda one: one.rank):
        if track.rank not in named:
            named.add(track.rank)
            yield _name("process_name", track.rank, 0, f"rank {track.rank} on {track.node}")
            yield _name("thread_name", track.rank, _OPERATIONS, "operations")
            yield _name("thread_name", track.rank, _BLOCKED, "waits in")
        if track.writer == "nccl":
            yield _name("thread_name", track.rank, _NCCL, "inside NCCL")
        yield from _operations(scene, track, began)
        yield from _connections(track, began)


def _name(what: str, pid: int, tid: int, name: str) -> Json:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


def _operations(scene: Scene, track: Track, began: int) -> Iterator[Json]:
    from evertrain.trace import layout

    kinds = {number: name for name, number in layout.KINDS.items()}
    if track.writer == "agent":
        return  # the same operations as in the rank's own ring
    done = track.records.operations
    done = done[done["kind"] == layout.KINDS["done"]]
    for one in (*done, *track.table):
        if track.writer == "nccl" and one["flow"] != layout.SIDES["whole"]:
            continue  # its channels are no operations of their own
        kind = kinds.get(int(one["kind"]), "")
        begin = int(one["t_wait"] if kind == "blocked" else one["t_posted"])
        end = int(one["t_done"]) or track.last_ns
        is_open = kind in ("state", "blocked")
        name = layout.OPS[one["op"]] if one["op"] < len(layout.OPS) else "other"
        yield {
            "ph": "X",
            "name": f"{name} (in flight)" if is_open else name,
            "cat": kind,
            "pid": track.rank,
            "tid": _NCCL if track.writer == "nccl" else _BLOCKED if kind == "blocked" else _OPERATIONS,
            "ts": (begin + track.wall_ns - began) / 1e3,
            "dur": max(0, end - begin) / 1e3,
            "args": {
                "group": scene.group_name(int(one["comm"])),
                "seq": int(one["seq"]),
                "bytes": int(one["bytes"]),
                "peer": int(one["peer"]),
            },
        }


def _connections(track: Track, began: int) -> Iterator[Json]:
    for one in track.records.flows:
        seconds = max(1, int(one["dt_us"])) / 1e6
        name = f"to rank {one['peer']}" if one["peer"] >= 0 else f"socket {one['inode']}"
        yield {
            "ph": "C",
            "name": name,
            "pid": track.rank,
            "tid": _CONNECTIONS,
            "ts": (int(one["t"]) + track.wall_ns - began) / 1e3,
            "args": {"MB/s": round(int(one["sent"]) / seconds / 1e6, 3), "not sent kB": int(one["notsent"]) / 1e3},
        }


def _first_ns(track: Track) -> int:
    times = [int(part["t"].min()) for part in (track.records.flows, track.records.hosts) if len(part)]
    times += [int(part["t_posted"].min()) for part in (track.records.operations, track.table) if len(part)]
    return min(times, default=track.last_ns) + track.wall_ns
