"""Which node computes other bits than it should? All run the same small model on the same input, each alone.

What is right is what most nodes with the same setting give, and what was stored for that setting before; where both are
known they must agree, or nobody is accused by either alone. A node that does not even agree with itself, beside others
that do, needs no vote. Nodes of different settings are never compared: another number of threads gives other bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from evertrain.model.diagnosis import Entry as Entry
from evertrain.model.diagnosis import Run as Run
from evertrain.model.diagnosis import Setting as Setting
from evertrain.model.words import counted

FEWEST = 2
"""Nodes that must agree to be a majority."""
FEWEST_TO_STORE = 3


class RankRuns(Struct, frozen=True, kw_only=True):
    """As one rank tells it: each different record once."""

    runs: tuple[str, ...]
    """Names of records, run by run."""
    records: dict[str, tuple[tuple[int, str, str], ...]]
    """`at`, place and digest of each entry."""


class NodeRuns(Struct, frozen=True, kw_only=True):
    """What one node gave, once or several times."""

    node: str
    setting: Setting
    runs: tuple[Run, ...]


class Difference(Struct, frozen=True, kw_only=True):
    """Why a node is accused."""

    node: str
    place: str
    """The first that differs, of the earliest one in all runs that do."""
    ranks: tuple[int, ...]
    """That differ there."""
    odd_runs: int
    runs: int
    against: str
    """What it was compared with, in words."""

    @property
    def evidence(self) -> str:
        ranks = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        return (
            f"{self.node}: {self.odd_runs} of {counted(self.runs, 'run')} differ from {self.against}, "
            f"first in {self.place} on local {ranks}"
        )


class Alignment(Struct, frozen=True, kw_only=True):
    accused: tuple[Difference, ...] = ()
    cleared: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    """Nothing can be said of these."""
    because: tuple[str, ...] = ()
    """Why not, one line each setting."""
    to_store: tuple[tuple[Setting, Run], ...] = ()
    """What enough nodes agree on and was not known yet."""


def merged(ranks: Mapping[int, RankRuns]) -> tuple[Run, ...]:
    """The runs of a node from those of its ranks; as many as all of them finished."""
    count = min((len(one.runs) for one in ranks.values()), default=0)
    return tuple(
        tuple(
            Entry(at, place, rank, digest)
            for rank, one in sorted(ranks.items())
            for at, place, digest in one.records[one.runs[number]]
        )
        for number in range(count)
    )


def judge(nodes: Iterable[NodeRuns], golden: Mapping[Setting, Run]) -> Alignment:
    """Who differs, setting by setting. `golden` is what was stored before."""
    by_setting: dict[Setting, list[NodeRuns]] = {}
    for one in nodes:
        if one.runs:
            by_setting.setdefault(one.setting, []).append(one)
    parts = [_judge(alike, golden.get(setting)) for setting, alike in by_setting.items()]
    return Alignment(
        accused=tuple(one for part in parts for one in part.accused),
        cleared=tuple(one for part in parts for one in part.cleared),
        undecided=tuple(one for part in parts for one in part.undecided),
        because=tuple(line for part in parts for line in part.because),
        to_store=tuple(one for part in parts for one in part.to_store),
    )


def _judge(nodes: Sequence[NodeRuns], stored: Run | None) -> Alignment:
    usual = {one.node: _usual(one.runs) for one in nodes}
    common = _majority(usual.values(), len(nodes))
    unsteady = [one.node for one in nodes if len(set(one.runs)) > 1]
    if len(nodes) > 1 and 2 * len(unsteady) > len(nodes):
        return _unknown(nodes, f"{len(unsteady)} of {counted(len(nodes), 'node')} do not repeat their own bits")
    if common is not None and stored is not None and common != stored:
        return _conflict(nodes, usual, common, stored)
    if common is not None:
        words = "what most nodes give" if stored is None else "what most nodes give and what was stored"
        part = _against(nodes, common, words)
        agreeing = sum(run == common for run in usual.values())
        new = stored is None and agreeing >= FEWEST_TO_STORE
        return replace(part, to_store=((nodes[0].setting, common),)) if new else part
    if stored is not None and (len(nodes) == 1 or stored in usual.values()):
        return _against(nodes, stored, "what was stored")
    steady = [one for one in nodes if one.node not in unsteady]
    if unsteady and steady:
        # who repeats itself may still be wrong for good, but who does not is broken
        return Alignment(
            accused=tuple(
                _difference(one, usual[one.node] or one.runs[0], "its own other runs")
                for one in nodes
                if one.node in unsteady
            ),
            undecided=tuple(one.node for one in steady),
            because=(f"{_names(steady)}: nothing to compare with",),
        )
    if len(nodes) == 1:
        return _unknown(nodes, "no other node with this setting, and nothing stored for it")
    known = "" if stored is None else ", nor is any of it what was stored"
    return _unknown(nodes, f"{counted(len(nodes), 'node')} with this setting have no majority{known}")


def _usual(runs: Sequence[Run]) -> Run | None:
    """What a node gives in more than half of its runs."""
    run, count = Counter(runs).most_common(1)[0]
    return run if 2 * count > len(runs) else None


def _majority(runs: Iterable[Run | None], nodes: int) -> Run | None:
    counted_runs = Counter(run for run in runs if run is not None)
    if not counted_runs:
        return None
    run, count = counted_runs.most_common(1)[0]
    return run if count >= FEWEST and 2 * count > nodes else None


def _against(nodes: Sequence[NodeRuns], norm: Run, words: str) -> Alignment:
    odd = [one for one in nodes if any(run != norm for run in one.runs)]
    return Alignment(
        accused=tuple(_difference(one, norm, words) for one in odd),
        cleared=tuple(one.node for one in nodes if one not in odd),
    )


def _conflict(nodes: Sequence[NodeRuns], usual: Mapping[str, Run | None], common: Run, stored: Run) -> Alignment:
    """Who differs from both is wrong by either; of the others nothing is said."""
    neither = [one for one in nodes if any(run not in (common, stored) for run in one.runs)]
    rest = [one for one in nodes if one not in neither]
    agreeing = f"{sum(run == common for run in usual.values())} of {counted(len(nodes), 'node')} agree"
    why = f"{agreeing}, but not with what was stored for this setting; remove it if machines or libraries have changed"
    return Alignment(
        accused=tuple(_difference(one, common, "what most nodes give and what was stored") for one in neither),
        undecided=tuple(one.node for one in rest),
        because=(f"{_names(rest)}: {why}",),
    )


def _difference(one: NodeRuns, norm: Run, words: str) -> Difference:
    """Where the runs of this node first leave the norm."""
    expected = {(entry.at, entry.place, entry.rank): entry.digest for entry in norm}
    odd = [run for run in one.runs if run != norm]
    first: tuple[int, str] | None = None
    ranks: set[int] = set()
    for run in odd:
        found = {(entry.at, entry.place, entry.rank): entry.digest for entry in run}
        differing = [key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key)]
        at, place, _ = min(differing)
        here = {key[2] for key in differing if key[0] == at}
        if first is None or (at, place) < first:
            first, ranks = (at, place), here
        elif at == first[0]:
            ranks |= here
    assert first is not None
    return Difference(
        node=one.node,
        place=first[1],
        ranks=tuple(sorted(ranks)),
        odd_runs=len(odd),
        runs=len(one.runs),
        against=words,
    )


def _unknown(nodes: Sequence[NodeRuns], why: str) -> Alignment:
    return Alignment(undecided=tuple(one.node for one in nodes), because=(f"{_names(nodes)}: {why}",))


def _names(nodes: Sequence[NodeRuns]) -> str:
    return ", ".join(one.node for one in nodes)
