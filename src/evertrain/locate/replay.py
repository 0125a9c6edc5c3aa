"""Which node spoils the job's numbers, if only the job itself shows it?

Groups of nodes replay the job, cut in two directions. Node x of z = m · n belongs to group x // m of the horizontal
phase and to group x % n of the vertical one; same data, seed and weights, so healthy groups agree bit by bit, within a
phase and across phases. The bad node stands where a group that differs in one phase meets one that differs in the
other.

A fault may show in a fraction of the runs only, and there may be several: phases are repeated until what differs is
explained, and then each node that would explain it is tried again among nodes of which nothing is known. All that is
sound only as far as healthy groups do agree: a script that gives several results on healthy nodes looks like a fault
that shows now and then. So the last replay has groups without any suspect, too, and whoever differs there acquits all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from evertrain.model.replays import Group as Group
from evertrain.model.replays import Phase
from evertrain.model.words import counted

REPEATS = 3
"""A phase in which nothing differs, and a re-test, are run so often at most."""
MOST_ODD = 3
"""Where more than one in so many groups differs, it is not nodes that are at fault."""
SURE, LIKELY, UNSURE = 0.95, 0.8, 0.3
"""Confidence: what differs always does; now and then; it could not be brought down to nodes."""


class Division(Struct, frozen=True):
    """z = m · n nodes in n groups of m, in two directions."""

    m: int
    """Nodes a group: whole replicas of the model, so that only the data-parallel size is not the job's own."""
    n: int

    @property
    def nodes(self) -> int:
        return self.m * self.n

    @property
    def most_solutions(self) -> int:
        """So many nodes at most are in one group of each direction; 1 where m <= n."""
        return -(-self.m // self.n)

    def members(self, phase: Phase, number: int) -> range:
        if phase == "horizontal":
            return range(number * self.m, (number + 1) * self.m)
        return range(number, self.nodes, self.n)

    def solutions(self, a: int, b: int) -> range:
        """All x with x // m = a and x % n = b. None, where m < n, for some pairs: two nodes, or none, are behind it."""
        start = a * self.m
        return range(start + (b - start) % self.n, start + self.m, self.n)


def divide(nodes: int, nodes_per_replica: int) -> Division:
    """m = k replicas for the largest k that divides their number and leaves m <= n; one replica where none does."""
    if nodes < 1 or nodes_per_replica < 1 or nodes % nodes_per_replica:
        raise ValueError(f"{counted(nodes, 'node')} are no whole number of replicas of {nodes_per_replica}")
    replicas = nodes // nodes_per_replica
    k = next(
        k for k in range(replicas, 0, -1) if k == 1 or (replicas % k == 0 and k * k * nodes_per_replica <= replicas)
    )
    return Division(k * nodes_per_replica, replicas // k)


class Result(Struct, frozen=True):
    """What a group's replay gave. `digest` None: nothing, which is no evidence; it is asked again."""

    group: Group
    digest: str | None


class Conclusion(Struct, frozen=True, kw_only=True):
    """The end of a replay."""

    nodes: tuple[str, ...] = ()
    """To blame."""
    suspects: tuple[str, ...] = ()
    """At least one of these may be to blame, too; there is not enough to say which."""
    confidence: float
    because: str


class Replay(Struct, frozen=True):
    """Says which groups replay next (at the same time, they share no node), takes their results, until a conclusion.

    All that it knows are the results so far: it can be stored and rebuilt at any point.
    """

    nodes: tuple[str, ...]
    division: Division
    repeats: int = REPEATS
    rounds: tuple[tuple[Result, ...], ...] = ()

    @property
    def asked(self) -> tuple[Group, ...]:
        """Empty: there is a conclusion."""
        found = _consider(self)
        return () if isinstance(found, Conclusion) else found

    @property
    def usual(self) -> str | None:
        """What healthy groups give; None: that cannot be said."""
        return _Evidence(self).reference

    @property
    def conclusion(self) -> Conclusion | None:
        found = _consider(self)
        return found if isinstance(found, Conclusion) else None

    def taken(self, digests: Sequence[str | None]) -> Replay:
        """With the results of the groups that were asked, in their order."""
        groups = self.asked
        if len(digests) != len(groups):
            raise ValueError(f"{counted(len(digests), 'result')} for {counted(len(groups), 'group')}")
        return replace(self, rounds=(*self.rounds, tuple(map(Result, groups, digests))))


def begin(nodes: Sequence[str], nodes_per_replica: int, repeats: int = REPEATS) -> Replay:
    """A replay on all nodes of a job, in the order of their ranks."""
    if len(set(nodes)) != len(nodes):
        raise ValueError("a node is given twice")
    return Replay(tuple(nodes), divide(len(nodes), nodes_per_replica), repeats)


class _Evidence:
    """What the results say, digested."""

    def __init__(self, replay: Replay) -> None:
        self.division = replay.division
        self.results = [result for one in replay.rounds for result in one if result.digest is not None]
        self.reference = _reference(result.digest for result in self.results)
        self.tries = Counter(
            result.group.number for one in replay.rounds for result in one if result.group.phase == "retest"
        )
        self.rounds: Counter[Phase] = Counter(one[0].group.phase for one in replay.rounds)
        self.heard: dict[Phase, set[int]] = {"horizontal": set(), "vertical": set(), "retest": set(), "control": set()}
        self.odd: dict[Phase, set[int]] = {"horizontal": set(), "vertical": set(), "retest": set(), "control": set()}
        self.is_noisy = False
        for result in self.results:
            phase, number = result.group.phase, result.group.number
            is_odd = self.reference is not None and result.digest != self.reference
            if number in self.heard[phase] and is_odd != (number in self.odd[phase]):
                self.is_noisy = True
            self.heard[phase].add(number)
            if is_odd:
                self.odd[phase].add(number)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Groups of one node are the same ones in both directions."""
        return ("horizontal",) if self.division.m == 1 else ("horizontal", "vertical")

    def candidates(self) -> list[int]:
        """All nodes at which groups that differ meet."""
        if self.division.m == 1:
            return sorted(self.odd["horizontal"])
        pairs = ((a, b) for a in self.odd["horizontal"] for b in self.odd["vertical"])
        return sorted(x for a, b in pairs for x in self.division.solutions(a, b))

    def unexplained(self, by: Iterable[int]) -> dict[Phase, set[int]]:
        """Groups that differ and hold none of these nodes."""
        by = list(by)
        found = {"horizontal": self.odd["horizontal"] - {x // self.division.m for x in by}}
        if self.division.m > 1:
            found["vertical"] = self.odd["vertical"] - {x % self.division.n for x in by}
        return found  # type: ignore[return-value]

    def in_odd_groups(self, groups: dict[Phase, set[int]]) -> set[int]:
        return {
            x for phase, numbers in groups.items() for number in numbers for x in self.division.members(phase, number)
        }


def _reference(digests: Iterable[str | None]) -> str | None:
    """What healthy groups give: what at least two runs gave, and more of them than gave anything else.

    It need not be the majority: two faulty groups hardly ever agree, and two healthy ones always do.
    """
    (first, most), *others = [*Counter(digests).most_common(2), (None, 0)]
    return first if most >= 2 and most > max((count for _, count in others), default=0) else None


def _consider(replay: Replay) -> tuple[Group, ...] | Conclusion:
    """The groups to run next, or what all results come to."""
    seen = _Evidence(replay)
    division = replay.division
    if division.n == 1:
        why = f"{counted(division.nodes, 'node')} hold one replica: there is no second group to compare with"
        return _nothing(replay, seen, why)
    for phase in seen.phases:
        if seen.rounds[phase] == 0:
            return _phase(replay, phase, range(division.n))
    for phase in seen.phases:
        missing = set(range(division.n)) - seen.heard[phase]
        if missing and seen.rounds[phase] < replay.repeats:
            return _phase(replay, phase, sorted(missing))
    if seen.reference is None:
        again = _least(replay, seen, seen.phases)
        return again or _nothing(replay, seen, "no result came up more often than all others: the groups do not agree")
    for phase in seen.phases:
        if len(seen.odd[phase]) > max(1, division.n // MOST_ODD):
            text = f"{len(seen.odd[phase])} of {counted(division.n, 'group')} differ: the replay is not deterministic"
            return _nothing(replay, seen, text)

    candidates = seen.candidates()
    lacking = _lacking(seen, candidates)
    if not candidates or lacking:
        again = _least(replay, seen, lacking or seen.phases)
        if again:
            return again
    if not candidates:
        return _not_found(replay, seen)
    return _retest(replay, seen, candidates)


def _lacking(seen: _Evidence, candidates: Sequence[int]) -> list[Phase]:
    """Phases that have not shown yet what the other one did."""
    unexplained = seen.unexplained(candidates)
    other: dict[Phase, Phase] = {"horizontal": "vertical", "vertical": "horizontal"}
    return [other[phase] for phase in seen.phases if unexplained.get(phase)]


def _least(replay: Replay, seen: _Evidence, phases: Sequence[Phase]) -> tuple[Group, ...]:
    """Once more the one of these that was run least often; empty: often enough."""
    phase = min(phases, key=lambda one: seen.rounds[one])
    return _phase(replay, phase, range(replay.division.n)) if seen.rounds[phase] < replay.repeats else ()


def _phase(replay: Replay, phase: Phase, numbers: Iterable[int]) -> tuple[Group, ...]:
    return tuple(_group(replay, phase, number, replay.division.members(phase, number)) for number in numbers)


def _group(replay: Replay, phase: Phase, number: int, members: Iterable[int]) -> Group:
    return Group(phase, number, tuple(replay.nodes[x] for x in members))


def _retest(replay: Replay, seen: _Evidence, candidates: Sequence[int]) -> tuple[Group, ...] | Conclusion:
    """Each candidate among nodes that are none, until those that differ again explain everything.

    A single one, too: beside it all others replay without it, which shows whether healthy groups always agree.
    """
    if seen.odd["control"]:
        return _nothing(replay, seen, "nodes of which nothing is known differ, too: the replay is not deterministic")
    guilty = [x for x in candidates if x in seen.odd["retest"]]
    open_groups = seen.in_odd_groups(seen.unexplained(guilty))
    pending = [
        x
        for x in candidates
        if x not in guilty and seen.tries[x] < replay.repeats and (x in open_groups or x not in seen.heard["retest"])
    ]
    if pending and (groups := tuple(_fill(replay, seen, candidates, pending))):
        return groups
    if len(candidates) == 1 and not any(seen.unexplained(candidates).values()):
        return _convicted(replay, seen, candidates)
    if guilty and not open_groups:
        return _convicted(replay, seen, guilty)
    left = [x for x in candidates if x in open_groups] or sorted(open_groups)
    tried = f"tried one by one {counted(len(guilty), 'node')} showed it again, which does not explain all of them"
    return Conclusion(
        nodes=_names(replay, guilty),
        suspects=_names(replay, left),
        confidence=_confidence(seen, guilty) if guilty else UNSURE,
        because=f"{_odd_ones(replay, seen)}; {tried}",
    )


def _fill(replay: Replay, seen: _Evidence, candidates: Sequence[int], pending: Sequence[int]) -> Iterator[Group]:
    """Groups for as many candidates as there are others to fill them; those who are left over replay without any."""
    size = replay.division.m
    odd = seen.in_odd_groups({phase: seen.odd[phase] for phase in seen.phases})
    clean = [x for x in range(replay.division.nodes) if x not in odd]
    # other company each time: one of them may have a fault that has not shown yet
    turn = seen.rounds["retest"] * (size - 1) % len(clean) if clean else 0
    clean = [*clean[turn:], *clean[:turn]]
    doubtful = sorted(odd - set(candidates))
    # one group of clean ones is worth more than a second candidate tried at once, but not than the first
    kept = size if len(clean) + len(doubtful) >= 2 * size - 1 and len(clean) >= size else 0
    others = [*clean[kept:], *doubtful]
    used = 0
    for x in pending:
        if len(others) - used < size - 1:
            break
        yield _group(replay, "retest", x, [x, *others[used : used + size - 1]])
        used += size - 1
    if size == 1 or used:
        alone = [*clean[:kept], *clean[kept + used :]]
        for number in range(len(alone) // size):
            yield _group(replay, "control", number, alone[number * size : (number + 1) * size])


def _convicted(replay: Replay, seen: _Evidence, guilty: Sequence[int]) -> Conclusion:
    names = _names(replay, guilty)
    again = ", and differ again with other nodes" if set(guilty) <= seen.odd["retest"] else ""
    return Conclusion(
        nodes=names,
        confidence=_confidence(seen, guilty),
        because=f"{_odd_ones(replay, seen)}; they meet at {', '.join(names)}{again}",
    )


def _confidence(seen: _Evidence, guilty: Sequence[int]) -> float:
    return SURE if set(guilty) <= seen.odd["retest"] and not seen.is_noisy else LIKELY


def _not_found(replay: Replay, seen: _Evidence) -> Conclusion:
    runs = seen.rounds["horizontal"] + seen.rounds["vertical"]
    left = seen.in_odd_groups(seen.unexplained(()))
    if not left:
        text = f"all groups agree bit by bit in {counted(runs, 'replay')}: no node computes otherwise than others"
        return Conclusion(confidence=SURE, because=text)
    text = f"{_odd_ones(replay, seen)}, and no node is in groups of both directions that differ, in {runs} replays"
    return Conclusion(suspects=_names(replay, sorted(left)), confidence=UNSURE, because=text)


def _nothing(replay: Replay, seen: _Evidence, why: str) -> Conclusion:
    differ = any(seen.odd.values()) or (seen.reference is None and len({one.digest for one in seen.results}) > 1)
    left = seen.in_odd_groups({phase: seen.odd[phase] for phase in seen.phases})
    suspects = _names(replay, sorted(left) or range(replay.division.nodes)) if differ else ()
    return Conclusion(suspects=suspects, confidence=UNSURE, because=why)


def _odd_ones(replay: Replay, seen: _Evidence) -> str:
    """`horizontal group 3 and vertical group 1 differ from 9 others`."""
    parts = [
        f"{phase} group{'s' if len(seen.odd[phase]) > 1 else ''} {', '.join(map(str, sorted(seen.odd[phase])))}"
        for phase in seen.phases
        if seen.odd[phase]
    ]
    groups = replay.division.n * len(seen.phases) - sum(len(seen.odd[phase]) for phase in seen.phases)
    now_and_then = " now and then" if seen.is_noisy else ""
    return f"{' and '.join(parts)} differ{now_and_then} from {counted(groups, 'other')}"


def _names(replay: Replay, positions: Iterable[int]) -> tuple[str, ...]:
    return tuple(replay.nodes[x] for x in positions)
