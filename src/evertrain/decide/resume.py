"""From which step does the next attempt go on?

The newest step of which *every* rank has a complete copy in a valid place. A copy is void when a later attempt went
back behind it: two runs of one step need not have the same bits, so mixing them would join two trajectories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.model.report import Copy

Tier = Literal["memory", "disk", "store"]


class Resume(msgspec.Struct, frozen=True):
    """A step, and where each rank finds its copy."""

    step: int
    tiers: dict[int, Tier]


def choose(
    copies: Mapping[str, Iterable[Copy]],
    placement: dict[int, str],
    lineage: tuple[tuple[int, int], ...] = (),
    first_attempt: int = 1,
    at_most: int | None = None,
) -> Resume | None:
    """Pick the newest step that all ranks of `placement` can restore on their own node; None: there is none.

    Not a later one than `at_most`, if that is given.
    """
    found = common(copies, placement, lineage, first_attempt)
    return max((one for one in found if at_most is None or one.step <= at_most), key=lambda one: one.step, default=None)


def common(
    copies: Mapping[str, Iterable[Copy]],
    placement: dict[int, str],
    lineage: tuple[tuple[int, int], ...] = (),
    first_attempt: int = 1,
) -> list[Resume]:
    """Every step that all ranks can restore, oldest first; of two runs of one step the later one.

    `copies` are by node, `lineage` is (attempt, step it resumed from) of all attempts so far; memory is preferred.
    Copies saved by another number of ranks are set aside: their shards do not fit.
    """
    complete: dict[tuple[int, int], dict[int, Tier]] = defaultdict(dict)
    for node, of_node in copies.items():
        for copy in of_node:
            if placement.get(copy.rank) != node or copy.world_size != len(placement):
                continue
            tiers = complete[copy.step, copy.attempt]
            if is_valid(copy, lineage, first_attempt) and tiers.get(copy.rank) != "memory":
                tiers[copy.rank] = copy.tier
    whole = {step: tiers for (step, _), tiers in sorted(complete.items()) if len(tiers) == len(placement)}
    return [Resume(step, tiers) for step, tiers in whole.items()]


def is_valid(copy: Copy, lineage: tuple[tuple[int, int], ...], first_attempt: int) -> bool:
    """Whether the copy lies on the trajectory that the job is on now."""
    return copy.attempt >= first_attempt and is_valid_save((copy.attempt, copy.step), lineage)


def is_valid_save(save: tuple[int, int], lineage: tuple[tuple[int, int], ...]) -> bool:
    """Whether no later attempt has gone back behind this attempt's step."""
    return all(save[1] <= resumed for attempt, resumed in lineage if attempt > save[0])


def newest_common(state: JobState, picture: Picture, at_most: int | None = None) -> Resume | None:
    """The newest step that all ranks hold by the newest lists of their nodes."""
    last = state.attempt.number if state.attempt is not None else 0
    # a list that was read while ranks ran may name copies that are gone
    copies = {
        node: seen.report.copies for node, seen in picture.nodes.items() if seen.report.copies_after_attempt >= last
    }
    return choose(copies, state.placement(), state.lineage, state.first_attempt, at_most)


def all_read(state: JobState, picture: Picture) -> bool:
    """Whether every node has looked at its checkpoints after the last rank of the last attempt was gone."""
    last = state.attempt.number if state.attempt is not None else 0
    reports = [picture.report(node) for node in state.active_nodes()]
    return all(report is not None and report.copies_after_attempt >= last for report in reports)
