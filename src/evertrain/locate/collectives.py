"""Communication is stuck or slow: who has begun it, and what is the matter there?

Evidence is taken in this order, because each of these also looks like those that come after it:

    1. a process that is stopped, or has ended              host
    2. TCP time-outs in a row: nothing comes through        network
    3. a process that gets no processor                     host
    4. stuck: the rank that others wait for, blocked in nothing              outside, compute, storage
       slow: the rank whose own time explains what has become longer         compute, storage
    5. transfers take longer: what connections say, each against itself before    sender, receiver, network
    6. otherwise communication is not the cause, and stacks must decide

A stuck job is explained by the ends of its wait graph (`locate.blocking`): what speaks against a rank counts where the
others wait for it. Only durations and the order of operations are used, so clocks may go wrong by any amount.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from evertrain.locate import lateness, links, processors
from evertrain.locate.apart import apart
from evertrain.locate.blocking import Blocking, Grapher, Meeting
from evertrain.locate.lateness import Own, Transfer
from evertrain.locate.links import Found
from evertrain.locate.processors import Trouble
from evertrain.locate.words import named
from evertrain.model.collectives import (
    Communicator,
    Component,
    NodeTrace,
    RootCause,
    Step,
    Symptom,
)

_STILL_S = 0.7
"""Somebody has ended an operation since: nothing is stuck any more."""
_SLOWER = 1.15
_OWN_SHARE, _LEAST_OWN_S = 0.4, 0.001
_BETWEEN, _ELSEWHERE = 0.9, 0.15
"""So much of what has become longer lies between steps, though so much of the rank's work lies elsewhere."""
_BUSY_CORES = 0.5
_ASLEEP = 0.5
_APART_S, _LONGEST = 0.5, 1.5
"""One of several ranks outside is to blame if it has been there for so much longer than the others."""
_LAST = 0.6
_MOST_LINES = 8
_MOST_STEPS = 12


def judge(
    looks: Iterable[NodeTrace], symptom: Symptom | None = None, *, expected: Mapping[int, str] | None = None
) -> RootCause:
    """What one look at all ranks shows. `symptom`: what was noticed; None: whatever it is. `expected` are the nodes of
    all ranks that should have been seen."""
    return _Case(list(looks), symptom, expected or {}).verdict()


