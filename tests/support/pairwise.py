"""Which cells of a large matrix are worth a run each time? So few that every two values still meet somewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*factors: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cells in which each value of each factor meets each value of every other factor; greedy, always the same."""
    cells = list(product(*factors))
    missing = {pair for cell in cells for pair in _pairs(cell)}
    chosen = []
    while missing:
        best = max(cells, key=lambda cell: len(missing & _pairs(cell)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


def cells(*factors: Sequence[Any], sample: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
    """All cells as pytest parameters; those beyond the sample (pairwise by default) carry the mark `matrix`."""
    sample = pairwise(*factors) if sample is None else sample
    return [
        pytest.param(*cell, id="-".join(map(str, cell)), marks=() if cell in sample else pytest.mark.matrix)
        for cell in product(*factors)
    ]


def _pairs(cell: tuple[Any, ...]) -> set[tuple[tuple[int, Any], tuple[int, Any]]]:
    return set(combinations(enumerate(cell), 2))
