"""What have all ranks written down, put side by side? From a window of a living job, or from the files of a dead one.

Each rank's times are by the monotonic clock of its node; `wall_ns` says what to add for a clock that all share. How far
that is right across nodes is the window's to say: nothing here compares times of two nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from evertrain.model import windows
from evertrain.model.windows import JobWindow, NodeWindow, RingWindow, TracedGroup
from evertrain.trace import flows, layout, reading
from evertrain.trace import groups as groups_of
from evertrain.trace.flows import Pair
from evertrain.trace.reading import Array, Reader, Records

_NO_NAMES = ("", "undefined")
RECORDS_OF_A_DEAD_JOB = 65_536
"""Of each ring; more is minutes."""


@dataclass(frozen=True)
class Track:
    """One ring of one rank."""

    rank: int
    node: str
    attempt: int
    writer: str
    records: Records
    table: Array
    """What was so at the end."""
    wall_ns: int
    """To add to its times for the wall clock."""
    last_ns: int
    """When it was read, or its last record written."""
    lost: int = 0
    problem: str = ""


@dataclass(frozen=True)
class Scene:
    tracks: tuple[Track, ...]
    groups: dict[int, TracedGroup] = field(default_factory=dict)
    """By the communicator's number."""
    missing: tuple[str, ...] = ()
    """Who has not answered, and why."""
    problems: tuple[str, ...] = ()

    def of(self, *writers: str) -> Iterator[Track]:
        return (track for track in self.tracks if track.writer in writers)

    def group_name(self, comm: int) -> str:
        group = self.groups.get(comm)
        return named(group) if group is not None else f"{comm:016x}"


def named(group: TracedGroup) -> str:
    """As the script has called it; most scripts call none."""
    return group.desc if group.desc not in _NO_NAMES else f"group {group.name}"


def of_window(window: JobWindow) -> Scene:
    """Raises ValueError where a part cannot be read."""
    tracks: list[Track] = []
    groups: dict[int, TracedGroup] = {}
    pairs: list[Pair] = []
    problems: list[str] = []
    for part in window.parts:
        node = windows.unpack(part.packed)
        wall_ns = int((node.zero + part.offset_s) * 1e9)
        tracks += [_track(node, ring, wall_ns) for ring in node.rings if not ring.problem]
        problems += [f"{node.node}: rank {ring.rank}: {ring.problem}" for ring in node.rings if ring.problem]
        problems += [f"{node.node}: {line}" for line in node.blind]
        groups |= _by_number(node.groups)
        pairs += [Pair(one.rank, one.inode, one.own, one.peer) for one in node.ends]
    _name_peers(tracks, pairs)
    missing = tuple(f"{node} has not answered" for node in window.missing)
    return Scene(tuple(tracks), groups, missing, tuple(problems))


def _track(node: NodeWindow, ring: RingWindow, wall_ns: int) -> Track:
    records = reading.split(np.frombuffer(ring.records, reading.OPERATION).copy(), ring.last)
    table, communicators = reading.split_table(np.frombuffer(ring.table, reading.OPERATION).copy())
    records = replace(records, communicators=np.concatenate((records.communicators, communicators)))
    return Track(ring.rank, node.node, node.attempt, ring.writer, records, table, wall_ns, node.monotonic_ns, ring.lost)


def of_folder(where: Path) -> Scene:
    """The rings of the newest attempt of each node below it, and what lies beside them."""
    return of_files(ring_files(where))


def of_files(paths: Iterable[Path]) -> Scene:
    """The same for these rings."""
    tracks: list[Track] = []
    groups: dict[int, TracedGroup] = {}
    pairs: list[Pair] = []
    problems: list[str] = []
    for path in paths:
        try:
            with Reader(path) as reader:
                track = _of_reader(reader)
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
            continue
        tracks.append(track)
        stem = path.name.partition("-agent")[0].partition("-hook")[0]
        pairs += flows.read_pairs(path.with_name(f"{stem}-agent.flows"), track.rank)
        for page in (path.parent.parent / "pages" / f"{stem}.groups", path.with_name(f"{stem}.groups")):
            groups |= _by_number(groups_of.read(page))
    newest, ended = dict[str, int](), dict[str, int]()
    for track in tracks:
        newest[track.node] = max(track.attempt, newest.get(track.node, 0))
    tracks = [track for track in tracks if track.attempt == newest[track.node]]
    # a node has one clock, and its agent writes after its ranks have fallen silent
    for track in tracks:
        ended[track.node] = max(track.last_ns, ended.get(track.node, 0))
    tracks = [replace(track, last_ns=ended[track.node]) for track in tracks]
    _name_peers(tracks, dict.fromkeys(pairs))
    return Scene(tuple(tracks), groups, (), tuple(problems))


def ring_files(where: Path) -> list[Path]:
    """The rings at, or below, a path; whatever they are called."""
    if where.is_file():
        return [where]
    return sorted(path for path in where.rglob("*.ring") if path.is_file())


def _of_reader(reader: Reader) -> Track:
    header = reader.header()
    records = reader.newest(RECORDS_OF_A_DEAD_JOB)
    table, communicators = reading.split_table(reader.table())
    records = replace(records, communicators=np.concatenate((records.communicators, communicators)))
    last_ns = max(
        (int(part["t"].max()) for part in (records.operations, records.flows, records.hosts, table) if len(part)),
        default=header.monotonic_ns,
    )
    writer = next((name for name, number in layout.WRITERS.items() if number == header.writer), str(header.writer))
    wall_ns = header.wall_ns - header.monotonic_ns
    return Track(header.rank, header.node, header.attempt, writer, records, table, wall_ns, last_ns, reader.lost())


def _by_number(groups: Iterable[TracedGroup]) -> dict[int, TracedGroup]:
    found = {}
    for group in groups:
        try:
            found[int(group.id, 16)] = group
        except ValueError:
            continue
    return found


def _name_peers(tracks: Iterable[Track], pairs: Iterable[Pair]) -> None:
    """Who is at the other end of connections between nodes, which no node knows by itself."""
    ends = flows.paired(tuple(pairs))
    for track in tracks:
        seen = track.records.flows
        for at in np.flatnonzero(seen["peer"] == layout.NOBODY):
            seen["peer"][at] = ends.get((track.rank, int(seen["inode"][at])), layout.NOBODY)
