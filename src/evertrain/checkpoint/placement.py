"""Who holds the backup of whose checkpoint shard?

A rank loses its copy with its node, and a verdict may take more than one node: over-eviction removes every node that
hosts a member of a parallel group. So a backup lies on a node that no eviction of one of its owner's groups removes
together with the owner. Where there is no such node, expert groups are disregarded first; then the backup lies where
the fewest groups take both, but always on another node; with one group only that is the next node.

    pp=4,dp=2,tp=2, one or two ranks a node: {0,1} ↔ {10,11}, {2,3} ↔ {8,9}, {4,5} ↔ {14,15}, {6,7} ↔ {12,13}

No node holds more than its even share of all backups and one shard, unless a shard had no other node at all.
Everything depends on ranks, not on names of nodes: a node that takes over another one's ranks takes over its part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Literal

import msgspec

from evertrain.checkpoint.assignment import Cost, Piece, assign, bound_of

Group = tuple[int, ...]
Protection = Literal["outside all groups", "another node", "nowhere"]


class Shard(msgspec.Struct, frozen=True):
    """One piece of checkpoint state."""

    name: str
    owners: tuple[int, ...]
    """All ranks that hold these very bytes: replicas are copies already."""
    bytes: int


class Backup(msgspec.Struct, frozen=True, kw_only=True):
    """Where one shard's copy goes, and what that is worth."""

    shard: Shard
    holder: str | None
    """The node that keeps the copy; None where the owners alone are as safe as it gets."""
    source: int | None
    """The owner that sends it."""
    protection: Protection
    """Where copies are in the end, counting all owners: outside every group that might be evicted with an owner; at
    least on two nodes; on one node only."""
    lost_with: tuple[Group, ...]
    """The owners' groups whose over-eviction takes every copy."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    backups: tuple[Backup, ...]
    """One for each shard, in the order of the shards."""
    bound_bytes: int
    """An even share of all backups and one shard: what a node has to have room for."""
    over_bound: tuple[str, ...]
    """Nodes that hold more than that, because some shards had no other node to go to."""

    @property
    def exposed(self) -> tuple[Backup, ...]:
        """What one over-eviction, or the loss of one node, may take for good."""
        return tuple(backup for backup in self.backups if backup.protection != "outside all groups")


def groups_of(mesh: str, *, only: str | None = None) -> tuple[Group, ...]:
    """All parallel groups of a mesh such as `pp=4,dp=2,tp=2`, or those of one dimension.

    Ranks count row-major, the last dimension fastest. Groups of one member are left out.
    """
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in mesh.split(","))}
    world = stride = prod(sizes.values())
    groups: list[Group] = []
    for name, size in sizes.items():
        span, stride = stride, stride // size
        if size > 1 and only in (None, name):
            starts = (start for block in range(0, world, span) for start in range(block, block + stride))
            groups += (tuple(range(start, start + span, stride)) for start in starts)
    return tuple(groups)


def plan(
    shards: Iterable[Shard],
    node_of: Mapping[int, str],
    groups: Iterable[Group],
    expert_groups: Iterable[Group] = (),
) -> Plan:
    """Say for every shard which node keeps its backup.

    `groups` are the parallel groups of the job, by its mesh or as it created them; torch's default group of all ranks
    belongs to them only if there is no other. Those that are `expert_groups` too are the first to be disregarded.
    """
    shards = tuple(shards)
    world = _World(node_of, groups, expert_groups)
    risks: dict[Group, _Risk] = {}
    for shard in shards:
        if shard.owners not in risks:
            risks[shard.owners] = _Risk(world, shard.owners)

    # by what does not depend on the order in which shards were given
    order = sorted(
        (index for index, shard in enumerate(shards) if risks[shard.owners].tiers),
        key=lambda index: (-shards[index].bytes, shards[index].owners, shards[index].name),
    )
    sources = _sources([shards[index] for index in order])
    pieces = [
        world.piece(shards[index], risks[shards[index].owners], source)
        for index, source in zip(order, sources, strict=True)
    ]
    nodes = assign(pieces, len(world.nodes))
    sent = {index: (source, node) for index, source, node in zip(order, sources, nodes, strict=True)}

    backups = []
    held = [0] * len(world.nodes)
    for index, shard in enumerate(shards):
        source, node = sent.get(index, (None, None))
        if node is not None:
            held[node] += shard.bytes
        backups.append(risks[shard.owners].backup(world, shard, source, node))
    bound = bound_of(pieces, len(world.nodes))
    over_bound = tuple(name for name, load in zip(world.nodes, held, strict=True) if load > bound)
    return Plan(backups=tuple(backups), bound_bytes=bound, over_bound=over_bound)


class _World:
    """Nodes by number, in the order of their lowest ranks, and the set of nodes that each group's eviction removes."""

    def __init__(self, node_of: Mapping[int, str], groups: Iterable[Group], expert_groups: Iterable[Group]) -> None:
        ranks = sorted(node_of)
        numbers: dict[str, int] = {}
        for rank in ranks:
            numbers.setdefault(node_of[rank], len(numbers))
        self.nodes = tuple(numbers)
        self.node_of = {rank: numbers[node_of[rank]] for rank in ranks}
        self.all_nodes = (1 << len(numbers)) - 1

        experts = {tuple(sorted(group)) for group in expert_groups}
        found = {tuple(sorted(group)) for group in groups} | experts
        self.groups = tuple(sorted(group for group in found if len(group) > 1))
        self.is_expert = [group in experts for group in self.groups]
        self.removed = [self.nodes_of(group) for group in self.groups]
        self.groups_with: dict[int, list[int]] = {rank: [] for rank in ranks}
        self._removed_with = [0] * len(numbers)
        for number, (group, removed) in enumerate(zip(self.groups, self.removed, strict=True)):
            for rank in group:
                self.groups_with[rank].append(number)
                if removed != self.all_nodes:
                    self._removed_with[self.node_of[rank]] |= removed
        self._sizes = _mesh_sizes(self.groups, ranks)

    def nodes_of(self, ranks: Iterable[int]) -> int:
        nodes = 0
        for node in {self.node_of[rank] for rank in ranks}:
            nodes |= 1 << node
        return nodes

    def piece(self, shard: Shard, risk: _Risk, source: int) -> Piece:
        node = self.node_of[source]
        return Piece(
            bytes=shard.bytes,
            tiers=risk.tiers,
            start=(node + 1) % len(self.nodes),
            first=self.node_of[_peer(source, self._sizes)] if len(self._sizes) > 1 else None,
            # groups of other ranks on the owner's node are not the owner's, but their eviction takes it too
            shunned=self._removed_with[node],
            needed=risk.is_on_one_node,
        )


