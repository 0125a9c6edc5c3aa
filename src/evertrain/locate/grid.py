"""Where in the topology do the odd ones stand? All ranks as a grid of letters, one letter for each place.

    pp=0    dp=0  AAAAAAAA   dp=1  AAABAAAA   dp=2-124  AAAAAAAA
    pp=1-9  dp=0-124  CCCCCCCC

The last dimension is a block, the one before it a row of blocks, all others are rows. Equal blocks that follow each
other are written once, and so are equal rows: eight ranks or ten thousand, what differs is what is seen.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby

import msgspec

from evertrain.locate.grouping import Cluster, Merged, clusters
from evertrain.locate.parallel import coordinates
from evertrain.model.stacks import ProcessKind

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_OTHER, _UNSEEN = "+", "?"
_LONGEST_BLOCK = 32
_PLAIN = {"row": 64, "block": 8}
"""Ranks in a row and in a block where no mesh says more."""


class Grid(msgspec.Struct, frozen=True):
    title: str
    lines: tuple[str, ...]
    legend: tuple[tuple[str, Cluster], ...]
    """Letters and who they stand for: the largest cluster first."""


def draw(
    merged: Merged,
    mesh: Mapping[str, int] | None = None,
    *,
    kind: ProcessKind = "trainer",
    marked: Collection[int] = (),
) -> Grid:
    """The grid of one kind of process. Behind the letter of a rank in `marked` stands an asterisk."""
    found = clusters(merged.positions, kind)
    legend = tuple(
        (_LETTERS[at] if at < len(_LETTERS) else _OTHER, one) for at, one in enumerate(found)
    )  # fmt: skip
    letters: dict[int, str] = {}
    for letter, cluster in legend:
        for rank in cluster.ranks:
            letters.setdefault(rank, letter)
    ranks = sorted({*merged.nodes, *letters})
    cells = {rank: letters.get(rank, _UNSEEN) + "*" * (rank in marked) for rank in ranks}
    fits = mesh and math.prod(mesh.values()) == len(ranks) == (ranks[-1] + 1 if ranks else 0)
    rows = _meshed(cells, mesh) if mesh and fits else _plain(cells)
    title = " x ".join(mesh) if mesh and fits else "ranks"
    return Grid(f"grid {title}: one cell a rank, a letter a group", tuple(_lines(list(rows))), legend)


Row = tuple[tuple[tuple[str, int], ...], tuple[tuple[tuple[tuple[str, int], ...], str], ...]]
"""Coordinates of the row, and its blocks, each with its own coordinates."""


def _meshed(cells: Mapping[int, str], mesh: Mapping[str, int]) -> Iterator[Row]:
    names = list(mesh)
    outer, middle = names[:-2], names[-2:-1]
    width = mesh[names[-1]]
    blocks = []
    for first in range(0, len(cells), width):
        at = coordinates(mesh, first)
        text = _block([cells[rank] for rank in range(first, first + width)])
        row = tuple((name, at[name]) for name in outer)
        blocks.append((row, (tuple((name, at[name]) for name in middle), text)))
    for row, some in groupby(blocks, key=lambda one: one[0]):
        yield row, tuple(block for _, block in some)


def _plain(cells: Mapping[int, str]) -> Iterator[Row]:
    ranks = list(cells)
    for first in range(0, len(ranks), _PLAIN["row"]):
        row = ranks[first : first + _PLAIN["row"]]
        some = [row[at : at + _PLAIN["block"]] for at in range(0, len(row), _PLAIN["block"])]
        yield (("rank", row[0]),), tuple(((), _block([cells[rank] for rank in one])) for one in some)


def _block(cells: Sequence[str]) -> str:
    if len(cells) <= _LONGEST_BLOCK:
        return "".join(cells)
    runs = [(cell, len(list(some))) for cell, some in groupby(cells)]
    return " ".join(f"{cell}x{count}" if count > 1 else cell for cell, count in runs)


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """Rows that look alike and follow each other as one."""
    told = []
    for blocks, some in groupby(rows, key=lambda row: row[1]):
        labels = [row for row, _ in some]
        told.append((_label(labels[0], labels[-1]), _blocks(blocks)))
    width = max((len(label) for label, _ in told), default=0)
    for label, text in told:
        yield f"{label:<{width}}  {text}".strip()


def _blocks(blocks: Sequence[tuple[tuple[tuple[str, int], ...], str]]) -> str:
    parts = []
    for text, some in groupby(blocks, key=lambda one: one[1]):
        labels = [label for label, _ in some]
        if any(labels):
            parts.append(f"{_label(labels[0], labels[-1])}  {text}")
        else:
            parts.append(f"{text} x{len(labels)}" if len(labels) > 1 else text)
    return "   ".join(parts)


def _label(first: Sequence[tuple[str, int]], last: Sequence[tuple[str, int]]) -> str:
    """pp=0; pp=1-9; from pp=0 ep=0 to pp=3 ep=7 where several change."""
    differ = [name for (name, at), (_, to) in zip(first, last, strict=True) if at != to]
    if len(differ) <= 1:
        return " ".join(
            f"{name}={at}" if at == to else f"{name}={at}-{to}"
            for (name, at), (_, to) in zip(first, last, strict=True)
        )  # fmt: skip
    return " to ".join(" ".join(f"{name}={at}" for name, at in one) for one in (first, last))
