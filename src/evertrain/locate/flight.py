"""Which ranks did not do what the others wait for? Flight recorder dumps, matched across the ranks of a job.

A rank waits in its oldest pending operation for those members of the group that are not there yet. Whoever is waited
for and waits for nobody himself is accused:

    empty      alive, but its dump has no entries       its interpreter or its host stands still
    absent     it has not called what the others are in  its program is elsewhere
    passed     its own operation is pending, though peers have finished it    its device does not get on
    no dump    nothing came from it

All members there and nothing moves accuses the network or a device, but no rank. Ranks that were told to do different
things under the same number are a matter of the code.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from evertrain.locate.recorder import read_summary
from evertrain.locate.waits import sinks
from evertrain.model.findings import Action, Category, Culprit, Finding
from evertrain.model.recording import Group, Operation, Recording, Recordings

_GROUP = "flight_recorder"

Why = Literal["empty", "absent", "passed", "no dump", "arrived"]

# operations that end on some members before all have come
_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "coalesced")
# sizes of these may differ from rank to rank
_UNEVEN = ("all_to_all", "alltoall", "scatter", "gather", "send", "recv", "coalesced", "_v")


def judge_summary(content: Mapping[str, Any]) -> tuple[Finding, ...]:
    """`judge` for the summary form of a set of dumps."""
    return judge(read_summary(content))


def judge(found: Recordings) -> tuple[Finding, ...]:
    """Who the others wait for, as exact sets of global ranks."""
    job = _Job(found)
    if mismatch := _mismatch(job):
        return (mismatch,)
    waits = {rank: list(job.waits_for(rank)) for rank in job.ranks}
    ends = sinks(waits)
    why = {rank: job.why(rank) for end in ends if len(end) == 1 for rank in end}
    if not any(waits.values()):
        # groups may be unknown, and a dump without entries still stands out
        why |= {one.rank: "empty" for one in found.ranks.values() if not one.count}
    accused = {rank: told for rank, told in why.items() if told not in ("arrived", "no dump")}
    accused = accused or {rank: told for rank, told in why.items() if told == "no dump"}
    if not any(one.is_pending for rec in found.ranks.values() for one in rec.operations):
        return ()
    if accused and len(accused) * 2 <= len(job.ranks):
        return (_accuse(job, accused, waits),)
    if accused:
        note = f"{len(accused)} of {len(job.ranks)} ranks are not where the others wait: too many to single out"
        return (_finding("flight-out-of-step", "unknown", "human", 0.3, Culprit(), job.lines(accused), note),)
    if circles := [end for end in ends if len(end) > 1]:
        who = tuple(sorted(set().union(*circles)))
        note = f"{_list(who)} wait for each other in a circle: groups used in different order"
        culprit = Culprit("rank", who)
        return (_finding("flight-deadlock", "user_code", "retry", 0.4, culprit, job.lines(who), note),)
    note = "every member has arrived where it waits and nothing moves: network or device, no rank is accused"
    return (_finding("flight-all-arrived", "unknown", "human", 0.3, Culprit(), job.lines(sorted(job.ranks)[:3]), note),)


def _accuse(job: _Job, accused: Mapping[int, Why], waits: Mapping[int, list[int]]) -> Finding:
    who = tuple(sorted(accused))
    reasons = set(accused.values())
    behind = sum(1 for rank, whom in waits.items() if whom and rank not in accused)
    has, is_ = ("has", "is") if len(who) == 1 else ("have", "are")
    category: Category = "unknown"
    action: Action = "retry"
    if reasons == {"passed"}:
        category, action, confidence = "gpu_hardware", "evict", 0.55
        told = f"{has} not finished what peers finished long ago: the device does not get on"
    elif reasons == {"empty"}:
        confidence, told = 0.6, f"{is_} alive, but recorded nothing: interpreter held (GIL) or host stalled"
    elif reasons == {"no dump"}:
        confidence, told = 0.4, "gave no dump: gone, stopped, or not collected"
    else:
        confidence, told = 0.6, f"{has} not called what the others wait in"
    note = f"{_list(who)} {told}; {behind} ranks wait for that, directly or through others"
    waiting = [rank for rank, whom in waits.items() if set(whom) & set(who) and rank not in accused][:3]
    evidence = (*job.lines(who), *job.lines(waiting))
    culprit = Culprit("rank", who[0] if len(who) == 1 else who)
    rule = f"flight-{'absent' if len(reasons) > 1 else next(iter(reasons)).replace(' ', '-')}"
    return _finding(rule, category, action, confidence, culprit, evidence, note)


class _Job:
    """All dumps, with what follows from them about groups and about who has come how far."""

    def __init__(self, found: Recordings) -> None:
        self._found = found
        self.ranks = {*found.ranks, *(one for group in found.groups.values() for one in group.members)}
        self._groups = _completed(found)
        self._first: dict[int, dict[str, Operation]] = defaultdict(dict)
        """Oldest pending collective of a rank in each group."""
        self._last: dict[int, dict[str, int]] = defaultdict(dict)
        """Number of the newest collective that a rank has called, by group."""
        for rank, recording in found.ranks.items():
            for one in recording.operations:
                if not one.is_transfer:
                    self._last[rank][one.group] = max(one.sequence, self._last[rank].get(one.group, 0))
                    if one.is_pending:
                        self._first[rank].setdefault(one.group, one)
        self._passed = {rank for rank in found.ranks if self._is_passed(rank)}

    def recording(self, rank: int) -> Recording | None:
        return self._found.ranks.get(rank)

    def group(self, name: str) -> Group:
        return self._groups[name]

    @property
    def recordings(self) -> Iterable[Recording]:
        return self._found.ranks.values()

    def waits_for(self, rank: int) -> Iterator[int]:
        recording = self.recording(rank)
        oldest = next((one for one in recording.operations if one.is_pending), None) if recording else None
        if oldest is None or rank in self._passed:
            return
        members = self._groups[oldest.group].members
        if oldest.is_transfer:
            peer = oldest.peer
            if peer is not None and peer < len(members):
                other = members[peer]
            elif len(members) == 2 and rank in members:
                other = members[1 - members.index(rank)]
            else:
                return
            if other != rank and not self._has_counterpart(other, oldest):
                yield other
            return
        yield from (one for one in members if one != rank and not self._has_reached(one, oldest))

    def why(self, rank: int) -> Why:
        recording = self.recording(rank)
        if recording is None:
            return "no dump"
        if not recording.count:
            return "empty"
        if rank in self._passed:
            return "passed"
        return "arrived" if any(one.is_pending for one in recording.operations) else "absent"

    def lines(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """What the dumps of these ranks say, a line each."""
        return tuple(self._line(rank) for rank in list(ranks)[:16])

    def _line(self, rank: int) -> str:
        recording = self.recording(rank)
        if recording is None:
            return f"rank {rank}: no dump"
        pending = [one for one in recording.operations if one.is_pending]
        if pending:
            first = pending[0]
            return f"rank {rank}: waits in {first.name} #{first.sequence} of group {self._groups[first.group]}"
        if recording.operations:
            last = recording.operations[-1]
            return (
                f"rank {rank}: nothing pending; last {last.name} #{last.sequence} of group {self._groups[last.group]}"
            )
        return f"rank {rank}: {recording.count or 'no'} entries"

    def _has_reached(self, rank: int, where: Operation) -> bool:
        first = self._first[rank].get(where.group)
        if first is not None and first.sequence < where.sequence:
            # it has called the operation, perhaps, but its stream is in an earlier one
            return False
        return self._last[rank].get(where.group, -1) >= where.sequence

    def _has_counterpart(self, rank: int, transfer: Operation) -> bool:
        recording = self.recording(rank)
        pair = (transfer.peer, transfer.position)
        return recording is not None and any(
            one.is_pending and one.is_transfer and one.group == transfer.group and (one.position, one.peer) == pair
            and one.name.startswith("recv" if transfer.name.startswith("send") else "send")
            for one in recording.operations
        )  # fmt: skip

    def _is_passed(self, rank: int) -> bool:
        for name, first in self._first[rank].items():
            if first.name.startswith(_ONE_SIDED):
                continue
            for other in self._groups[name].members:
                if other != rank and self._has_finished(other, first):
                    return True
        return False

    def _has_finished(self, rank: int, what: Operation) -> bool:
        first = self._first[rank].get(what.group)
        if first is not None:
            return first.sequence > what.sequence
        return self._last[rank].get(what.group, -1) >= what.sequence


def _completed(found: Recordings) -> dict[str, Group]:
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


def _mismatch(job: _Job) -> Finding | None:
    """Members of a group that were told to do different things under the same number."""
    called: dict[tuple[str, int], dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for recording in job.recordings:
        for one in recording.operations:
            if not one.is_transfer and one.is_pending:
                called[one.group, one.sequence][recording.rank].append(one)
    for (name, number), by_rank in sorted(called.items()):
        kinds = Counter(_signature(operations) for operations in by_rank.values())
        if len(kinds) < 2:
            continue
        (usual, most), *others = kinds.most_common()
        is_clear = most > sum(count for _, count in others)
        odd = tuple(sorted(rank for rank, told in by_rank.items() if _signature(told) != usual or not is_clear))
        names = {tuple(one.name for one in told) for told in by_rank.values()}
        what = "operations" if len(names) > 1 else "sizes or types"
        note = f"different {what} under number {number} of group {job.group(name)}"
        note += f", unlike the others: {_list(odd)}" if is_clear else ", without a majority"
        evidence = tuple(
            f"rank {rank}: #{number} {told[0].name}, {told[0].shape}" for rank, told in sorted(by_rank.items())[:16]
        )
        culprit = Culprit("rank", odd[0] if len(odd) == 1 else odd) if is_clear else Culprit("code", note)
        return _finding("flight-mismatch", "user_code", "user_code", 0.75, culprit, evidence, note)
    return None


def _signature(operations: list[Operation]) -> tuple[Any, ...]:
    return tuple((one.name, () if any(word in one.name for word in _UNEVEN) else one.shape) for one in operations)


def _finding(
    rule: str,
    category: Category,
    action: Action,
    confidence: float,
    culprit: Culprit,
    evidence: Iterable[str],
    note: str,
) -> Finding:
    return Finding(
        rule=rule,
        group=_GROUP,
        category=category,
        action=action,
        culprit=culprit,
        confidence=confidence,
        evidence=tuple(evidence),
        rank=culprit.id if isinstance(culprit.id, int) else None,
        note=note,
    )


def _list(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(str(one) for one in ranks)}"
