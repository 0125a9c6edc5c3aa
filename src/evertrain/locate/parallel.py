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
_OF_DATA = ("dp", "data", "ddp", "fsdp", "hsdp", "replicate", "shard", "batch")
"""Beginnings of names of dimensions along which replicas of the model lie."""


class Shared(msgspec.Struct, frozen=True):
    ranks: tuple[int, ...] = ()
    name: str = ""


def coordinates(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Where a rank is in the mesh."""
    found: dict[str, int] = {}
    for name, size in reversed(list(mesh.items())):
        rank, found[name] = divmod(rank, size)
    return {name: found[name] for name in mesh}


def sizes(mesh: str) -> dict[str, int]:
    """`pp=4,dp=2` by dimension, outermost first; nothing where it is no mesh."""
    found: dict[str, int] = {}
    for part in filter(None, (one.strip() for one in mesh.split(","))):
        name, _, size = part.partition("=")
        if not size.isdecimal() or not int(size):
            return {}
        found[name] = int(size)
    return found


def ranks_of_replica(mesh: Mapping[str, int]) -> int:
    """So many ranks hold one model: all dimensions but those of the data."""
    return math.prod(size for name, size in mesh.items() if not is_of_data(name))


def is_of_data(dim: str) -> bool:
    """Whether replicas of the model, or shards of one, lie along this dimension."""
    return dim.lower().startswith(_OF_DATA)


def learnt(groups: Iterable[Group], rank: int, world_size: int) -> str:
    """The mesh that a rank's process groups are of, as `pp=2,dp=2`; empty: they are of none, or not of one only.

    Groups of a device mesh carry the name of their dimension. A job that makes no groups at all has replicas only.
    """
    dims: dict[str, tuple[int, int]] = {}
    others = False
    for group in groups:
        members = tuple(sorted(group.members))
        if rank not in members or len(members) == 1:
            continue
        _, is_of_mesh, name = group.description.rpartition("mesh_")
        if is_of_mesh and name:
            stride = members[1] - members[0]
            others = others or members != tuple(range(members[0], members[-1] + 1, stride))
            dims[name] = stride, len(members)
        else:
            others = others or len(members) < world_size
    if not dims:
        return "" if others else f"dp={world_size}"
    stride = 1
    named: list[str] = []
    for name, (apart, size) in sorted(dims.items(), key=lambda one: one[1]):
        if apart != stride:
            return ""  # dimensions that were joined, or not all of them
        stride *= size
        named.insert(0, f"{name}={size}")
    return ",".join(named) if stride == world_size and not others else ""


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
