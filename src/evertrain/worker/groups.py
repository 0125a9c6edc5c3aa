"""Which process groups is this rank a member of? Told beside its page, as they come to be.

    {"name": "0", "desc": "default_pg", "ranks": [0, 1, 2, 3], "id": "8c1f…", "sockets": [48213, 48215]}

One line each: ranks by their positions in the group; its id in trace records, in hex; inodes of the sockets that were
opened while it was made, where that is known.

A name that comes again has another meaning from there on.

Whoever looks for the culprit of a hang finds the members of an operation's group here, also those that never came.
"""

from __future__ import annotations

import os

from evertrain.trace import layout
from evertrain.worker import contact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

MOST_DESCRIPTORS = 4096
"""With more of them open, nobody looks which are new: a thousand groups would take a minute longer."""

_noted: set[str] = set()


def descriptors() -> frozenset[str] | None:
    """Open at this moment; None: not known, or too many to tell one from another."""
    try:
        found = os.listdir("/proc/self/fd")
    except OSError:
        return None
    return frozenset(found) if len(found) <= MOST_DESCRIPTORS else None


def opened_since(before: frozenset[str] | None) -> list[int]:
    """Inodes of the sockets that were not open then."""
    from stat import S_ISSOCK

    now = None if before is None else descriptors()
    found = []
    for descriptor in sorted(map(int, now - before)) if before is not None and now is not None else ():
        try:
            status = os.fstat(descriptor)
        except OSError:
            continue  # the one of the listing itself
        if S_ISSOCK(status.st_mode):
            found.append(status.st_ino)
    return found


def note(page_path: str, attempt: int, anew: bool = False, before: frozenset[str] | None = None) -> None:
    """Write down the groups that are new, or all of them. Nothing that goes wrong here hurts the job.

    `before`: descriptors that were open before the newest was made.
    """
    try:
        if anew:  # names begin from 0 again when the script has destroyed all groups
            _noted.clear()
        new = _new(attempt)
        if len(new) == 1 and (sockets := opened_since(before)):
            new[0]["sockets"] = sockets
        _append(page_path, new)
    except Exception:  # a full memory, another torch: hangs are explained less well
        pass


def members(group: Any) -> tuple[int, ...]:
    """Global ranks by their positions; empty where torch does not say."""
    from torch.distributed import distributed_c10d

    ranks = distributed_c10d._world.pg_group_ranks.get(group)
    return () if ranks is None else tuple(sorted(ranks, key=ranks.__getitem__))


def _new(attempt: int) -> list[dict[str, Any]]:
    from torch.distributed import distributed_c10d

    world: Any = distributed_c10d._world
    found: list[dict[str, Any]] = []
    # the newest come last: a thousand groups are not gone through a thousand times
    for group, name in reversed(list(world.pg_names.items())):
        if name in _noted:
            break
        if world.pg_group_ranks.get(group) is not None:  # else it is still being made
            _noted.add(name)
            found.append(_said(group, name, attempt))
    return found[::-1]


def _said(group: Any, name: str, attempt: int) -> dict[str, Any]:
    ranks = members(group)
    identity = layout.communicator_id(attempt, name, ranks)
    return {"name": name, "desc": getattr(group, "group_desc", "") or "", "ranks": ranks, "id": f"{identity:016x}"}


def _append(page_path: str, new: list[dict[str, Any]]) -> None:
    import json

    if new:
        text = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in new)
        contact.append(contact.groups_path(page_path), text)