class _Risk:
    """What the owners of a shard may lose together, and which nodes a backup would be safe on."""

    def __init__(self, world: _World, owners: Group) -> None:
        self.own_nodes = world.nodes_of(owners)
        self.is_on_one_node = self.own_nodes.bit_count() == 1
        around = sorted({group for owner in owners for group in world.groups_with[owner]})
        self.deadly = tuple(group for group in around if not self.own_nodes & ~world.removed[group])
        """Groups whose over-eviction takes all owners."""
        worst: Cost = (0, 0)
        nodes = {worst: world.all_nodes & ~self.own_nodes}
        for group in self.deadly:
            removed = world.removed[group]
            more = (0, 1) if world.is_expert[group] else (1, 0)
            worst = _add(worst, more)
            split: dict[Cost, int] = {}
            for cost, members in nodes.items():
                split[cost] = split.get(cost, 0) | members & ~removed
                dearer = _add(cost, more)
                split[dearer] = split.get(dearer, 0) | members & removed
            nodes = {cost: members for cost, members in split.items() if members}
        self.tiers = tuple(
            (cost, nodes[cost]) for cost in sorted(nodes) if nodes[cost] and (self.is_on_one_node or cost < worst)
        )

    def backup(self, world: _World, shard: Shard, source: int | None, node: int | None) -> Backup:
        copy = 0 if node is None else 1 << node
        lost_with = tuple(world.groups[group] for group in self.deadly if not copy & ~world.removed[group])
        protection: Protection = "another node" if lost_with else "outside all groups"
        if self.is_on_one_node and not copy:
            protection = "nowhere"
        return Backup(
            shard=shard,
            holder=None if node is None else world.nodes[node],
            source=None if node is None else source,
            protection=protection,
            lost_with=lost_with,
        )


def _sources(shards: Sequence[Shard]) -> list[int]:
    """Which owner sends each shard: owners share the work."""
    sending: dict[int, int] = {}
    sources = []
    for shard in shards:
        source = min(shard.owners, key=lambda owner: (sending.get(owner, 0), owner))
        sending[source] = sending.get(source, 0) + shard.bytes
        sources.append(source)
    return sources


def _add(one: Cost, other: Cost) -> Cost:
    return one[0] + other[0], one[1] + other[1]


def _mesh_sizes(groups: Iterable[Group], ranks: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of the row-major mesh that these groups come from, outermost first; empty if from none."""
    size_of_stride: dict[int, int] = {}
    for group in groups:
        stride = group[1]
        if group == tuple(range(0, stride * len(group), stride)):
            # where groups over several dimensions exist too, the smaller one is the dimension
            size_of_stride[stride] = min(len(group), size_of_stride.get(stride, len(group)))
    sizes: list[int] = []
    stride = 1
    while stride in size_of_stride:
        sizes.insert(0, size_of_stride[stride])
        stride *= sizes[0]
    return tuple(sizes) if list(ranks) == list(range(stride)) else ()


def _peer(rank: int, sizes: tuple[int, ...]) -> int:
    """A rank that differs in the two outermost dimensions: half of one away in one of them, the next in the other.

    Ranks are exchanged in pairs, for as long as one of the two dimensions is even.
    """
    outer, middle = sizes[:2]
    inner = prod(sizes[2:])
    at, rest = divmod(rank, middle * inner)
    beside, place = divmod(rest, inner)
    if outer % 2 == 0:
        ahead = 1 if at < outer // 2 else -1
        at, beside = at + ahead * (outer // 2), beside + ahead
    elif middle % 2 == 0:
        ahead = 1 if beside < middle // 2 else -1
        at, beside = at + ahead, beside + ahead * (middle // 2)
    else:
        at, beside = at + 1, beside + 1
    return (at % outer * middle + beside % middle) * inner + place
