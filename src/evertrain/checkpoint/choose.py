"""From which step does training go on? The newest one of which every rank has a whole copy.

Pure. Copies of one step count together only if one attempt saved them all: after a restart from an older step, the
same step number may exist twice, from two different pasts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from evertrain.checkpoint.slots import SlotInfo


class Choice(msgspec.Struct, frozen=True):
    """A step that all ranks can go on from, and the tier each one should read."""

    step: int
    attempt: int
    """The one that saved it."""
    tiers: dict[int, Literal["memory", "disk"]]


def newest_common(copies: Iterable[SlotInfo], world_size: int) -> Choice | None:
    """The newest step complete on ranks 0 to `world_size` - 1, or None. Memory is preferred to disk.

    Copies saved by another number of ranks are set aside: their shards do not fit.
    """
    tiers: dict[tuple[int, int], dict[int, Literal["memory", "disk"]]] = {}
    for copy in copies:
        if copy.world_size == world_size and 0 <= copy.rank < world_size:
            ranks = tiers.setdefault((copy.step, copy.attempt), {})
            if ranks.get(copy.rank) != "memory":
                ranks[copy.rank] = copy.tier
    common = [key for key, ranks in tiers.items() if len(ranks) == world_size]
    if not common:
        return None
    step, attempt = max(common)
    return Choice(step, attempt, tiers[step, attempt])
