"""Who has not come to the operation that others wait in? The wait graph of ranks and operations, by pages.

    rank ──waits in──▶ operation ──waits for──▶ members that have not come ──▶ …

The ends of it explain everything else: a rank that is in no operation; an operation to which all have come, and which
does not move; or a circle. A page tells a rank's newest operation only. So a member that is in another group's
operation may have been in this one before: an edge too many, which leads on to what that member waits for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import msgspec

from evertrain.locate.grouping import Merged
from evertrain.locate.parallel import line
from evertrain.locate.standing import Standing
from evertrain.locate.waits import sinks
from evertrain.model.activity import Operation
from evertrain.model.recording import PEER

SOMETHING = Operation("", "", 0)
"""The stack says that a rank waits for others, and nothing says in what."""

_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter")
"""Operations that end on some members before all have come."""

Node = int | Operation


class Waiting(msgspec.Struct, frozen=True):
    """Who waits for whom."""

    inside: dict[Operation, tuple[int, ...]]
    """Ranks by the operation they wait in."""
    missing: dict[Operation, tuple[int, ...]]
    """Members that have not come, as far as known; of a transfer the peer."""
    ends: tuple[frozenset[Node], ...]

    def ranks_at_end(self) -> list[int]:
        """Single ranks that others wait for, and that wait for nobody."""
        return sorted(one for end in self.ends if len(end) == 1 for one in end if isinstance(one, int))

    def operations_at_end(self) -> list[Operation]:
        """Those to which everybody has come."""
        return sorted(one for end in self.ends if len(end) == 1 for one in end if isinstance(one, Operation))

    def circles(self) -> list[frozenset[Node]]:
        return [end for end in self.ends if len(end) > 1]

    def waiting_for(self, suspects: Collection[int]) -> dict[Operation, tuple[int, ...]]:
        """The operations in which others wait for these, most of them first."""
        found = {
            one: tuple(rank for rank in ranks if rank not in suspects)
            for one, ranks in self.inside.items()
            if not set(self.missing[one]).isdisjoint(suspects)
        }
        return dict(sorted(((one, who) for one, who in found.items() if who), key=lambda pair: -len(pair[1])))


def is_transfer(operation: Operation) -> bool:
    return operation.op.lstrip("_i").startswith(("send", "recv"))


def passed(operation: Operation, members: Iterable[int], ranks: Mapping[int, Standing]) -> list[int]:
    """Members that have long finished a collective in which others still are."""
    if is_transfer(operation) or operation.op.strip("_") in _ONE_SIDED or "coalesced" in operation.op:
        return []
    came = _came({rank: ranks[rank] for rank in members if rank in ranks})
    return [rank for (rank, group), seq in came.items() if group == operation.group and seq > operation.seq]


def graph(
    ranks: Mapping[int, Standing],
    members: Callable[[str], tuple[int, ...]],
    *,
    outside: Collection[int] = (),
    recorded: Mapping[int, Iterable[int]] = {},
) -> Waiting:
    """The wait graph. Ranks in `outside` count as outside whatever they seem; `recorded` is what recorders say."""
    inside: dict[Operation, list[int]] = defaultdict(list)
    for rank, one in ranks.items():
        if one.stands in ("waiting", "perhaps") and rank not in outside:
            is_known = one.inside is not None and len(members(one.inside.group)) > 1
            inside[one.inside if is_known and one.inside is not None else SOMETHING].append(rank)
    came = _came(ranks)
    waits: dict[Node, list[Node]] = {}
    missing: dict[Operation, tuple[int, ...]] = {}
    for operation, waiting in inside.items():
        sure: list[int] = []
        if operation == SOMETHING:
            absent = [rank for rank, one in ranks.items() if one.stands in ("outside", "frozen")]
            absent += [rank for rank in outside if rank not in absent]
        elif is_transfer(operation):
            absent = _peers(operation, waiting, ranks, members(operation.group))
        else:
            absent, sure = _not_come(operation, waiting, ranks, members(operation.group), came)
        told = {on for rank in waiting for on in recorded.get(rank, ())}
        if told & set(absent):
            absent = [one for one in absent if one in told or one in sure]
        missing[operation] = tuple(absent)
        waits[operation] = list(absent)
        for rank in waiting:
            waits[rank] = [operation]
    return Waiting({one: tuple(found) for one, found in inside.items()}, missing, tuple(sinks(waits)))


def membership(now: Merged, mesh: Mapping[str, int] | None) -> Callable[[str], tuple[int, ...]]:
    """The members of a group, by its name; as many as can be told where nobody has said."""
    everyone = tuple(sorted(now.nodes or now.activities))
    users: dict[str, set[int]] = defaultdict(set)
    for rank, one in now.activities.items():
        if one.last is not None:
            users[one.last.group].add(rank)
    known: dict[str, tuple[int, ...]] = {}

    def members(name: str) -> tuple[int, ...]:
        found = known.get(name)
        if found is None:
            group = now.groups.get(name)
            found = group.members if group is not None else ()
            if not found and (name == "0" or (group is not None and group.description in _WORLD)):
                found = everyone
            if not found and mesh and math.prod(mesh.values()) == len(everyone):
                found = _by_mesh(users[name], mesh)
            known[name] = found = found or tuple(sorted(users[name]))
        return found

    return members


_WORLD = ("default_pg", "WORLD", "world")


def _by_mesh(users: Collection[int], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The line of the mesh on which all users are; two users are on one line at most."""
    if len(users) < 2:
        return ()
    lines = (line(mesh, min(users), dim) for dim in mesh)
    return next((one for one in lines if set(users) <= set(one)), ())


