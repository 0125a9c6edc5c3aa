"""Which ranks did not do what the others wait for? Flight recorder dumps, matched across the ranks of a job.

A rank waits in its oldest pending operation for those members of the group that are not there yet. Whoever is waited
for and waits for nobody himself is accused. The rule of a finding says of what, and how that is called in `Located`:

    flight-mismatch    mismatch   the same number in a group, but other sizes, other types, or an operation never seen
    flight-order       order      the same number in a group, but an operation that belongs to another place
    flight-skipped     skipped    it has gone on without the operation that the others wait in
    flight-deadlock    deadlock   groups wait for each other in a circle
    flight-unstarted   device     it has called the operation, its device has not begun it while those of peers have
    flight-passed      device     its operation is pending though peers have finished it (without a device: unknown)
    flight-absent      unknown    it has not called what the others are in; where it is instead, its stack says
    flight-empty       unknown    alive, but has recorded nothing: not yet there, or held
    flight-no-dump     unknown    nothing came from it: gone, stopped, or not collected
    flight-all-arrived network    every member is there and nothing moves: no rank is accused
    flight-out-of-step unknown    more ranks than not are elsewhere: no rank is accused

Left out and called later look alike as long as everybody waits; `order` means one group, `skipped` several. What a rank
has left out by its own habit (`Recording.missed`) decides where there is no majority. Sends and receives of gloo are in
no dump: `recorder.with_activities` adds those that pages show.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from evertrain.locate.members import completed
from evertrain.locate.recorder import read_summary
from evertrain.locate.waits import sinks
from evertrain.model.findings import Action, Category, Culprit, Finding
from evertrain.model.recording import Group, Operation, Recording, Recordings

_GROUP = "flight_recorder"

Why = Literal["empty", "absent", "skipped", "unstarted", "passed", "no dump", "arrived"]

# operations that end on some members before all have come
_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter", "send", "recv", "coalesced")
# sizes of these may differ from rank to rank
_UNEVEN = re.compile(r"all_?to_?all|scatter|gather|send|recv|coalesced|\w+_v\b")

YOUNG_S = 1.0
"""Whoever came so shortly before the dump does not hang there. Ranks are not read at the same moment."""


def judge_summary(content: Mapping[str, Any]) -> tuple[Finding, ...]:
    """`judge` for the summary form of a set of dumps."""
    return judge(read_summary(content))


def waits(found: Recordings) -> dict[int, tuple[int, ...]]:
    """For each rank that stands in an operation: the ranks it waits for there, none if all have come."""
    job = _Job(found)
    return {rank: job.waits_for(rank) for rank in job.ranks if job.oldest(rank) is not None}


def judge(found: Recordings) -> tuple[Finding, ...]:
    """Who the others wait for, as exact sets of global ranks."""
    job = _Job(found)
    if not any(job.oldest(rank) is not None for rank in found.ranks):
        return ()
    if mismatch := _mismatch(job):
        return (mismatch,)
    waits = {rank: job.waits_for(rank) for rank in job.ranks}
    ends = sinks(waits)
    why = {rank: job.why(rank, waits) for end in ends if len(end) == 1 for rank in end}
    if not any(waits.values()):
        # groups may be unknown, and a dump without entries still stands out
        why |= {one.rank: "empty" for one in found.ranks.values() if not one.count}
    accused = {rank: told for rank, told in why.items() if told not in ("arrived", "no dump")}
    accused = accused or {rank: told for rank, told in why.items() if told == "no dump"}
    circles = [end for end in ends if len(end) > 1]
    if not accused and circles:
        return (_circle(job, set().union(*circles), waits),)
    if accused and len(accused) * 2 <= len(job.ranks):
        return (_accuse(job, accused, waits),)
    if accused:
        note = f"{len(accused)} of {len(job.ranks)} ranks are not where the others wait: too many to single out"
        return (_finding("flight-out-of-step", "unknown", "human", 0.3, Culprit(), job.lines(accused), note),)
    note = "every member has arrived where it waits and nothing moves: network or device, no rank is accused"
    return (_finding("flight-all-arrived", "unknown", "human", 0.3, Culprit(), job.lines(sorted(job.ranks)[:3]), note),)


def _circle(job: _Job, circle: set[int], waits: Mapping[int, tuple[int, ...]]) -> Finding:
    """Ranks that wait for each other: a few that have left out what the others are in, or groups in two orders."""
    left_out = {rank: "skipped" for rank in circle if job.has_left_out(rank, waits)}
    inside = [rank for rank in job.ranks if job.oldest(rank) is not None]
    if left_out and len(left_out) < len(circle) and len(left_out) * 2 < len(inside):
        return _accuse(job, left_out, waits)  # type: ignore[arg-type]
    who = tuple(sorted(circle))
    note = f"{_list(who)} wait for each other in a circle: groups used in different order"
    return _finding("flight-deadlock", "user_code", "retry", 0.4, Culprit("rank", who), job.lines(who), note)


def _accuse(job: _Job, accused: Mapping[int, Why], waits: Mapping[int, tuple[int, ...]]) -> Finding:
    who = tuple(sorted(accused))
    reasons = set(accused.values())
    behind = sum(1 for rank, whom in waits.items() if whom and rank not in accused)
    has, is_ = ("has", "is") if len(who) == 1 else ("have", "are")
    category: Category = "unknown"
    action: Action = "retry"
    if reasons == {"passed"} and job.are_on_host(who):
        confidence, told = 0.4, f"{has} not finished what peers finished long ago"
    elif reasons == {"passed"}:
        category, action, confidence = "gpu_hardware", "evict", 0.55
        told = f"{has} not finished what peers finished long ago: the device does not get on"
    elif reasons == {"unstarted"}:
        confidence, told = 0.5, f"{has} called it as the others, but the device has not begun it"
    elif reasons == {"skipped"}:
        category, action, confidence = "user_code", "user_code", 0.7
        left_out = ", ".join(dict.fromkeys(job.left_out(rank) for rank in who))
        told = f"{has} gone on without {left_out}, which always came first before"
    elif reasons == {"empty"}:
        confidence, told = 0.6, f"{is_} alive, but recorded nothing: interpreter held (GIL) or host stalled"
    elif reasons == {"no dump"}:
        confidence, told = 0.4, "gave no dump: gone, stopped, or not collected"
    else:
        confidence, told = 0.6, f"{has} not called what the others wait in"
    others = "1 rank waits" if behind == 1 else f"{behind} ranks wait"
    note = f"{_list(who)} {told}; {others} for that, directly or through others"
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
        self._groups = completed(found)
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
        self._over: dict[tuple[str, int], bool] = {}
        """Whether some member is done with a collective, by group and number."""
        self._absent: dict[tuple[str, int, bool], tuple[int, ...]] = {}
        """Who has not come to a collective."""
        self._awaited: dict[tuple[str, str, int], set[int]] = defaultdict(set)
        self._beside: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        self._passed = {rank for rank in found.ranks if self._is_passed(rank)}

    def recording(self, rank: int) -> Recording | None:
        return self._found.ranks.get(rank)

    def group(self, name: str) -> Group:
        return self._groups[name]

    @property
    def recordings(self) -> Iterable[Recording]:
        return self._found.ranks.values()

    def oldest(self, rank: int) -> Operation | None:
        """The pending operation that a rank stands in; None if it has just come there."""
        recording = self.recording(rank)
        one = next((one for one in recording.operations if one.is_pending), None) if recording else None
        if one is None or recording is None or (one.since and recording.time and recording.time - one.since < YOUNG_S):
            return None
        return one

    def waits_for(self, rank: int) -> tuple[int, ...]:
        oldest = self.oldest(rank)
        if oldest is None or (rank in self._passed and not oldest.on_host):
            return ()
        members = self._groups[oldest.group].members
        if oldest.is_transfer:
            peer = oldest.peer
            if peer is not None and peer < len(members):
                other = members[peer]
            elif len(members) == 2 and rank in members:
                other = members[1 - members.index(rank)]
            else:
                return ()
            return (other,) if other != rank and not self._has_counterpart(other, oldest) else ()
        # the same for all who wait there: a job may have ten thousand ranks
        key = (oldest.group, oldest.sequence, oldest.is_started)
        if key not in self._absent:
            self._absent[key] = tuple(one for one in members if not self._has_reached(one, oldest))
        absent = self._absent[key]
        return absent if self._has_reached(rank, oldest) else tuple(one for one in absent if one != rank)

    def why(self, rank: int, waits: Mapping[int, tuple[int, ...]]) -> Why:
        recording = self.recording(rank)
        if recording is None:
            return "no dump"
        if not recording.count:
            return "empty"
        if rank in self._passed:
            return "passed"
        if self.has_left_out(rank, waits):
            return "skipped"
        first = next((one for one in recording.operations if one.is_pending), None)
        if first is None:
            return "absent"
        return "arrived" if first.is_started or not self._is_begun_by_peers(rank, first) else "unstarted"

    def has_left_out(self, rank: int, waits: Mapping[int, tuple[int, ...]]) -> bool:
        """Others wait for it in what it has left out by its own habit."""
        if not self._awaited:
            for other, whom in waits.items():
                if whom and (oldest := self.oldest(other)) is not None:
                    self._awaited[_place(oldest)].update(whom)
        missed = self.missed(rank)
        return missed is not None and rank in self._awaited.get(_place(missed), ()) and not self._goes_with_most(rank)

    def _goes_with_most(self, rank: int) -> bool:
        """Most who stand where it stands have departed from their habits, too: the program goes that way now."""
        if not self._beside:
            for other in self._found.ranks:
                if (oldest := self.oldest(other)) is not None:
                    self._beside[_place(oldest)].append(other)
        here = self.oldest(rank)
        beside = [other for other in self._beside[_place(here)] if other != rank] if here is not None else []
        return bool(beside) and 2 * sum(self.missed(other) is not None for other in beside) > len(beside)

    def missed(self, rank: int) -> Operation | None:
        recording = self.recording(rank)
        return recording.missed if recording else None

    def left_out(self, rank: int) -> str:
        one = self.missed(rank)
        return f"{one.name} #{one.sequence} of group {self._groups[one.group]}" if one else "an operation"

    def are_on_host(self, ranks: Iterable[int]) -> bool:
        return all(one.on_host for rank in ranks if (one := self.oldest(rank)) is not None)

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
        if first is not None and first.sequence == where.sequence and where.is_started and not first.is_started:
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

    def _is_begun_by_peers(self, rank: int, what: Operation) -> bool:
        firsts = (self._first[other].get(what.group) for other in self._groups[what.group].members if other != rank)
        return any(one is not None and one.is_started and one.sequence == what.sequence for one in firsts)

    def _is_passed(self, rank: int) -> bool:
        if self.oldest(rank) is None:
            return False
        for name, first in self._first[rank].items():
            key = (name, first.sequence)
            if key not in self._over:
                # which it cannot be for the rank itself
                self._over[key] = any(self._has_finished(other, first) for other in self._groups[name].members)
            if self._over[key] and not first.name.startswith(_ONE_SIDED):
                return True
        return False

    def _has_finished(self, rank: int, what: Operation) -> bool:
        first = self._first[rank].get(what.group)
        if first is not None:
            return first.sequence > what.sequence
        return self._last[rank].get(what.group, -1) >= what.sequence


def _place(one: Operation) -> tuple[str, str, int]:
    return one.group, one.name, one.sequence


def _mismatch(job: _Job) -> Finding | None:
    """Members of a group that were told to do different things under the same number."""
    called: dict[tuple[str, int], dict[int, list[Operation]]] = defaultdict(lambda: defaultdict(list))
    for recording in job.recordings:
        for one in recording.operations:
            if not one.is_transfer and (one.is_pending or one.shape):
                called[one.group, one.sequence][recording.rank].append(one)
    for (name, number), by_rank in sorted(called.items()):
        kinds = Counter(_signature(operations) for operations in by_rank.values())
        if len(kinds) < 2 or not any(one.is_pending for told in by_rank.values() for one in told):
            continue
        (usual, most), *others = kinds.most_common()
        odd = tuple(sorted(rank for rank, told in by_rank.items() if _signature(told) != usual))
        # whoever was wont to come here with something else, as the others have now
        kept = {(name, told[0].name, number, shape) for told in by_rank.values() for shape in ((), told[0].shape)}
        out_of_habit = tuple(
            rank
            for rank in sorted(by_rank)
            if (missed := job.missed(rank)) and (missed.group, missed.name, missed.sequence, missed.shape) in kept
        )
        is_clear = most > sum(count for _, count in others)
        if out_of_habit and len(out_of_habit) * 2 <= len(by_rank):
            odd, is_clear = out_of_habit, True
        elif not is_clear:
            odd = tuple(sorted(by_rank))
        names = {tuple(one.name for one in told) for told in by_rank.values()}
        what = "operations" if len(names) > 1 else "sizes or types"
        note = f"different {what} under number {number} of group {job.group(name)}"
        note += f", unlike the others: {_list(odd)}" if is_clear else ", without a majority"
        rule = "flight-mismatch"
        if out_of_habit == odd:
            note += f", where {job.left_out(odd[0])} always came before"
            if not any(found.is_new for rank in odd if (found := job.recording(rank))):
                rule = "flight-order"
                note += ": called in another order, or left out"
        shown = [*odd, *(rank for rank in sorted(by_rank) if rank not in odd)][:16]
        evidence = tuple(
            f"rank {rank}: #{number} {by_rank[rank][0].name}, {by_rank[rank][0].shape}" for rank in sorted(shown)
        )
        culprit = Culprit("rank", odd[0] if len(odd) == 1 else odd) if is_clear else Culprit("code", note)
        return _finding(rule, "user_code", "user_code", 0.75, culprit, evidence, note)
    return None


def _signature(operations: list[Operation]) -> tuple[Any, ...]:
    return tuple((one.name, () if _UNEVEN.match(one.name) else one.shape) for one in operations)


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
