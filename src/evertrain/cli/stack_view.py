"""How does a capture look? Groups of processes that stand in the same place, a grid of the ranks, and the verdict."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from string import ascii_lowercase, ascii_uppercase
from typing import Any

import msgspec
from rich.text import Text

from evertrain.cli.plain import plain
from evertrain.controller.capture_files import Kept
from evertrain.locate.words import named, span
from evertrain.model.stacks import Frame, Located, LocatedKind, Position, ProcessKind
from evertrain.model.words import counted

KINDS: tuple[ProcessKind, ...] = ("trainer", "loader", "checkpoint", "helper")
_LETTERS = ascii_uppercase + ascii_lowercase
_MORE, _UNSEEN = "#", "."
"""Cells of the grid: a group beyond the letters; a rank of which nothing was seen."""
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
    letters, shown = _letters(kept.merged.positions), 0
    suspects = frozenset(kept.located.ranks)
    for kind in KINDS:
        of_kind = [one for one in kept.merged.positions if one.kind == kind]
        for one in of_kind:
            shown += 1
            if shown <= _MOST_GROUPS:
                yield _group(one, of_kind[0], letters.get(id(one), " "), suspects)
    if shown > _MOST_GROUPS:
        yield f"… and {counted(shown - _MOST_GROUPS, 'more group')}: --json has all of them"
    yield from _grid(kept, letters, suspects)
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


def _group(one: Position, usual: Position, letter: str, suspects: frozenset[int]) -> Text:
    ranks = _ranks(one)
    is_suspect = _is_suspect(one, suspects)
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
    differs = _differs(one.frames, usual.frames) if one is not usual else None
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


def _is_suspect(one: Position, suspects: frozenset[int]) -> bool:
    """What belongs to a rank may well stand where those of all others do."""
    ranks = {member.rank for member in one.members}
    return not suspects.isdisjoint(ranks) if one.kind == "trainer" else ranks <= suspects


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


def _ranks(one: Position) -> list[int]:
    return sorted({member.rank for member in one.members})


def _letters(positions: Sequence[Position]) -> dict[int, str]:
    """By identity, of the trainers' groups only: the largest is A."""
    trainers = [one for one in positions if one.kind == "trainer"]
    return {id(one): _LETTERS[at] if at < len(_LETTERS) else _MORE for at, one in enumerate(trainers)}


def _grid(kept: Kept, letters: dict[int, str], suspects: frozenset[int]) -> Iterator[Text | str]:
    cells: dict[int, str] = {}
    for one in reversed(kept.merged.positions):
        for member in one.members:
            if one.kind == "trainer":
                cells[member.rank] = letters[id(one)]
    rows = list(_rows(kept))
    if len(kept.merged.nodes) < 2 or not cells:
        return
    yield f"grid {_axes(kept)}"
    width, plain_rows, shown = max((len(label) for label, _ in rows), default=0), 0, 0
    for label, blocks in rows:
        ranks = [rank for block in blocks for rank in block]
        is_dull = len(rows) > _MOST_ROWS and {cells.get(rank, _UNSEEN) for rank in ranks} == {"A"}
        if is_dull or shown >= _MOST_ROWS:
            plain_rows += 1
            continue
        shown += 1
        text = Text(f"  {label:<{width}}  ")
        for number, block in enumerate(blocks):
            text.append(" " if number else "")
            for rank in block:
                text.append(cells.get(rank, _UNSEEN), style="bold red" if rank in suspects else "")
        yield text
    if plain_rows:
        yield f"  … and {counted(plain_rows, 'more row')}"


def _axes(kept: Kept) -> str:
    sizes = _sizes(kept)
    return " x ".join(sizes) if sizes else "by node"


def _sizes(kept: Kept) -> dict[str, int]:
    """Of the mesh, where it has as many cells as there are ranks."""
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in kept.mesh.split(",") if part)}
    cells = 1
    for size in sizes.values():
        cells *= size
    ranks = kept.merged.nodes
    return sizes if sizes and cells == len(ranks) == max(ranks, default=-1) + 1 else {}


def _rows(kept: Kept) -> Iterator[tuple[str, list[list[int]]]]:
    """A row for all but the two innermost dimensions, a block for each of the last but one; else a row a node."""
    sizes = _sizes(kept)
    if sizes:
        names, counts = list(sizes), list(sizes.values())
        outer, rest = counts[:-2], counts[-2:]
        block, blocks = rest[-1], rest[0] if len(rest) > 1 else 1
        first = 0
        for place in product(*map(range, outer)):
            label = " ".join(f"{name}={at}" for name, at in zip(names, place, strict=False))
            yield label, [list(range(first + at * block, first + (at + 1) * block)) for at in range(blocks)]
            first += block * blocks
        return
    by_node: dict[str, list[int]] = defaultdict(list)
    for rank, node in sorted(kept.merged.nodes.items()):
        by_node[node].append(rank)
    for node, ranks in by_node.items():
        yield node, [ranks]


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_json(kept: Kept) -> Json:
    """The same for programs."""
    letters, merged = _letters(kept.merged.positions), kept.merged
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
                "suspect": _is_suspect(one, suspects),
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
