"""What is each rank of a job doing? Its stack, its page and the kernel's word for it, taken together.

frozen     cannot go on, whatever it was doing: stopped, asleep in the kernel, ended, or its interpreter is held
waiting    inside an operation, by its stack: a victim until the opposite is shown
perhaps    its page says that it is inside an operation, its stack does not contradict: C++ waits without a frame
outside    anywhere else
unseen     nothing is known of it: it neither accuses nor is accused
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from evertrain.locate.grouping import Merged, moved, wait_class
from evertrain.model.activity import Operation, RankActivity
from evertrain.model.stacks import Position

Stands = Literal["frozen", "waiting", "perhaps", "outside", "unseen"]
Frozen = Literal["stopped", "uninterruptible", "ended", "held"]

_BUSY_CORES = 0.3
_MOMENT_S, _MOMENT_STEPS = 0.4, 0.45
"""Whose page has changed within so long, or so much of a step, does not hang: sooner nobody suspects it, however tight
the limits are."""
TORCH = re.compile(r"(^|/)(torch|evertrain/worker)/")
_SLEEPS = ("sleep", "pipe", "child", "storage")
"""Nobody waits for a collective in such a way."""


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    node: str
    stands: Stands
    frozen: Frozen | None = None
    position: Position | None = None
    """Of the rank itself."""
    below: tuple[Position, ...] = ()
    """Of the processes below it."""
    activity: RankActivity | None = None
    stood: bool | None = None
    """It was seen in the same place before; None if there was no look before."""
    is_idle: bool = False
    """Its processes do nothing."""

    @property
    def inside(self) -> Operation | None:
        return self.activity.inside if self.activity is not None else None

    @property
    def who(self) -> str:
        return f"rank {self.rank} on {self.node}" if self.node else f"rank {self.rank}"

    @property
    def is_busy(self) -> bool:
        """It computes."""
        if self.is_idle:
            return False
        if self.activity is not None and (self.activity.cpu_fraction or 0.0) >= _BUSY_CORES:
            return True
        # on a loaded machine who computes gets little, but never sleeps
        return self.position is not None and not self.position.is_idle


def standings(now: Merged, earlier: Merged | None, idle: frozenset[int]) -> dict[int, Standing]:
    """By rank; what lasts only from one look to the next is no state."""
    own, below = _positions(now)
    before = _positions(earlier)[0] if earlier is not None else {}
    went = {rank for rank, _ in moved(earlier, now, "trainer")} if earlier is not None else set()
    found: dict[int, Standing] = {}
    blind = [rank for rank, one in own.items() if one.place == "unreadable" and not one.state]
    few_are_blind = len(blind) * 4 <= len(own)
    members = {rank for group in now.groups.values() for rank in group.members}
    for rank in sorted({*now.nodes, *own, *now.activities, *members}):
        position, activity = own.get(rank), now.activities.get(rank)
        earlier_one = before.get(rank) if earlier is not None else position
        frozen = _frozen(position, activity, earlier_one, few_are_blind=few_are_blind)
        found[rank] = Standing(
            rank=rank,
            node=now.nodes.get(rank, activity.node if activity is not None else ""),
            stands="frozen" if frozen else _stands(position, activity),
            frozen=frozen,
            position=position,
            below=tuple(below.get(rank, ())),
            activity=activity,
            stood=None if earlier is None or rank not in before else rank not in went,
            is_idle=rank in idle,
        )
    return found


def is_moving(now: Merged, earlier: Merged | None) -> frozenset[int]:
    """Ranks whose pages have changed from one capture to the next, or a moment ago: they do not hang."""
    before = earlier.activities if earlier is not None else {}
    slowest_s = max((one.step_s or 0.0 for one in now.activities.values()), default=0.0)
    moment_s = max(_MOMENT_S, _MOMENT_STEPS * slowest_s)
    return frozenset(
        rank
        for rank, one in now.activities.items()
        if one.still_s < moment_s or (rank in before and (one.last, one.step) != (before[rank].last, before[rank].step))
    )


def _positions(merged: Merged) -> tuple[dict[int, Position], dict[int, list[Position]]]:
    """Where each rank itself was seen most often, and what is below it."""
    own: dict[int, Position] = {}
    looks: dict[int, int] = {}
    below: dict[int, list[Position]] = {}
    for one in merged.positions:
        for member in one.members:
            if one.kind != "trainer":
                below.setdefault(member.rank, []).append(one)
            elif member.looks > looks.get(member.rank, 0):
                looks[member.rank], own[member.rank] = member.looks, one
    return own, below


def _frozen(
    position: Position | None, activity: RankActivity | None, earlier: Position | None, *, few_are_blind: bool
) -> Frozen | None:
    if position is not None and position.state == "ended":
        return "ended"
    if (position is not None and position.state == "stopped") or (activity is not None and activity.stopped):
        return "stopped"
    if position is None:
        return None
    if position.state == "uninterruptible":
        # everybody reads a file now and then
        was = earlier is None or earlier.state == "uninterruptible"
        return "uninterruptible" if was or (activity is not None and activity.uninterruptible) else None
    if position.is_held and (position.is_idle if earlier is position else earlier is None or earlier.is_held):
        return "held"
    if position.place == "unreadable" and few_are_blind and (earlier is None or earlier.place == "unreadable"):
        return "held"  # it lives, and nobody gets in; if it were a matter of privileges, it would be so for all
    return None


def _stands(position: Position | None, activity: RankActivity | None) -> Stands:
    inside = activity.inside if activity is not None else None
    if position is None or position.place == "unreadable":
        if activity is None:
            return "unseen"
        return "perhaps" if inside is not None else "outside"
    match position.place:
        case "collective" | "transfer" | "rendezvous":
            return "waiting"
        case "device" | "lock" | "elsewhere" if inside is not None:
            if position.place == "device" or (position.frames and TORCH.search(position.frames[0].file)):
                return "perhaps"
            return "outside" if wait_class(position.waits_in) in _SLEEPS else "perhaps"
    return "outside"


def by_operation(ranks: Mapping[int, Standing]) -> dict[Operation, list[int]]:
    """Who waits in which operation."""
    found: dict[Operation, list[int]] = {}
    for rank, one in ranks.items():
        if one.stands in ("waiting", "perhaps") and one.inside is not None:
            found.setdefault(one.inside, []).append(rank)
    return found
