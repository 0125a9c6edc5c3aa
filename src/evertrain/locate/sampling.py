"""Which few ranks show whether a job's collectives go well? One of each data-parallel group; ten at most, in turns.

What is wrong with one rank's communication reaches the ranks of its groups within a fraction of a second, and theirs.
So few ranks see that something is wrong, and none of them has to be the one it is wrong with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import lru_cache

from evertrain.locate import parallel

MOST = 10
TURN_S = 10.0
"""So long the same ranks are watched where there are more groups than that."""


def sample(world_size: int, mesh: Mapping[str, int] | None, turn: int, alive: Collection[int]) -> tuple[int, ...]:
    """The ranks to watch in this turn."""
    groups = _groups(world_size, tuple((mesh or {}).items()))
    if len(groups) > MOST:
        first = turn * MOST % len(groups)
        round_number = turn * MOST // len(groups)
        groups = tuple(groups[(first + at) % len(groups)] for at in range(MOST))
    else:
        round_number = 0  # always the same: their past is known
    there = frozenset(alive)
    chosen = []
    for group in groups:
        ranks = [rank for rank in group if rank in there]
        if ranks:
            chosen.append(ranks[round_number % len(ranks)])
    return tuple(sorted(chosen))


@lru_cache(maxsize=4)
def _groups(world_size: int, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ in the data only; of a job that has not said how it is divided, equal parts. Remembered: with
    ten thousand ranks it takes as long as everything else that is looked at in that moment."""
    sizes = dict(mesh)
    others = [name for name in sizes if not parallel.is_of_data(name)]
    if len(others) == len(sizes) or math.prod(sizes.values()) != world_size:
        parts = min(MOST, world_size)
        return tuple(tuple(range(world_size * at // parts, world_size * (at + 1) // parts)) for at in range(parts))
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        place = parallel.coordinates(sizes, rank)
        found.setdefault(tuple(place[name] for name in others), []).append(rank)
    return tuple(map(tuple, found.values()))