class _Case:
    def __init__(self, looks: Sequence[NodeTrace], symptom: Symptom | None, expected: Mapping[int, str]) -> None:
        traces = {one.rank: one for look in looks for one in look.ranks}
        self._ranks = {rank: one for rank, one in sorted(traces.items()) if not one.blind}
        self._nodes = {**expected, **{rank: one.node for rank, one in traces.items()}}
        comms: dict[str, Communicator] = {}
        for look in looks:
            for one in look.communicators:
                if one.members or one.id not in comms:
                    comms[one.id] = one
        stands = all((one.still_s or _STILL_S) >= _STILL_S for one in self._ranks.values())
        self._is_stuck = stands and symptom != "slow"
        self._symptom: Symptom = symptom or ("stuck" if stands else "slow")
        unseen = sorted(set(expected) - set(traces))
        blind = [f"rank {rank} on {one.node}: {one.blind}" for rank, one in traces.items() if one.blind]
        blind += [line for look in looks for line in look.blind]
        blind += [f"nothing came of {named(unseen)}"] if unseen else []
        self._blind = tuple(blind)
        self._grapher = Grapher(self._ranks, comms)

    def verdict(self) -> RootCause:
        if not self._ranks:
            found = self._nobody(["nothing was seen of any rank"], 0.0)
        elif self._is_stuck:
            found = self._stuck()
        else:
            found = self._slow()
        return replace(found, blind=self._blind[:_MOST_LINES])

    # --- stuck

    def _stuck(self) -> RootCause:
        halted = processors.halted(self._ranks)
        graph = self._grapher.graph(halted)
        outside, meetings = graph.ranks_at_end(), graph.meetings_at_end()
        suspects = {*outside, *(rank for one in meetings for rank in graph.inside[one])}
        return (
            self._halted(halted, graph)
            or self._by_links(links.cut(self._ranks), graph)
            or self._starved(graph, suspects)
            or self._outside(graph, outside)
            or self._mismatch(graph)
            or self._all_there(graph, meetings)
            or self._circle(graph)
            or self._nobody(["no rank waits for another that could be seen"], 0.2)
        )

    def _halted(self, halted: Mapping[int, str], graph: Blocking) -> RootCause | None:
        if not halted:
            return None
        if len(halted) == len(self._ranks):
            return self._nobody([f"all {len(halted)} ranks are stopped: somebody holds the job"], 0.8)
        lines = [f"rank {rank} on {self._node(rank)} {why}" for rank, why in halted.items()]
        return self._named("host", list(halted), [*lines, *self._waiters(graph, list(halted))], 0.95, graph)

    def _starved(self, graph: Blocking | None, suspects: Collection[int]) -> RootCause | None:
        found = processors.starved(self._ranks)
        if found is None or not (chosen := [rank for rank in found.ranks if rank in suspects]):
            return None
        return self._by_trouble(Trouble(tuple(chosen), found.evidence, found.confidence), graph)

    def _outside(self, graph: Blocking, outside: Sequence[int]) -> RootCause | None:
        seen = [rank for rank in outside if rank in self._ranks]
        if not seen and outside:
            lines = [f"{named(outside)}: others wait for {'it' if len(outside) == 1 else 'them'}, and nothing was seen"]
            return self._nobody([*lines, *self._waiters(graph, outside)], 0.3)
        if not seen:
            return None
        longest = max(self._ranks[rank].own_s for rank in seen)
        chosen = [rank for rank in seen if self._ranks[rank].own_s * _LONGEST + _APART_S >= longest]
        if 2 * len(chosen) > len(self._ranks) > 2:
            return self._nobody([f"{named(chosen)} are in no operation: too many to single out"], 0.3)
        component = self._at_work(chosen)
        lines = [self._stands(rank, component) for rank in chosen[:_MOST_LINES]]
        sure = 0.85 if len(chosen) == 1 else 0.6
        return self._named(component, chosen, [*lines, *self._waiters(graph, chosen)], sure, graph)

    def _at_work(self, chosen: Sequence[int]) -> Component:
        """What ranks are doing that are blocked in nothing."""
        traces = [self._ranks[rank] for rank in chosen]
        hosts = [one.now.host for one in traces if one.now.host is not None]
        if hosts and all(one.samples and one.uninterruptible >= _ASLEEP * one.samples for one in hosts):
            return "storage"
        # who waits for a processor would compute, too
        if hosts and all(one.seconds > 0 and one.cpu_s + one.delay_s >= _BUSY_CORES * one.seconds for one in hosts):
            return "compute"
        return "storage" if all(one.is_between for one in traces) else "outside"

    def _stands(self, rank: int, component: Component) -> str:
        one = self._ranks[rank]
        what = {
            "storage": "waits for data or storage", "compute": "computes",
            "outside": "does nothing",
        }[component]  # fmt: skip
        where = ", and has posted nothing since its last step" if one.is_between else ""
        return f"rank {rank} on {one.node} is blocked in no operation for {one.own_s:.1f} s and {what}{where}"

    def _mismatch(self, graph: Blocking) -> RootCause | None:
        """Members that do different things under one number can never meet."""
        for meeting, waiting in graph.inside.items():
            calls = {rank: one for rank in waiting if (one := self._ranks[rank].blocked) is not None}
            if meeting.is_transfer or len({one.op for one in calls.values()}) < 2:
                continue
            lines = [f"rank {rank}: {one.op} number {one.seq}" for rank, one in list(calls.items())[:_MOST_LINES]]
            told = self._grapher.told(meeting, "operation")
            return self._nobody([f"different operations under one number: {told}", *lines], 0.8)
        return None

    def _all_there(self, graph: Blocking, meetings: Sequence[Meeting]) -> RootCause | None:
        """All have come to where they wait, and nothing moves: connections decide which of them it is."""
        if not meetings:
            return None
        groups = [frozenset(self._members(one)) for one in meetings]
        ways = links.ways(self._ranks, groups)
        lines = [f"all have come to {self._grapher.told(one)}, and nothing moves" for one in meetings[:_MOST_LINES]]
        found = links.unread(self._ranks, ways) or links.lossy(ways, len(self._ranks)) or links.full(ways)
        if found is not None:
            return self._by_links(found, graph, lines)
        if len(meetings) == 1 and meetings[0].is_transfer:
            link = (meetings[0].source, meetings[0].target)
            return self._by_links(Found("network", tuple(sorted(link)), link, tuple(lines), 0.4), graph)
        return self._nobody([*lines, "no connection says which of them it is"], 0.3)

    def _circle(self, graph: Blocking) -> RootCause | None:
        if not (circles := graph.circles()):
            return None
        ranks = sorted({one for circle in circles for one in circle if isinstance(one, int)})
        where = sorted(one for circle in circles for one in circle if isinstance(one, Meeting))
        lines = [f"{named(graph.inside[one])}: in {self._grapher.told(one)}" for one in where[:_MOST_LINES]]
        head = f"{named(ranks)} wait for each other in a circle: the program calls its operations in orders that"
        return self._nobody([f"{head} cannot meet", *lines], 0.8)

    # --- slow

    def _slow(self) -> RootCause:
        halted = processors.halted(self._ranks)
        found = (
            (self._halted(halted, self._grapher.graph(halted)) if halted else None)
            or self._by_trouble(processors.paused(self._ranks), None)
            or self._by_links(links.cut(self._ranks), None)
            or self._starved(None, self._ranks)
        )
        if found is not None:
            return found
        slowdown = lateness.slowdown(self._ranks)
        if slowdown is None:
            return self._nobody(["too few operations have ended to compare them with those before"], 0.1)
        if slowdown < _SLOWER:
            return self._nobody([f"operations follow each other as before ({slowdown:.2f} times the interval)"], 0.3)
        owns, all_transfers = lateness.own_times(self._ranks), lateness.transfers(self._ranks)
        longer = [one for one in all_transfers if one.is_longer and one.excess_s > 0]
        longer = [one for one in longer if one.excess_s * 4 >= longer[0].excess_s]
        all_own = self._all_own(owns)
        return (
            self._own(owns, all_transfers)
            or self._connections(longer, is_general=all_own is not None)
            or all_own
            or self._transfers(longer)
            or self._nobody(["neither the time that ranks take for themselves nor their transfers explain it"], 0.3)
        )

    def _own(self, owns: Sequence[Own], all_transfers: Sequence[Transfer]) -> RootCause | None:
        """Who takes longer by itself, and makes the others wait."""
        much = _much(owns)
        first = apart({one.rank: one.own_s for one in owns})
        chosen = [one for one in much if one.rank in first]
        if not chosen or len(chosen) < len(first) or 2 * len(chosen) > len(owns) > 2:
            return None
        is_between = all(one.between_s >= _BETWEEN * one.own_s and one.elsewhere >= _ELSEWHERE for one in chosen)
        component: Component = "storage" if is_between else "compute"
        rest = next(iter(owns[len(chosen) :]), None)
        lines = []
        for one in chosen[:_MOST_LINES]:
            where = ", all of it between its steps" if is_between else ""
            lines.append(
                f"rank {one.rank} on {self._node(one.rank)} takes {one.own_s * 1e3:.1f} ms more by itself for each "
                f"operation, {one.share:.0%} of what has become longer for it{where}"
            )
        if rest is not None:
            lines.append(f"rank {rest.rank}, the next: {rest.own_s * 1e3:.1f} ms more")
        ranks = [one.rank for one in chosen]
        path, waiting = self._held_up(ranks, all_transfers)
        found = self._named(component, ranks, [*lines, *waiting], 0.85 if len(ranks) == 1 else 0.65, None)
        return replace(found, path=(*path, *found.path), first_s=self._began(ranks, by_own=True))

    def _all_own(self, owns: Sequence[Own]) -> RootCause | None:
        much = _much(owns)
        if 2 * len(much) <= len(owns):
            return None
        return self._nobody([f"{named(sorted(one.rank for one in much))} all take longer by themselves"], 0.5)

    def _connections(self, longer: Sequence[Transfer], *, is_general: bool) -> RootCause | None:
        """What the connections show along which transfers take longer; or all of them, as a halt shows in none. Where
        all ranks take longer by themselves (`is_general`), TCP sends again what only waits for a processor, and ranks
        read late: only data that does not get out counts."""
        if longer and (crowded := links.crowded(self._ranks)) is not None:
            return self._by_connections(crowded, longer)
        groups = {self._affected(one) for one in longer}
        for among in (groups, None) if groups else (None,):
            ways = links.ways(self._ranks, among)
            found = links.full(ways)
            if found is None and not is_general:
                found = links.lossy(ways, len(self._ranks))
                # elsewhere, what nobody has asked for yet waits as well
                found = found or (links.unread(self._ranks, ways) if among == (groups or None) else None)
            if found is not None:
                return self._by_connections(found, longer)
        return None

    def _transfers(self, longer: Sequence[Transfer]) -> RootCause | None:
        if not longer:
            return None
        common = frozenset.intersection(*(one.members for one in longer))
        lines = [self._takes_longer(one) for one in longer[:_MOST_LINES]]
        if len(longer) > 1 and len(common) == 1:
            return self._named("network", sorted(common), lines, 0.5, None)
        return self._nobody([*lines, "no connection says which of them it is"], 0.3)

    def _by_connections(self, found: Found, longer: Sequence[Transfer]) -> RootCause:
        chosen = self._by_links(found, None, [self._takes_longer(one) for one in longer[:2]])
        assert chosen is not None
        path = self._slow_path(found.ranks, longer)
        return replace(chosen, path=(*path, *chosen.path), first_s=self._began(found.ranks, by_own=False))

    def _affected(self, one: Transfer) -> frozenset[int]:
        comm, _, source, target = one.key
        return frozenset((source, target)) if target >= 0 else frozenset(self._grapher.members(comm)) or one.members

    def _takes_longer(self, one: Transfer) -> str:
        assert one.before_s is not None
        return (
            f"{self._kind(one)} takes {one.took_s * 1e3:.1f} ms from the last one's coming on, "
            f"{one.took_s / max(one.before_s, 1e-9):.1f} times as long as before"
        )

    def _kind(self, one: Transfer) -> str:
        comm, op, source, target = one.key
        if target >= 0:
            return f"a transfer from rank {source} to rank {target}"
        return f"{op} of group {self._grapher.group(comm)}"

    def _held_up(self, ranks: Sequence[int], all_transfers: Sequence[Transfer]) -> tuple[tuple[Step, ...], list[str]]:
        """The ways along which others wait for these, and a line for each group in which they come last."""
        lasts = [one for one in all_transfers if one.last is not None and one.last_share >= _LAST]
        lines = [
            f"rank {one.last} comes last in {one.last_share:.0%} of {self._kind(one)}"
            for one in lasts
            if one.last in ranks
        ]
        steps: list[Step] = []
        seen, open_ones = set(ranks), list(ranks)
        while open_ones and len(steps) < _MOST_STEPS:
            holder = open_ones.pop(0)
            for one in lasts:
                if one.last != holder:
                    continue
                for rank in sorted(one.members - seen)[:_MOST_STEPS]:
                    seen.add(rank)
                    open_ones.append(rank)
                    steps.append(Step(rank, self._node(rank), f"waits in {self._kind(one)}", (holder,)))
        return tuple(reversed(steps[:_MOST_STEPS])), lines[:_MOST_LINES]

    def _slow_path(self, ranks: Collection[int], longer: Sequence[Transfer]) -> tuple[Step, ...]:
        steps: dict[int, Step] = {}
        for one in longer:
            holders = tuple(sorted(one.members & set(ranks)))
            for rank in sorted(one.members - set(ranks)) if holders else ():
                steps.setdefault(rank, Step(rank, self._node(rank), f"waits in {self._kind(one)}", holders))
        return tuple(steps.values())[:_MOST_STEPS]

    # --- what the answers are made of

    def _by_trouble(self, found: Trouble | None, graph: Blocking | None) -> RootCause | None:
        if found is None:
            return None
        lines = [*found.evidence, *(self._waiters(graph, found.ranks) if graph is not None else [])]
        return self._named("host", list(found.ranks), lines, found.confidence, graph)

    def _by_links(self, found: Found | None, graph: Blocking | None, more: Sequence[str] = ()) -> RootCause | None:
        if found is None:
            return None
        if not found.ranks:
            return self._nobody([*found.evidence, *more], found.confidence)
        named_one = self._named(found.component, list(found.ranks), [*found.evidence, *more], found.confidence, graph)
        return replace(named_one, link=found.link)

    def _named(
        self, component: Component, ranks: Sequence[int], lines: Sequence[str], sure: float, graph: Blocking | None
    ) -> RootCause:
        path = self._grapher.path(graph, ranks)[:_MOST_STEPS] if graph is not None else ()
        last = tuple(
            Step(rank, self._node(rank), lines[at] if at < len(lines) else component)
            for at, rank in enumerate(ranks[:_MOST_LINES])
        )
        return RootCause(
            symptom=self._symptom,
            component=component,
            ranks=tuple(ranks),
            nodes=tuple(dict.fromkeys(self._nodes[rank] for rank in ranks if rank in self._nodes)),
            first_s=self._stands_since(ranks) if graph is not None else self._began(ranks, by_own=False),
            confidence=round(sure, 2),
            evidence=tuple(dict.fromkeys(lines)),
            path=(*path, *last),
        )

    def _nobody(self, lines: Sequence[str], sure: float) -> RootCause:
        return RootCause(symptom=self._symptom, component="none", confidence=sure, evidence=tuple(dict.fromkeys(lines)))

    def _node(self, rank: int) -> str:
        return self._nodes.get(rank, "an unknown node")

    def _stands_since(self, ranks: Sequence[int]) -> float | None:
        """Of the first of them that was seen; of none, when those who wait have stood still."""
        seen = [one.still_s for rank in ranks if (one := self._ranks.get(rank)) is not None]
        return seen[0] if seen else max((one.still_s or 0.0 for one in self._ranks.values()), default=None)

    def _began(self, ranks: Collection[int], *, by_own: bool) -> float | None:
        seen = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        found = [since for one in seen if (since := lateness.began(one, by_own=by_own)) is not None]
        return found[0] if found else None

    def _members(self, meeting: Meeting) -> tuple[int, ...]:
        return (
            (meeting.source, meeting.target)
            if meeting.is_transfer and meeting.source >= 0
            else self._grapher.members(meeting.comm)
        )

    def _waiters(self, graph: Blocking, ranks: Collection[int]) -> list[str]:
        return self._grapher.waiters(graph, ranks, _MOST_LINES)


def _much(owns: Sequence[Own]) -> list[Own]:
    """Who has become slower by itself."""
    return [one for one in owns if one.share >= _OWN_SHARE and one.own_s >= _LEAST_OWN_S]
