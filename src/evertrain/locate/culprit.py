"""On whom or what does a job hang? Stacks, pages, recorders and the kernel's word for each process, together.

Who waits for whom decides, never how many stand in one place:

    1. a frozen process                                     stopped, uninterruptible, held
    2. operations that cannot meet                          order, mismatch
    3. a rank in no operation at the end of the wait graph  loader, checkpoint, storage, device, outside, loop
    4. a circle                                             skipped, deadlock
    5. all are there                                        device, network
    6. otherwise                                            unknown, and nobody is named

Ranks inside operations are victims. What cannot be seen neither accuses nor acquits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from evertrain.locate import blocked, operations, parallel, recorded, words
from evertrain.locate.grouping import Merged, dominant, moved
from evertrain.locate.operations import SOMETHING, Waiting
from evertrain.locate.standing import Frozen, Standing, is_moving, standings
from evertrain.model.activity import Operation
from evertrain.model.findings import Category
from evertrain.model.stacks import Located, LocatedKind

_MOST_LINES = 8
_ONE_LOOK = 0.8
"""One capture alone does not tell moving from stuck: so much of the confidence is left."""

_CONFIDENCE: dict[LocatedKind, float] = {
    "stopped": 0.95, "uninterruptible": 0.9, "held": 0.8, "loader": 0.85, "checkpoint": 0.8, "storage": 0.75,
    "order": 0.8, "mismatch": 0.8, "skipped": 0.7, "deadlock": 0.7, "device": 0.6, "outside": 0.8, "loop": 0.75,
    "network": 0.5, "slow": 0.7, "unknown": 0.2,
}  # fmt: skip
_CATEGORY: dict[LocatedKind, Category] = {
    "loader": "hang_dataloader", "checkpoint": "storage", "storage": "storage", "skipped": "user_code",
    "order": "user_code", "mismatch": "user_code", "deadlock": "user_code", "loop": "user_code", "slow": "straggler",
}  # fmt: skip


def locate(
    now: Merged,
    earlier: Merged | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    idle: frozenset[int] = frozenset(),
) -> Located:
    """The verdict on a capture, and an earlier one if there is one; `idle` are ranks whose processes do nothing."""
    return _Case(now, earlier, mesh, idle).verdict()


class _Case:
    def __init__(
        self, now: Merged, earlier: Merged | None, mesh: Mapping[str, int] | None, idle: frozenset[int]
    ) -> None:
        self._now, self._earlier, self._mesh = now, earlier, mesh
        self._ranks = standings(now, earlier, idle)
        self._seen = [one for one in self._ranks.values() if one.stands != "unseen"]
        self._members: Callable[[str], tuple[int, ...]] = operations.membership(now, mesh)
        self._recorded = recorded.waits(now)
        self._judged = recorded.judge(now)

    def verdict(self) -> Located:
        if not self._seen:
            return self._unknown(["nothing was seen of any rank", *self._now.blind[:_MOST_LINES]], 0.0)
        if line := self._moves():
            return self._unknown([line], 0.1)
        waiting = self._graph()
        return (
            self._frozen(waiting)
            or self._cannot_meet()
            or self._outside(waiting)
            or self._outside(self._graph(outside=self._doubtful(waiting)))
            or self._unseen(waiting)
            or self._recorders("skipped")
            or self._circle(waiting)
            or self._recorders("deadlock")
            or self._behind(waiting)
            or self._recorders("device", "held")
            or self._all_there(waiting)
        )

    # --- the questions, in their order

    def _moves(self) -> str:
        if moving := is_moving(self._now, self._earlier):
            since = "between the captures" if self._earlier is not None else "a moment ago"
            return f"the job moves: the pages of {words.named(moving)} have changed {since}"
        if not self._now.activities and self._earlier is not None:
            went = {rank for rank, _ in moved(self._earlier, self._now, "trainer")}
            if len(went) * 2 > len(self._seen):
                return f"the job moves: the stacks of {len(went)} ranks have changed between the captures"
        return ""

    def _frozen(self, waiting: Waiting) -> Located | None:
        frozen = [one for one in self._seen if one.stands == "frozen"]
        kinds: dict[Frozen, LocatedKind] = {
            "stopped": "stopped", "ended": "outside", "uninterruptible": "uninterruptible", "held": "held",
        }  # fmt: skip
        for state, kind in kinds.items():
            chosen = [one for one in frozen if one.frozen == state]
            if state == "uninterruptible" and len({one.node for one in chosen}) > 1:
                kind = "storage"  # it is no disk, driver or mount of one machine
            if chosen:
                return self._named(kind, chosen, waiting)
        return None

    def _cannot_meet(self) -> Located | None:
        """Members of a group that do different things under the same number."""
        called: dict[tuple[str, int], dict[str, list[int]]] = {}
        for rank, one in self._ranks.items():
            last = one.activity.last if one.activity is not None else None
            if last is not None and not operations.is_transfer(last):
                called.setdefault((last.group, last.seq), {}).setdefault(last.op, []).append(rank)
        for (group, number), by_name in called.items():
            if len(by_name) < 2:
                continue
            (_, most), *others = sorted(by_name.items(), key=lambda pair: -len(pair[1]))
            fewer = sorted(rank for _, ranks in others for rank in ranks)
            odd = fewer if len(most) > len(fewer) else sorted([*most, *fewer])
            ahead = self._ahead(odd, most) if odd == fewer else []
            kind: LocatedKind = "skipped" if ahead else "order"
            if ahead:
                odd = ahead
            lines = [
                f"{words.named(ranks)}: {words.operation(Operation(group, name, number), self._now.groups)}"
                for name, ranks in by_name.items()
            ]
            head = f"different operations under number {number} of group {self._now.groups.get(group, group)}"
            return self._recorders("order", "skipped") or self._told(kind, odd, [head, *lines])
        return self._recorders("order", "mismatch")

    def _outside(self, waiting: Waiting) -> Located | None:
        """Ranks that others wait for and that are in no operation."""
        suspects = [self._ranks[rank] for rank in waiting.ranks_at_end() if rank in self._ranks]
        suspects = [one for one in suspects if one.stands in ("outside", "perhaps")]
        if not suspects and not waiting.inside:
            return self._nobody_waits()
        if not suspects:
            return None
        kinds = {one.rank: blocked.kind(one) for one in suspects}
        first = min(kinds.values(), key=blocked.RANKING.index)
        chosen = [one for one in suspects if kinds[one.rank] == first]
        if len(chosen) * 2 > len(self._seen) > 2:
            if first in ("storage", "checkpoint", "loader"):
                return self._told(first, [], [f"{len(chosen)} ranks: {blocked.line(chosen[0])}"])
            return self._unknown(
                [f"{len(chosen)} of {len(self._seen)} ranks are not where the others wait: too many to single out",
                 *map(blocked.line, chosen[:3])], 0.2, chosen
            )  # fmt: skip
        return self._named(first, chosen, waiting)

    def _doubtful(self, waiting: Waiting) -> list[int]:
        """Ranks whose page says that they wait, to whose operation all have come, and whose stack does not say so."""
        ends = set(waiting.operations_at_end())
        return [
            rank
            for operation in ends
            for rank in waiting.inside[operation]
            if self._ranks[rank].stands == "perhaps" and not blocked.is_in_torch(self._ranks[rank])
        ]

    def _unseen(self, waiting: Waiting) -> Located | None:
        unseen = [self._ranks[rank] for rank in waiting.ranks_at_end() if self._ranks[rank].stands == "unseen"]
        if not unseen:
            return None
        lines = [f"{one.who} was not seen, and others wait for it" for one in unseen[:_MOST_LINES]]
        missing = [f"nothing came from {', '.join(self._now.missing[:_MOST_LINES])}"] if self._now.missing else []
        return self._unknown([*lines, *missing], 0.2)

    def _circle(self, waiting: Waiting) -> Located | None:
        circles = waiting.circles()
        if not circles:
            return None
        ranks = sorted({one for circle in circles for one in circle if isinstance(one, int)})
        where = [one for circle in circles for one in circle if isinstance(one, Operation)]
        lines = [self._waits_in(one, waiting) for one in sorted(where, key=lambda one: -len(waiting.inside[one]))]
        most = max(where, key=lambda one: len(waiting.inside[one]))
        others = [rank for rank in ranks if rank not in waiting.inside[most]]
        ahead = self._ahead(others, waiting.inside[most])
        if ahead:
            missed = words.operation(most, self._now.groups)
            return self._told("skipped", ahead, [f"{words.named(ahead)} went on without {missed}", *lines])
        return self._told("deadlock", ranks, [f"{words.named(ranks)} wait for each other in a circle", *lines])

    def _behind(self, waiting: Waiting) -> Located | None:
        """A rank that has not finished what all its peers finished long ago."""
        late = [
            rank
            for one in waiting.operations_at_end()
            if one != SOMETHING and operations.passed(one, self._members(one.group), self._ranks)
            for rank in waiting.inside[one]
        ]
        if not late or len(late) * 2 > len(self._seen):
            return None
        lines = [
            f"{self._ranks[rank].who} has not finished {self._operation(rank)}, which its peers have left behind"
            for rank in late[:_MOST_LINES]
        ]
        return self._told("device", late, lines, share=0.75)

    def _all_there(self, waiting: Waiting) -> Located:
        """Nobody is outside and nothing moves: the operations that explain the others are what can be said."""
        ends = [one for one in waiting.operations_at_end() if one != SOMETHING]
        lines = [f"{self._waits_in(one, waiting)}; all have come, and nothing moves" for one in ends[:_MOST_LINES]]
        inside = sorted({rank for one in ends for rank in waiting.inside[one]})
        if not ends or SOMETHING in waiting.inside:
            return self._odd(waiting, lines)
        if len(inside) * 2 > len(self._seen):
            return self._told("network", [], lines or ["all have come to where they wait, and nothing moves"])
        found = self._told("network", inside, lines, share=0.8)
        return self._with_group(found, self._outliers() or inside)

    def _odd(self, waiting: Waiting, lines: list[str]) -> Located:
        """The wait graph tells nothing. What is left is who stands elsewhere than most, and what these share."""
        odd = self._outliers()
        if not odd:
            where = [self._waits_in(one, waiting) for one in waiting.inside if one != SOMETHING]
            return self._unknown([*lines, *where[:_MOST_LINES]] or ["the stacks accuse nobody"], 0.2)
        told = [f"{words.named(odd)} stand elsewhere than most", *lines]
        return self._with_group(self._unknown(told, 0.35), odd)

    def _nobody_waits(self) -> Located:
        kinds = {blocked.kind(one) for one in self._seen}
        if len(kinds) == 1 and (kind := next(iter(kinds))) in ("loader", "checkpoint", "storage"):
            chosen = self._seen if len(self._seen) == 1 else []
            told = f"all {len(self._seen)} ranks: {blocked.line(self._seen[0])}" if not chosen else ""
            return self._told(kind, [one.rank for one in chosen], [told or blocked.line(chosen[0])], share=0.8)
        if len(self._seen) == 1:
            return self._named(next(iter(kinds)), self._seen, None)
        return self._unknown(["no rank waits for another", *map(blocked.line, self._seen[:3])], 0.1)

    def _recorders(self, *kinds: LocatedKind) -> Located | None:
        found = self._judged
        if found is None or found.kind not in kinds:
            return None
        return self._told(found.kind, [rank for rank in found.ranks if rank in self._ranks], found.evidence)

    # --- what the answers are made of

    def _graph(self, outside: Collection[int] = ()) -> Waiting:
        return operations.graph(self._ranks, self._members, outside=outside, recorded=self._recorded)

    def _ahead(self, few: Sequence[int], many: Collection[int]) -> list[int]:
        """Those of a few that have left out what many wait in: they are further in the program."""
        steps = {rank: one.step or 0 for rank in (*few, *many) if (one := self._ranks[rank].activity) is not None}
        behind = min((steps[rank] for rank in many if rank in steps), default=None)
        if behind is not None and (further := [rank for rank in few if steps.get(rank, 0) > behind]):
            return further
        if len(few) * 3 > len(many):
            return []
        others = [self._ranks[rank] for rank in many]
        return list(few) if all(blocked.is_elsewhere(self._ranks[rank], others) for rank in few) else []

    def _outliers(self) -> list[int]:
        stages = (self._mesh or {}).get("pp", 1)
        usual, others = dominant(self._now.positions, "trainer", stages)
        common = {rank for one in usual for rank in one.ranks}
        return sorted({rank for one in others for rank in one.ranks} - common)

    def _operation(self, rank: int) -> str:
        inside = self._ranks[rank].inside
        return words.operation(inside, self._now.groups) if inside is not None else "an operation"

    def _waits_in(self, one: Operation, waiting: Waiting) -> str:
        ranks = waiting.inside[one]
        verb = "waits" if len(ranks) == 1 else "wait"
        return f"{words.named(ranks)} {verb} in {words.operation(one, self._now.groups)}"

    def _named(self, kind: LocatedKind, chosen: Sequence[Standing], waiting: Waiting | None) -> Located:
        lines = [blocked.line(one) for one in chosen[:_MOST_LINES]]
        ranks = [one.rank for one in chosen]
        it = "it" if len(chosen) == 1 else "them"
        for one, others in list((waiting.waiting_for(ranks) if waiting else {}).items())[:_MOST_LINES]:
            where = "operations" if one == SOMETHING else words.operation(one, self._now.groups)
            lines.append(f"{words.named(others)} {'waits' if len(others) == 1 else 'wait'} for {it} in {where}")
        share = 1.0 if waiting is not None and waiting.inside.keys() - {SOMETHING} else 0.8
        if any(one.stood is False for one in chosen):
            lines.append("its stack has changed between the captures, its page has not")
            share *= 0.8
        return self._told(kind, ranks, lines, share=share, category=blocked.category(kind, chosen))

    def _told(
        self,
        kind: LocatedKind,
        ranks: Iterable[int],
        lines: Iterable[str],
        *,
        share: float = 1.0,
        category: Category | None = None,
    ) -> Located:
        chosen = tuple(ranks)
        nodes = tuple(dict.fromkeys(node for rank in chosen if (node := self._ranks[rank].node)))
        captures = ((self._earlier.number,) if self._earlier is not None else ()) + (self._now.number,)
        found = Located(
            kind=kind,
            ranks=chosen,
            nodes=nodes,
            category=category or _CATEGORY.get(kind, "unknown"),
            confidence=round(_CONFIDENCE[kind] * share * (1.0 if self._earlier is not None else _ONE_LOOK), 2),
            evidence=tuple(lines),
            captures=captures,
        )
        if found.is_software:
            return found
        return msgspec.structs.replace(found, eviction=parallel.bounded(nodes, set(self._now.nodes.values())))

    def _unknown(self, lines: Iterable[str], confidence: float, odd: Sequence[Standing] = ()) -> Located:
        found = msgspec.structs.replace(self._told("unknown", (), lines), confidence=confidence)
        return self._with_group(found, [one.rank for one in odd])

    def _with_group(self, found: Located, odd: Collection[int]) -> Located:
        """With the parallel group that the odd ones share, and its nodes."""
        group = parallel.shared(odd, len(self._ranks), self._mesh, self._now.groups)
        if not group.ranks:
            return found
        nodes = dict.fromkeys(node for rank in group.ranks if (node := self._ranks[rank].node))
        line = f"{words.named(odd)} share {group.name}: {words.named(group.ranks)}"
        return msgspec.structs.replace(
            found,
            group=group.ranks,
            group_name=group.name,
            eviction=found.eviction or parallel.bounded(nodes, set(self._now.nodes.values())),
            evidence=(*found.evidence, line),
        )
