"""Which few ranks show whether a job's collectives go well? One of each data-parallel group; ten at most, in turns.

What is wrong with one rank's communication reaches the ranks of its groups within a fraction of a second, and theirs.
So few ranks see that something is wrong, and none of them has to be the one it is wrong with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

MOST = 10
TURN_S = 10.0
"""So long the same ranks are watched where there are more groups than that."""
_DATA = ("dp", "ddp", "fsdp", "hsdp", "data", "replicate", "shard")


def sample(world_size: int, mesh: Mapping[str, int] | None, turn: int, alive: Collection[int]) -> tuple[int, ...]:
    """The ranks to watch in this turn."""
    groups = _groups(world_size, mesh)
    if len(groups) > MOST:
        first = turn * MOST % len(groups)
        round_number = turn * MOST // len(groups)
        groups = [groups[(first + at) % len(groups)] for at in range(MOST)]
    else:
        round_number = 0  # always the same: their past is known
    chosen = []
    for group in groups:
        ranks = [rank for rank in group if rank in alive]
        if ranks:
            chosen.append(ranks[round_number % len(ranks)])
    return tuple(sorted(chosen))


def _groups(world_size: int, mesh: Mapping[str, int] | None) -> list[list[int]]:
    """Ranks that differ in the data only; of a job that has not said how it is divided, equal parts."""
    sizes = dict(mesh or {})
    data = [name for name in sizes if name.startswith(_DATA) or name.endswith("_dp")]
    if not data or math.prod(sizes.values()) != world_size:
        parts = min(MOST, world_size)
        return [list(range(world_size * at // parts, world_size * (at + 1) // parts)) for at in range(parts)]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        rest, place = rank, []
        for name, size in reversed(sizes.items()):
            rest, at = divmod(rest, size)
            if name not in data:
                place.append(at)
        found.setdefault(tuple(place), []).append(rank)
    return list(found.values())
