"""Which process groups is this rank a member of? Told beside its page, as they come to be.

    {"name": "0", "desc": "default_pg", "ranks": [0, 1, 2, 3]}      one line each; ranks by their positions in the group

A name that comes again has another meaning from there on.

Whoever looks for the culprit of a hang finds the members of an operation's group here, also those that never came.
"""

from __future__ import annotations

from evertrain.worker import contact

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_noted: set[str] = set()


def note(page_path: str, anew: bool = False) -> None:
    """Write down the groups that are new, or all of them. Nothing that goes wrong here hurts the job."""
    try:
        if anew:  # names begin from 0 again when the script has destroyed all groups
            _noted.clear()
        lines = _new()
        if lines:
            contact.append(contact.groups_path(page_path), "".join(lines))
    except Exception:  # a full memory, another torch: hangs are explained less well
        pass


def _new() -> list[str]:
    import json

    from torch.distributed import distributed_c10d

    world: Any = distributed_c10d._world
    lines: list[str] = []
    # the newest come last: a thousand groups are not gone through a thousand times
    for group, name in reversed(list(world.pg_names.items())):
        ranks = world.pg_group_ranks.get(group)
        if name in _noted:
            break
        if ranks is not None:  # else it is still being made
            _noted.add(name)
            by_position = sorted(ranks, key=ranks.__getitem__)
            said = {"name": name, "desc": getattr(group, "group_desc", "") or "", "ranks": by_position}
            lines.append(json.dumps(said, separators=(",", ":")) + "\n")
    return lines[::-1]
