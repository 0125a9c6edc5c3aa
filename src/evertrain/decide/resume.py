"""From which step does the next attempt go on?

The newest step of which *every* rank has a complete copy in a valid place. A copy is void when a later attempt went
back behind it: two runs of one step need not have the same bits, so mixing them would join two trajectories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from evertrain.model.report import Copy

Tier = Literal["memory", "disk"]


class Resume(msgspec.Struct, frozen=True):
    """A step, and where each rank finds its copy."""

    step: int
    tiers: dict[int, Tier]


def choose(
    copies: Mapping[str, Iterable[Copy]],
    placement: dict[int, str],
    lineage: tuple[tuple[int, int], ...],
    first_attempt: int,
) -> Resume | None:
    """Pick the newest step that all ranks of `placement` can restore on their own node; None: there is none.

    `copies` are by node, `lineage` is (attempt, step it resumed from) of all attempts so far; memory is preferred.
    """
    tiers_by_step: dict[int, dict[int, Tier]] = defaultdict(dict)
    for node, of_node in copies.items():
        for copy in of_node:
            if placement.get(copy.rank) != node or not is_valid(copy, lineage, first_attempt):
                continue
            if tiers_by_step[copy.step].get(copy.rank) != "memory":
                tiers_by_step[copy.step][copy.rank] = copy.tier
    complete = [step for step, tiers in tiers_by_step.items() if len(tiers) == len(placement)]
    return Resume(max(complete), tiers_by_step[max(complete)]) if complete else None


def is_valid(copy: Copy, lineage: tuple[tuple[int, int], ...], first_attempt: int) -> bool:
    """Whether the copy lies on the trajectory that the job is on now."""
    return copy.attempt >= first_attempt and all(
        copy.step <= resumed for attempt, resumed in lineage if attempt > copy.attempt
    )
