"""Who stands out? A rank with a problem of its own is far above the next; where it goes down from rank to rank, they
wait for a processor, or for each other."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

TIMES = 2.0


def apart(values: Mapping[int, float]) -> tuple[int, ...]:
    """The fewest ranks that each have `TIMES` as much as any other rank, most first; all, if there is no such gap."""
    ordered = sorted(values, key=values.__getitem__, reverse=True)
    for count, (one, following) in enumerate(pairwise(ordered), 1):
        if values[one] >= TIMES * max(values[following], 0.0):
            return tuple(ordered[:count])
    return tuple(ordered)
