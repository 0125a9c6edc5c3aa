"""Which ranks belong to a group that no dump lists?

Members are worked out from the ranks that use the group, from the positions in it that the names of transfers tell, and
from other groups of the same kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from evertrain.model.recording import Group, Recordings


def completed(found: Recordings) -> dict[str, Group]:
    """Groups with their members; those that no dump lists are worked out from the ranks that use them."""
    users: dict[str, set[int]] = defaultdict(set)
    positions: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, recording in found.ranks.items():
        for one in recording.operations:
            users[one.group].add(rank)
            if one.position is not None:
                positions[one.group][one.position] = rank
    everyone = {*found.ranks, *(rank for group in found.groups.values() for rank in group.members)}
    patterns = _patterns(found.groups.values())
    is_whole = all(one.is_whole for one in found.ranks.values())
    groups: dict[str, Group] = {}
    for name, group in found.groups.items():
        members = group.members
        if not members and (name == "0" or group.description in ("default_pg", "WORLD", "world")):
            members = tuple(sorted(everyone))
        if not members:
            guess = _by_stride(positions[name], everyone) or _by_pattern(group, users[name], positions[name], patterns)
            guess = tuple(one for one in guess if one in everyone)
            if not guess and (is_whole or len(users[name]) > 1):
                guess = tuple(sorted(users[name]))
            members = guess
        groups[name] = Group(group.name, group.description, members)
    return groups


def _patterns(groups: Iterable[Group]) -> dict[str, tuple[int, ...] | None]:
    """How far the members of a kind of group are from its first, where all listed groups of the kind agree."""
    found: dict[str, tuple[int, ...] | None] = {}
    for group in groups:
        if group.members and group.description:
            offsets = tuple(one - group.members[0] for one in group.members)
            found[group.description] = offsets if found.get(group.description, offsets) == offsets else None
    return found


def _by_stride(positions: Mapping[int, int], everyone: set[int]) -> tuple[int, ...]:
    """Members at equal distances, worked out from two whose position is known."""
    if len(positions) < 2:
        return ()
    (first, rank), *others = sorted(positions.items())
    steps = {(other - rank) / (at - first) for at, other in others}
    if len(steps) != 1 or (step := steps.pop()) < 1 or step != int(step):
        return ()
    start = rank - first * int(step)
    members = []
    while start in everyone:
        members.append(start)
        start += int(step)
    return tuple(members)


def _by_pattern(
    group: Group, users: set[int], positions: Mapping[int, int], patterns: Mapping[str, tuple[int, ...] | None]
) -> tuple[int, ...]:
    """Members as in other groups of the same kind. Descriptions may be cut short."""
    fitting = [
        offsets for kind, offsets in patterns.items() if group.description and kind.startswith(group.description)
    ]
    if len(fitting) != 1 or not (offsets := fitting[0]):
        return ()
    for at, rank in positions.items():
        if at < len(offsets):
            return tuple(rank - offsets[at] + offset for offset in offsets)
    span = [
        tuple(start + offset for offset in offsets) for start in {rank - offset for rank in users for offset in offsets}
    ]
    covering = [members for members in span if users <= set(members)]
    return covering[0] if len(covering) == 1 else ()
