"""Who waits for whom, by the operations that ranks are blocked in?

    rank ──is blocked in──▶ meeting ──waits for──▶ members that have not come ──▶ …

A meeting is a collective by its number in its communicator, or a send and its receive. An edge begins at what a rank
is *blocked in*: what it has only posted waits for nobody, and a rank that is blocked in nothing is outside, whatever it
has in flight. A member has come when it has posted its part. One that is halted has not come, even if it has: its part
does not go on. Sends wait for their receiver, however small they are.

The ends of the graph explain the rest: ranks outside, meetings to which all have come, circles.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from evertrain.locate.waits import sinks
from evertrain.locate.words import named
from evertrain.model.collectives import ANYBODY, NOBODY, Call, Communicator, RankTrace, Step


class Meeting(NamedTuple):
    comm: str
    seq: int
    source: int = NOBODY
    target: int = NOBODY

    @property
    def is_transfer(self) -> bool:
        return self.target != NOBODY


Node = int | Meeting


class Blocking(msgspec.Struct, frozen=True):
    """The graph."""

    inside: dict[Meeting, tuple[int, ...]]
    """Ranks by the meeting they are blocked in."""
    missing: dict[Meeting, tuple[int, ...]]
    """Members that have not come, or are halted."""
    ends: tuple[frozenset[Node], ...]

    def ranks_at_end(self) -> list[int]:
        return sorted(one for end in self.ends if len(end) == 1 for one in end if isinstance(one, int))

    def meetings_at_end(self) -> list[Meeting]:
        """To which all have come."""
        return sorted(one for end in self.ends if len(end) == 1 for one in end if isinstance(one, Meeting))

    def circles(self) -> list[frozenset[Node]]:
        return [end for end in self.ends if len(end) > 1]

    def waiting_for(self, ranks: Collection[int]) -> dict[Meeting, tuple[int, ...]]:
        """The meetings in which others wait for these, most of them first."""
        found = {
            meeting: tuple(rank for rank in self.inside[meeting] if rank not in ranks)
            for meeting, absent in self.missing.items()
            if not set(ranks).isdisjoint(absent)
        }
        return dict(sorted(((one, who) for one, who in found.items() if who), key=lambda pair: -len(pair[1])))


def meeting_of(rank: int, call: Call) -> Meeting:
    if call.op.startswith("send"):
        return Meeting(call.comm, call.seq, rank, call.peer)
    if call.op.startswith("recv"):
        return Meeting(call.comm, call.seq, call.peer, rank)
    return Meeting(call.comm, call.seq)


class Grapher:
    """Builds graphs of one look: which ranks count as waiting may be asked in more than one way."""

    def __init__(self, ranks: Mapping[int, RankTrace], comms: Mapping[str, Communicator]) -> None:
        self._ranks, self._comms = ranks, comms
        self._came = {
            rank: {(one.comm, one.source, one.target): one for one in trace.progress} for rank, trace in ranks.items()
        }
        self._users: dict[str, list[int]] = defaultdict(list)
        for rank, trace in ranks.items():
            for comm in dict.fromkeys(one.comm for one in trace.progress):
                self._users[comm].append(rank)

    def members(self, comm: str) -> tuple[int, ...]:
        known = self._comms.get(comm)
        return known.members if known is not None and known.members else tuple(self._users[comm])

    def graph(self, halted: Collection[int]) -> Blocking:
        """... of what ranks have said; where that is a circle, without what was only guessed of them."""
        found = self._graph(halted, frozenset())
        guessed = frozenset(
            one
            for circle in found.circles()
            for one in circle
            if isinstance(one, int) and (call := self._ranks[one].blocked) is not None and not call.is_sure
        )
        return self._graph(halted, guessed) if guessed else found

    def _graph(self, halted: Collection[int], outside: Collection[int]) -> Blocking:
        inside: dict[Meeting, list[int]] = defaultdict(list)
        for rank, trace in self._ranks.items():
            if trace.blocked is not None and not trace.blind and rank not in halted and rank not in outside:
                inside[meeting_of(rank, trace.blocked)].append(rank)
        missing = {
            meeting: tuple(self._missing(meeting, set(waiting), halted))
            for meeting, waiting in inside.items()
            if meeting.source != ANYBODY
        }
        waits: dict[Node, list[Node]] = {}
        for meeting, waiting in inside.items():
            waits[meeting] = list(missing.get(meeting, ()))
            for rank in waiting:
                waits[rank] = [meeting]
        for meeting in inside:
            if meeting.source == ANYBODY:
                missing[meeting] = tuple(self._whoever(meeting, waits))
        waits |= {meeting: list(absent) for meeting, absent in missing.items()}
        return Blocking({one: tuple(ranks) for one, ranks in inside.items()}, missing, tuple(sinks(waits)))

    def _missing(self, meeting: Meeting, there: set[int], halted: Collection[int]) -> Iterator[int]:
        members: Iterable[int] = self.members(meeting.comm)
        if meeting.is_transfer:
            members = (meeting.source, meeting.target)
        for member in members:
            if member in there:
                continue
            came = self._came.get(member, {}).get((meeting.comm, meeting.source, meeting.target))
            if came is None or came.posted < meeting.seq or (member in halted and came.ended < meeting.seq):
                yield member

    def _whoever(self, meeting: Meeting, waits: Mapping[Node, list[Node]]) -> list[int]:
        """Who might send to one that takes from anybody: nobody is missing if somebody does. Those who wait for it
        themselves will not, so the others are left, if there are any."""
        others = [rank for rank in self.members(meeting.comm) if rank != meeting.target]
        if any(self._sends(rank, meeting) for rank in others):
            return []
        behind = _behind(meeting.target, waits)
        return [rank for rank in others if rank not in behind] or others

    def _sends(self, rank: int, meeting: Meeting) -> bool:
        trace = self._ranks.get(rank)
        calls = (*trace.in_flight, *([trace.blocked] if trace.blocked else [])) if trace is not None else ()
        return any(
            one.comm == meeting.comm and one.op.startswith("send") and one.peer == meeting.target for one in calls
        )

    # --- words

    def group(self, comm: str) -> str:
        known = self._comms.get(comm)
        return (known.description or known.name) if known is not None else comm[:8]

    def told(self, meeting: Meeting, op: str = "") -> str:
        group = self.group(meeting.comm)
        if not meeting.is_transfer:
            return f"{op or self._op(meeting)} number {meeting.seq} of group {group}"
        source = "anybody" if meeting.source == ANYBODY else f"rank {meeting.source}"
        return f"transfer number {meeting.seq} from {source} to rank {meeting.target} in group {group}"

    def _op(self, meeting: Meeting) -> str:
        for rank in self.members(meeting.comm):
            trace = self._ranks.get(rank)
            call = trace.blocked if trace is not None else None
            if call is not None and meeting_of(rank, call) == meeting:
                return call.op
        return "operation"

    def path(self, graph: Blocking, suspects: Collection[int]) -> tuple[Step, ...]:
        """The longest of the shortest ways along which a rank waits for one of these; it ends before the suspect."""
        holds: dict[int, list[Meeting]] = defaultdict(list)
        for meeting, absent in graph.missing.items():
            # where all have come, those who are to blame hold up the others
            for rank in absent or [one for one in graph.inside[meeting] if one in suspects]:
                holds[rank].append(meeting)
        on: dict[int, tuple[int, Meeting] | None] = dict.fromkeys(sorted(suspects))
        queue = deque(on)
        last = next(iter(on), NOBODY)
        while queue:
            last = queue.popleft()
            for meeting in holds[last]:
                for rank in graph.inside[meeting]:
                    if rank not in on:
                        on[rank] = (last, meeting)
                        queue.append(rank)
        steps = []
        while (hop := on.get(last)) is not None:
            trace, (last, meeting) = self._ranks[last], hop
            for_s = trace.blocked.seconds if trace.blocked is not None else 0.0
            what = f"waits in {self.told(meeting)} for {for_s:.1f} s"
            steps.append(Step(trace.rank, trace.node, what, graph.missing[meeting] or (last,)))
        return tuple(steps)

    def waiters(self, graph: Blocking, suspects: Collection[int], most: int) -> list[str]:
        """A line for each meeting in which others wait for these."""
        it = "it" if len(suspects) == 1 else "them"
        return [
            f"{named(who)} {'waits' if len(who) == 1 else 'wait'} for {it} in {self.told(meeting)}"
            for meeting, who in list(graph.waiting_for(suspects).items())[:most]
        ]


def _behind(rank: int, waits: Mapping[Node, list[Node]]) -> set[Node]:
    """Everything that waits for this rank, at however many removes."""
    waiting: dict[Node, list[Node]] = defaultdict(list)
    for one, on in waits.items():
        for other in on:
            waiting[other].append(one)
    found: set[Node] = set()
    queue: deque[Node] = deque([rank])
    while queue:
        for one in waiting[queue.popleft()]:
            if one not in found:
                found.add(one)
                queue.append(one)
    return found
