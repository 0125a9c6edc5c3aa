"""What keeps a rank that is in no operation? Its own stack, and the processes below it, say so."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from evertrain.locate import words
from evertrain.locate.grouping import wait_class
from evertrain.locate.standing import TORCH, Standing
from evertrain.model.findings import Category
from evertrain.model.stacks import LocatedKind, Position

RANKING: tuple[LocatedKind, ...] = (
    "uninterruptible", "held", "loader", "checkpoint", "storage", "device", "outside", "loop",
)  # fmt: skip
"""Who waits in the operating system is named before who computes."""

_SAVES = re.compile(r"checkpoint|(^|[_.])save(_|$)|(^|[_.])(write|dump)_(state|model)", re.IGNORECASE)
_WAITS = ("lock", "checkpoint", "storage")


def kind(one: Standing) -> LocatedKind:
    """The class of what a rank does outside of all operations."""
    if one.frozen in ("uninterruptible", "held"):
        return "uninterruptible" if one.frozen == "uninterruptible" else "held"
    place = one.position.place if one.position is not None else "elsewhere"
    if place in ("loader", "pinning"):
        return _of_workers(one, "loader") or "loader"
    if place == "checkpoint" or _waits_for_a_save(one):
        return _of_workers(one, "checkpoint") or "checkpoint"
    if place == "storage":
        return "storage"
    if place == "device" and one.stood is not False:
        return "device"
    return "loop" if one.is_busy else "outside"


def category(found: LocatedKind, chosen: Iterable[Standing]) -> Category | None:
    """Where the class alone does not say it."""
    if found == "uninterruptible":
        positions = [one for rank in chosen for one in (rank.position, *rank.below) if one is not None]
        asleep = [one for one in positions if one.state == "uninterruptible"]
        if any(wait_class(one.waits_in) == "storage" or one.place in ("storage", "checkpoint") for one in asleep):
            return "storage"
    return None


def line(one: Standing) -> str:
    """What a rank does, in a sentence."""
    where = words.stack(one)
    activity = one.activity
    cores = f" ({activity.cpu_fraction * 100:.0f} % of a core)" if activity and activity.cpu_fraction else ""
    match one.frozen:
        case "stopped":
            return f"{one.who} is stopped (SIGSTOP, or a debugger), {where}"
        case "uninterruptible":
            return f"{one.who} sleeps in the kernel and heeds no signal (state D){_kernel(one.position)}, {where}"
        case "ended":
            return f"{one.who} has ended"
        case "held" if one.position is not None and one.position.is_held:
            return f"{one.who}: native code keeps its interpreter (GIL), {where}"
        case "held":
            return f"{one.who} lives and gives no stack: its interpreter may be held (GIL), or it cannot be attached to"
    match kind(one):
        case "loader":
            return f"{one.who}: its data loader delivers nothing, {where}{_below(one, 'loader')}"
        case "uninterruptible":
            asleep = next(below for below in one.below if below.state == "uninterruptible")
            told = f"{one.who} waits for process {_pid(asleep, one)} below it"
            return f"{told}, which sleeps in the kernel{_kernel(asleep)} and heeds no signal, {where}"
        case "checkpoint":
            return f"{one.who} is in a save that does not end, {where}{_below(one, 'checkpoint')}"
        case "storage":
            return f"{one.who} is inside file access{_kernel(one.position)}, {where}{_below(one, 'loader')}"
        case "device":
            return f"{one.who} waits for its device, {where}"
        case "loop":
            return f"{one.who} computes outside of all operations{cores}, {where}"
    return f"{one.who} is outside of all operations and does nothing{_kernel(one.position)}, {where}"


def is_in_torch(one: Standing) -> bool:
    """Its innermost frame is torch's own: what waits below it has no frame."""
    return one.position is not None and bool(one.position.frames) and bool(TORCH.search(one.position.frames[0].file))


def is_elsewhere(one: Standing, others: Sequence[Standing]) -> bool:
    """Whether it is in other functions of the script than all the others."""
    theirs = {_script(position) for other in others if (position := other.position) is not None}
    mine = _script(one.position) if one.position is not None else ()
    return bool(mine) and bool(theirs) and () not in theirs and mine not in theirs


def _script(position: Position) -> tuple[str, ...]:
    return tuple(
        f"{one.file} {one.function}"
        for one in position.frames
        if not TORCH.search(one.file) and not one.file.startswith("<") and not one.function.startswith("<")
    )


def _waits_for_a_save(one: Standing) -> bool:
    position = one.position
    if position is None:
        return False
    waits = position.place in _WAITS or wait_class(position.waits_in) in ("child", "pipe")
    saves = any(_SAVES.search(frame.function) or _SAVES.search(frame.file) for frame in position.frames)
    return waits and (saves or (position.place != "storage" and any(below.kind == "checkpoint" for below in one.below)))


def _of_workers(one: Standing, of: str) -> LocatedKind | None:
    """What keeps the processes below that the rank waits for, if that is not their own affair."""
    workers = [below for below in one.below if below.kind == of]
    if any(below.state == "uninterruptible" for below in workers):
        return "uninterruptible"
    if of == "loader" and workers and all(_is_in_storage(below) for below in workers):
        return "storage"
    return None


def _is_in_storage(position: Position) -> bool:
    return position.place == "storage" or wait_class(position.waits_in) == "storage"


def _below(one: Standing, of: str) -> str:
    workers = [below for below in one.below if below.kind == of]
    if not workers:
        return ""
    shown = max(workers, key=lambda below: (below.state != "", not _is_waiting_for_work(below)))
    state = f" ({shown.state})" if shown.state else ""
    where = f" in {shown.frames[0]}" if shown.frames else ""
    return f"; its {'worker' if of == 'loader' else 'writer'} {_pid(shown, one)}{state}{where}"


def _is_waiting_for_work(position: Position) -> bool:
    """A loader's worker that has nothing to do waits in its queue."""
    return position.place == "lock"


def _pid(position: Position, one: Standing) -> int:
    return next(member.pid for member in position.members if member.rank == one.rank)


def _kernel(position: Position | None) -> str:
    return f" ({position.waits_in})" if position is not None and position.waits_in not in ("", "0") else ""
