"""Which processes stand in the same place? Looks become positions on the node, and positions of all nodes one picture.

    Seen (a process, a look) ──group──▶ Position (a place, its processes) ──merge──▶ Merged (the whole job)

Two processes stand in the same place if they have the same functions of the same files on the thread that decides, and
wait in the same way. Line numbers, addresses and arguments are detail.
"""

from __future__ import annotations

import functools
import operator
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from evertrain.locate.places import decide, of_thread
from evertrain.model.activity import RankActivity
from evertrain.model.recording import Group, Operation, Recording
from evertrain.model.stacks import Frame, Member, NodeCapture, Position, ProcessKind, Seen, Thread

__all__ = ["Cluster", "Merged", "Seen", "clusters", "dominant", "group", "merge", "moved", "slim", "wait_class"]

_KEPT = 8192
"""Frames of which is remembered what they are."""
_DEEPEST = 64
"""Frames that are kept, innermost first: endless recursion has more, and no more to say."""


_RANK_AND_PID = operator.attrgetter("rank", "pid")


class Merged(msgspec.Struct, frozen=True, kw_only=True):
    """A capture of the whole job."""

    number: int
    attempt: int
    time: float
    positions: tuple[Position, ...] = ()
    """The one with most processes first."""
    activities: dict[int, RankActivity] = {}
    groups: dict[str, Group] = {}
    recordings: dict[int, Recording] = {}
    nodes: dict[int, str] = {}
    """By rank: all that were expected."""
    blind: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Nodes that sent nothing."""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks whose processes of one kind have the same functions on their stacks."""

    positions: tuple[Position, ...]
    ranks: tuple[int, ...]

    @property
    def first(self) -> Position:
        return self.positions[0]


def group(looks: Iterable[Seen]) -> tuple[Position, ...]:
    """The places in which the processes of a node were seen; who was seen in several is a member of each."""
    found: dict[Hashable, Position] = {}
    members: dict[Hashable, Counter[tuple[int, int]]] = defaultdict(Counter)
    for one in looks:
        position = _position(one)
        key = _key(position)
        found.setdefault(key, position)
        members[key][one.rank, one.pid] += 1
    return tuple(
        msgspec.structs.replace(
            position, members=tuple(Member(rank, pid, count) for (rank, pid), count in sorted(members[key].items()))
        )
        for key, position in found.items()
    )


def merge(captures: Iterable[NodeCapture], expected: Mapping[int, str]) -> Merged:
    """One picture of what the nodes sent; `expected` says on which node each rank of the attempt should be."""
    sent = list(captures)
    number = max((one.number for one in sent), default=0)
    by_node = {one.node: one for one in sent if one.number == number}
    first: dict[Hashable, Position] = {}
    members: dict[Hashable, list[Member]] = defaultdict(list)
    groups: dict[str, Group] = {}
    nodes = dict(expected)
    for one in by_node.values():
        for position in one.positions:
            key = _key(position)
            first.setdefault(key, position)
            members[key] += position.members
            if position.kind == "trainer":
                for member in position.members:
                    nodes.setdefault(member.rank, one.node)
        for told in one.activities:
            nodes.setdefault(told.rank, one.node)
        for other in one.groups:
            groups[other.name] = _united(groups.get(other.name), other)
    positions = [
        msgspec.structs.replace(position, members=tuple(sorted(members[key], key=_RANK_AND_PID)))
        for key, position in first.items()
    ]
    return Merged(
        number=number,
        attempt=max((one.attempt for one in by_node.values()), default=0),
        time=max((one.time for one in by_node.values()), default=0.0),
        positions=tuple(sorted(positions, key=lambda position: -len(position.members))),
        activities={told.rank: told for one in by_node.values() for told in one.activities},
        groups=groups,
        recordings={told.rank: _restored(told) for one in by_node.values() for told in one.recordings},
        nodes=nodes,
        blind=tuple(dict.fromkeys(line for one in by_node.values() for line in one.blind)),
        missing=tuple(sorted(set(expected.values()) - by_node.keys())),
    )


def slim(groups: Iterable[Group], here: Iterable[int], world_size: int) -> tuple[Group, ...]:
    """Groups without the members that others send too: else ten thousand ranks would send ten thousand numbers each.

    The nodes of a group's first and last rank send its members; of the group of all ranks nobody does.
    """
    own = frozenset(here)
    found: dict[str, Group] = {}
    for one in groups:
        is_ours = one.members and len(one.members) < world_size and (one.members[0] in own or one.members[-1] in own)
        found[one.name] = one if is_ours else Group(one.name, one.description)
    return tuple(found.values())


def clusters(positions: Iterable[Position], kind: ProcessKind) -> list[Cluster]:
    """Who has the same functions on the stack, however they wait there; most ranks first."""
    together: dict[Hashable, list[Position]] = defaultdict(list)
    for one in positions:
        if one.kind == kind:
            together[one.place, one.state, _functions(one.frames)].append(one)
    found = [
        Cluster(positions=tuple(some), ranks=tuple(sorted({member.rank for one in some for member in one.members})))
        for some in together.values()
    ]
    return sorted(found, key=lambda one: (-len(one.ranks), one.ranks))


def dominant(positions: Sequence[Position], kind: ProcessKind, stages: int = 1) -> tuple[list[Cluster], list[Cluster]]:
    """The usual places of a kind of process, and the unusual ones.

    Usual is the largest cluster, and any that holds more than half a pipeline stage's share of the ranks: the stages
    of a pipeline may rightly stand in different places.
    """
    found = clusters(positions, kind)
    everyone = {rank for one in found for rank in one.ranks}
    usual = [one for at, one in enumerate(found) if at == 0 or len(one.ranks) * 2 * max(1, stages) > len(everyone)]
    return usual, [one for one in found if one not in usual]


