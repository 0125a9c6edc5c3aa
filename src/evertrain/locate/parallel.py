"""Which parallel group do the odd ranks share, and how many nodes may that cost?

Groups follow from the mesh (dimensions outermost first, row-major), or from the process groups that the job created.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import msgspec

from evertrain.model.recording import Group

_TIES = ("tp", "pp", "ep", "dp")
"""Of groups of one size the first kind is preferred; others come after these."""
_MOST_NODES = 8
_MOST_SHARE = 0.1


class Shared(msgspec.Struct, frozen=True):
    ranks: tuple[int, ...] = ()
    name: str = ""


def coordinates(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Where a rank is in the mesh."""
    found: dict[str, int] = {}
    for name, size in reversed(list(mesh.items())):
        rank, found[name] = divmod(rank, size)
    return {name: found[name] for name in mesh}


def line(mesh: Mapping[str, int], rank: int, dim: str) -> tuple[int, ...]:
    """The group of a rank along one dimension."""
    stride = math.prod(list(mesh.values())[list(mesh).index(dim) + 1 :])
    first = rank - coordinates(mesh, rank)[dim] * stride
    return tuple(first + at * stride for at in range(mesh[dim]))


def shared(
    odd: Collection[int], world_size: int, mesh: Mapping[str, int] | None, groups: Mapping[str, Group]
) -> Shared:
    """The fewest ranks in groups of one kind that hold all odd ones; nothing if that would be the whole job."""
    if not odd:
        return Shared()
    kinds: dict[str, set[tuple[int, ...]]] = {}
    if mesh and math.prod(mesh.values()) == world_size:
        for dim, size in mesh.items():
            if 1 < size < world_size:
                kinds[dim] = {line(mesh, rank, dim) for rank in odd}
    else:
        for group in groups.values():
            if 1 < len(group.members) < world_size and not set(odd).isdisjoint(group.members):
                kinds.setdefault(_kind(group), set()).add(group.members)
    best: tuple[tuple[int, int, int], Shared] | None = None
    for name, lines in kinds.items():
        ranks = tuple(sorted({rank for one in lines for rank in one}))
        if len(ranks) < world_size and set(odd) <= set(ranks):
            cost = (len(ranks), len(lines), _tie(name))
            if best is None or cost < best[0]:
                best = cost, Shared(ranks, name)
    return best[1] if best else Shared()


def bounded(nodes: Iterable[str], all_nodes: Collection[str]) -> tuple[str, ...]:
    """The nodes, if there are few enough of them to take out at once; otherwise none."""
    found = tuple(dict.fromkeys(nodes))
    limit = max(_MOST_NODES, int(len(all_nodes) * _MOST_SHARE))
    return found if len(found) <= limit and (len(found) < len(all_nodes) or len(all_nodes) == 1) else ()


def _kind(group: Group) -> str:
    # descriptions of device meshes end with the dimension's name
    return group.description.rpartition("mesh_")[2] or f"group of {len(group.members)}"


def _tie(name: str) -> int:
    return next((at for at, prefix in enumerate(_TIES) if name.startswith(prefix)), len(_TIES))
