"""How are numbers of things, and ranks, said?"""

from __future__ import annotations

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def ranks(numbers: Iterable[int]) -> str:
    """`0-3, 8`."""
    spans: list[list[int]] = []
    for rank in sorted(numbers):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
