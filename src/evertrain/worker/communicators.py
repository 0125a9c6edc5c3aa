"""Which process group is this operation on, and who are its members? Learnt once a group."""

from __future__ import annotations

from typing import Any

from evertrain.trace import layout
from evertrain.worker import contact, groups, page
from evertrain.worker.operations import Communicator, Kind, Trace
from evertrain.worker.session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from evertrain.worker.operations import Operation

known: dict[str, Communicator] = {}
"""By torch's names."""
_by_id: dict[int, Communicator] = {}


def meet(group: Any, current: Session) -> Communicator:
    """A group that has an operation for the first time, or again after names have begun anew."""
    name: str = group.group_name
    if current.trace_path and current.trace is None:
        _open_trace(current)
    groups.note(current.page_path, current.attempt)
    ranks = groups.members(group)
    identity = layout.communicator_id(current.attempt, name, ranks)
    communicator = _by_id.get(identity)
    if communicator is None:
        communicator = _by_id[identity] = Communicator(name, identity, ranks, group.rank())
    known[name] = communicator
    return communicator


def _open_trace(current: Session) -> None:
    try:
        current.trace = Trace(current.trace_path)
    except (OSError, ValueError) as error:
        current.trace_path = ""
        contact.explain(current, f"trace: {error}")


def forget() -> None:
    """All groups are gone, and names begin from 0 again. The same members under the same name go on counting."""
    known.clear()


def kind(
    communicator: Communicator, key: tuple[str, int | None, bool], device: int, *, arrow: str, rank: int,
    is_point_to_point: bool, is_quiet_on_cpu: bool,
) -> Kind:  # fmt: skip
    """What is the same for all operations of one operator with one peer."""
    found = communicator.kinds.get(key)
    if found is not None:
        return found
    name, position, is_cpu = key
    peer = layout.ANYBODY if is_point_to_point else layout.NOBODY
    op = name
    if position is not None:
        op = f"{name} {communicator.own}{arrow}{position}"
        ranks = communicator.ranks
        peer = ranks[position] if position < len(ranks) else position
    made = communicator.kinds[key] = Kind(
        communicator, name, page.text(op, 32), peer, rank=rank, device=device, is_cpu=is_cpu,
        is_quiet=is_cpu and is_quiet_on_cpu, is_point_to_point=is_point_to_point,
    )  # fmt: skip
    return made


def received(operation: Operation, source: int, rank: int) -> Operation:
    """One that waited for whoever sends first: it turns out to be the next from that sender."""
    asked, shown, _, *others = operation

    def of(name: str) -> Kind:
        return kind(
            asked.communicator, (name, source, asked.is_cpu), -1, arrow="<-", rank=rank, is_point_to_point=True,
            is_quiet_on_cpu=asked.is_quiet,
        )  # fmt: skip

    counted = of("recv")
    counted.count += 1
    order, size, t_posted, t_wait, place, work = others
    return of("recv_any_source"), shown, counted.count, order, size, t_posted, t_wait, place, work