def _came(ranks: Mapping[int, Standing]) -> dict[tuple[int, str], int]:
    """The number of a rank's newest collective, by its group."""
    return {
        (rank, one.activity.last.group): one.activity.last.seq
        for rank, one in ranks.items()
        if one.activity is not None and one.activity.last is not None and not is_transfer(one.activity.last)
    }


def _not_come(
    operation: Operation,
    waiting: Collection[int],
    ranks: Mapping[int, Standing],
    members: Iterable[int],
    came: Mapping[tuple[int, str], int],
) -> tuple[list[int], list[int]]:
    """Members that have not come to a collective, and those of them of whom that is certain."""
    there = set(waiting)
    absent, sure = [], []
    for member in members:
        if member in there:
            continue
        counts = came.get((member, operation.group))
        one = ranks.get(member)
        # a frozen process takes no part in what it has begun; what it has left behind it has done
        if counts is not None and (
            counts > operation.seq
            or (counts == operation.seq and (one is None or one.stands != "frozen" or one.frozen == "held"))
        ):
            continue
        absent.append(member)
        if counts is not None:
            sure.append(member)
    return absent, sure


def _peers(
    operation: Operation, waiting: Collection[int], ranks: Mapping[int, Standing], members: tuple[int, ...]
) -> list[int]:
    """The other side of a transfer, unless it is there as well."""
    found = PEER.search(operation.op)
    if found:
        at = int(found[2])
        others = [members[at]] if at < len(members) else []
    else:
        places = [members.index(rank) for rank in waiting if rank in members]
        others = [members[to] for at in places for to in (at - 1, at + 1) if 0 <= to < len(members)]
    return [one for one in dict.fromkeys(others) if one not in waiting and not _answers(ranks.get(one), operation)]


def _answers(other: Standing | None, operation: Operation) -> bool:
    if other is None or other.stands not in ("waiting", "perhaps") or (theirs := other.inside) is None:
        return False
    if theirs.group != operation.group or not is_transfer(theirs):
        return False
    if theirs.op.lstrip("_i")[:4] == operation.op.lstrip("_i")[:4]:
        return False
    mine, its = PEER.search(operation.op), PEER.search(theirs.op)
    return mine is None or its is None or (mine[1], mine[2]) == (its[2], its[1])
