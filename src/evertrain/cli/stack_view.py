"""How does a capture look? Groups of processes that stand in the same place, a grid of the ranks, and the verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.text import Text

from evertrain.cli.plain import plain
from evertrain.controller.capture_files import Kept
from evertrain.locate import grid
from evertrain.locate.grid import Grid
from evertrain.locate.grouping import Cluster, clusters
from evertrain.locate.words import named, span
from evertrain.model.stacks import Frame, Located, LocatedKind, Position, ProcessKind
from evertrain.model.words import counted

KINDS: tuple[ProcessKind, ...] = ("trainer", "loader", "checkpoint", "helper")
_MOST_GROUPS, _MOST_ROWS, _MOST_LINES = 40, 40, 8
_INNERMOST = 3
"""Frames that are shown in any case."""
_REASONS = {"hang": "a hang was suspected", "slow": "training had become slow", "user": "asked for"}
_STATES = {"stopped": "stopped", "uninterruptible": "sleeps in the kernel, heeds no signal", "ended": "has ended"}
_MEANING: dict[LocatedKind, str] = {
    "stopped": "stopped (SIGSTOP, a debugger)",
    "uninterruptible": "sleeps in the kernel: a dead disk, mount or driver",
    "loader": "its data loader delivers nothing",
    "checkpoint": "its checkpoint does not come to an end",
    "storage": "inside file access that does not end",
    "held": "native code keeps its interpreter (GIL)",
    "loop": "computes without end outside of all operations",
    "outside": "sleeps outside of all operations",
    "skipped": "has left out an operation that the others wait in",
    "order": "calls operations in another order than the others",
    "mismatch": "the same operation, with other sizes or types",
    "deadlock": "groups wait for each other in a circle",
    "device": "waits for its device while its peers are further",
    "network": "all are there, and nothing moves",
    "slow": "computes while the others wait",
    "unknown": "not enough evidence to name anybody",
}

Json = dict[str, Any]


# -- text --------------------------------------------------------------------------------------------------------------


def lines(kept: Kept) -> Iterator[Text | str]:
    """What a person reads; what differs is marked, on a terminal by colour."""
    yield _title(kept)
    drawn, shown = _drawn(kept), 0
    letters, suspects = _letters(drawn), frozenset(kept.located.ranks)
    for kind in KINDS:
        of_kind = clusters(kept.merged.positions, kind)
        for one in of_kind:
            shown += 1
            if shown <= _MOST_GROUPS:
                yield _group(one, of_kind[0].first.frames, letters.get(id(one.first), " "), suspects)
    if shown > _MOST_GROUPS:
        yield f"… and {counted(shown - _MOST_GROUPS, 'more group')}: --json has all of them"
    if len(kept.merged.nodes) > 1 and drawn.legend:
        yield drawn.title
        yield from (f"  {line}" for line in drawn.lines[:_MOST_ROWS])
    yield from _verdict(kept.located)
    for node in kept.merged.missing[:_MOST_LINES]:
        yield f"not seen: {node} has sent nothing"
    for line in kept.merged.blind[:_MOST_LINES]:
        yield f"not seen: {line}"


def _title(kept: Kept) -> str:
    asked = kept.asked
    step = "" if kept.step is None else f" step {kept.step};"
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(asked.time))
    ranks = counted(len(kept.merged.nodes), "rank")
    return (
        f"job {kept.job}, capture {asked.capture}, attempt {asked.attempt}, {ranks};{step} taken {taken} "
        f"({_REASONS[asked.reason]})"
    )


def _group(cluster: Cluster, usual: Sequence[Frame], letter: str, suspects: frozenset[int]) -> Text:
    one, ranks = cluster.first, cluster.ranks
    is_suspect = _is_suspect(one.kind, ranks, suspects)
    mark = "*" if is_suspect else " "
    style = "bold red" if is_suspect else ""
    text = Text()
    text.append(f"{letter} {one.kind:<10} ")
    text.append(f"{named(ranks) + mark:<18} ", style=style)
    if one.state:
        where = f" in {one.waits_in}" if one.waits_in and one.state == "uninterruptible" else ""
        text.append(f"({_STATES[one.state]}{where}) ", style=style)
    if one.failure and not one.frames:
        text.append(plain(f"not to be read: {one.failure}"))
        return text
    differs = _differs(one.frames, usual)
    last = -1
    for at in _chosen(one.frames, differs):
        if at:
            text.append(" < " if at == last + 1 else " < … < ")
        frame = plain(str(one.frames[at]))
        text.append(f"[{frame}]" if at == differs else frame, style="bold yellow" if at == differs else "")
        last = at
    if last < len(one.frames) - 1:
        text.append(" < …")
    return text


def _is_suspect(kind: ProcessKind, ranks: Sequence[int], suspects: frozenset[int]) -> bool:
    """What belongs to a rank may well stand where those of all others do."""
    return not suspects.isdisjoint(ranks) if kind == "trainer" else suspects.issuperset(ranks)


def _ranks(one: Position) -> list[int]:
    return sorted({member.rank for member in one.members})


def _differs(frames: Sequence[Frame], usual: Sequence[Frame]) -> int | None:
    """Where, seen from the outermost frame, the stack leaves the one that most have."""
    common = 0
    for mine, theirs in zip(reversed(frames), reversed(usual), strict=False):
        if (mine.function, mine.file) != (theirs.function, theirs.file):
            break
        common += 1
    return len(frames) - common - 1 if common < len(frames) else None


def _chosen(frames: Sequence[Frame], differs: int | None) -> list[int]:
    """The innermost frames, the one that differs, and who called that one."""
    chosen = set(range(min(_INNERMOST, len(frames))))
    if differs is not None:
        chosen |= {at for at in (differs, differs + 1) if at < len(frames)}
    return sorted(chosen)


def _verdict(located: Located) -> Iterator[Text | str]:
    sure = f"{located.kind}, confidence {located.confidence:.2f}"
    if located.ranks:
        where = f" on {', '.join(located.nodes[:4])}{', …' if len(located.nodes) > 4 else ''}" if located.nodes else ""
        said = f"{named(located.ranks)}{where}: {_MEANING[located.kind]} ({sure})"
    elif located.kind == "unknown":
        said = _MEANING["unknown"]
    else:
        said = f"{_MEANING[located.kind]} ({sure})"
    yield Text.assemble("verdict: ", (plain(said), "bold"))
    for line in located.evidence[:_MOST_LINES]:
        yield f"  {line}"
    if located.group:
        yield f"  the group that they share: {located.group_name} ({named(located.group)})"


# -- grid --------------------------------------------------------------------------------------------------------------


def _drawn(kept: Kept) -> Grid:
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in kept.mesh.split(",") if part)}
    return grid.draw(kept.merged, sizes or None, marked=kept.located.ranks)


def _letters(drawn: Grid) -> dict[int, str]:
    """By identity of a position: the letter of the group that it belongs to."""
    return {id(one): letter for letter, cluster in drawn.legend for one in cluster.positions}


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_json(kept: Kept) -> Json:
    """The same for programs."""
    letters, merged = _letters(_drawn(kept)), kept.merged
    suspects = frozenset(kept.located.ranks)
    return {
        "job": kept.job,
        "capture": kept.asked.capture,
        "attempt": kept.asked.attempt,
        "reason": kept.asked.reason,
        "time": kept.asked.time,
        "step": kept.step,
        "mesh": kept.mesh or None,
        "nodes": {str(rank): node for rank, node in sorted(merged.nodes.items())},
        "groups": [
            {
                "letter": letters.get(id(one)),
                "kind": one.kind,
                "ranks": _ranks(one),
                "span": span(_ranks(one)),
                "processes": len({member.pid for member in one.members}),
                "suspect": _is_suspect(one.kind, _ranks(one), suspects),
                "state": one.state,
                "place": one.place,
                "is_idle": one.is_idle,
                "waits_in": one.waits_in,
                "failure": one.failure,
                "frames": [msgspec.to_builtins(frame) for frame in one.frames],
            }
            for one in sorted(merged.positions, key=lambda one: KINDS.index(one.kind))
        ],
        "verdict": msgspec.to_builtins(kept.located),
        "missing": list(merged.missing),
        "blind": list(merged.blind),
    }