def moved(earlier: Merged, now: Merged, kind: ProcessKind | None = None) -> frozenset[tuple[int, int]]:
    """Processes, by rank and pid, that were seen both times and stand in another place the second time."""
    numbers: dict[Hashable, int] = {}
    before, after = _places(earlier, kind, numbers), _places(now, kind, numbers)
    return frozenset(who for who, places in after.items() if before.get(who, places) != places)


def _places(merged: Merged, kind: ProcessKind | None, numbers: dict[Hashable, int]) -> dict[tuple[int, int], int]:
    """The places in which each process was seen, as a set of bits: a number for each place."""
    found: dict[tuple[int, int], int] = {}
    for one in merged.positions:
        if kind is None or one.kind == kind:
            bit = 1 << numbers.setdefault((one.place, one.state, _functions(one.frames)), len(numbers))
            for member in one.members:
                who = member.rank, member.pid
                found[who] = found.get(who, 0) | bit
    return found


def _position(seen: Seen) -> Position:
    place, thread = decide(seen.dump)
    holder = next((one for one in seen.dump.threads if _holds(one)), None)
    if holder is not None:
        thread, place = holder, of_thread(holder)
    return Position(
        kind=seen.kind,
        state=seen.state,
        place=place.kind,
        frames=tuple(map(_plain, thread.frames[:_DEEPEST])),
        is_idle=place.is_idle,
        waits_in=seen.waits_in,
        is_held=holder is not None,
        failure=seen.dump.failure,
        members=(),
    )


def _holds(thread: Thread) -> bool:
    """Python lets go of the interpreter before it sleeps; native code that does not keeps it from everybody else."""
    if not (thread.holds_gil and thread.frames):
        return False
    innermost = thread.frames[0]
    if thread.state == "idle":
        return True
    if is_native(innermost):
        return not _INTERPRETER.search(str(innermost))
    # a standard library's function that is a door to C: whoever is seen there each time is behind it
    return _plain(innermost).file.partition("/")[0].removesuffix(".py") in sys.stdlib_module_names


# --- what is the same, and what is detail

_INTERPRETER = re.compile(r"libpython|/python[\d.]*\b|\bPy[A-Z_]|_Py")
_INSTALLED = re.compile(r"^.*/(?:site|dist)-packages/|^.*/lib(?:64)?/python\d[\d.]*/(?:lib-dynload/)?")
_NATIVE = re.compile(r"\.so\b|\.(c|cc|cpp|cu|h|hpp|rs)$|^lib[^/]*$|^kernel$|^\[|(^|/)python[\d.]*$")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def _key(position: Position) -> Hashable:
    return (
        position.kind, position.state, position.place, _functions(position.frames), position.is_idle,
        position.is_held, wait_class(position.waits_in), position.failure and _ADDRESS.sub("", position.failure)[:40],
    )  # fmt: skip


def _functions(frames: tuple[Frame, ...]) -> Hashable:
    """Python's frames; native ones are seen of some processes only."""
    python = tuple((one.function, one.file) for one in frames if one.file.endswith(".py") or not is_native(one))
    return python or tuple((one.function, one.file) for one in frames)


@functools.lru_cache(maxsize=_KEPT)
def is_native(frame: Frame) -> bool:
    return not frame.file or bool(_NATIVE.search(frame.file))


@functools.lru_cache(maxsize=_KEPT)
def _plain(frame: Frame) -> Frame:
    function = _ADDRESS.sub("?", frame.function.partition("(")[0].strip() or frame.function)
    file = _INSTALLED.sub("", frame.file)
    if file.startswith("/"):
        file = "/".join(file.split("/")[-2:])
    return Frame(function, file, frame.line)


_WAITS = {
    "futex": re.compile(r"futex|sem_?wait"),
    "sleep": re.compile(r"sleep"),
    "poll": re.compile(r"poll|select"),
    "network": re.compile(r"sock|recv|inet_|tcp_|sk_wait|unix_stream"),
    "pipe": re.compile(r"pipe"),
    "child": re.compile(r"wait4|waitid|do_wait|waitpid"),
    "stopped": re.compile(r"signal_stop|ptrace_stop"),
    "storage": re.compile(
        r"nfs|rpc_|fuse|lustre|ll_|cl_|ptlrpc|gpfs|ceph|xfs|ext4|jbd2|beegfs|folio|wait_on_page|io_schedule|btrfs|blk_"
    ),
}


def wait_class(waits_in: str) -> str:
    """In what way a process waits: the kernel has many functions for each of a few."""
    if waits_in in ("", "0", "running", "-"):
        return ""
    return next((name for name, pattern in _WAITS.items() if pattern.search(waits_in)), waits_in)


def _united(known: Group | None, other: Group) -> Group:
    if known is None or not known.members:
        return other if other.members or known is None else known
    if other.members and other.members != known.members:
        return Group(known.name, known.description)  # two groups of one name: better nothing than the wrong ranks
    return known


def _restored(told: Recording) -> Recording:
    """Sizes that can be compared again: on the wire a tuple in a tuple becomes a list."""
    operations = tuple(_with_plain_shape(one) for one in told.operations)
    missed = _with_plain_shape(told.missed) if told.missed is not None else None
    return msgspec.structs.replace(told, operations=operations, missed=missed)


def _with_plain_shape(one: Operation) -> Operation:
    return msgspec.structs.replace(one, shape=_tuples(one.shape)) if one.shape else one


def _tuples(told: Any) -> Any:
    return tuple(map(_tuples, told)) if isinstance(told, list | tuple) else told
