"""What do the tests of stopped nodes say, and against whom?

    a reading is not ok ──────────────────────────────────────────▶ accused
    no end in time, a crash, slow; most others passed ──again──▶ the same ──▶ accused
    other bits than most nodes with the same setting ─────────────▶ accused (`locate.alignment`)
    bad towards two nodes that are well towards others ───────────▶ accused (`locate.pairs`)

A node that has said nothing, or could not test, is neither accused nor acquitted; where a test fails everywhere, it is
the test.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

import msgspec

from evertrain.decide.state import Stage
from evertrain.locate import alignment, pairs
from evertrain.locate.alignment import NodeRuns, RankRuns
from evertrain.locate.pairs import PairResult
from evertrain.model.diagnosis import Inspected, Reading, Run, Setting, StageAsked
from evertrain.model.words import counted

Results = Mapping[str, Inspected]

SLOW = pairs.SLOW
FEWEST_RATES = pairs.FEWEST_RATES
_NO_END = ("late", "crashed")
_SAID_NOTHING = ("absent", "refused", "silent")
_MOST_NOTES = 8
_FEWEST_SEGMENTS = 1000
"""Of TCP, in one exchange; of fewer no part says anything."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage comes to."""

    accused: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    golden: tuple[tuple[Setting, Run], ...] = ()


def is_of_pairs(asked: StageAsked) -> bool:
    return any(len(group) > 1 for group in asked.groups)


# -- each node alone ---------------------------------------------------------------------------------------------------


def doubtful(asked: StageAsked, results: Results) -> tuple[str, ...]:
    """Nodes to be tested once more before anything is said against them: something else may have held them up."""
    if asked.again or is_of_pairs(asked):
        return ()
    odd = [node for node, one in results.items() if one.outcome in _NO_END]
    odd += [node for node in _slow(asked, results, results) if node not in odd]
    passed = [node for node, one in results.items() if one.outcome == "passed" and node not in odd]
    return tuple(odd) if 2 * len(passed) > len(results) else ()


def alone(asked: StageAsked, results: Results, first: Results, golden: Mapping[Setting, Run]) -> Judged:
    """What a test says that each node has run by itself; `first`: of the first time, where this is the second."""
    accused = {node: f"{node}: {asked.name}: {one.because}" for node, one in results.items() if one.outcome == "failed"}
    tested = [one for one in {**first, **results}.values() if one.outcome not in _SAID_NOTHING]
    if len(accused) == len(tested) > 1:
        line = next(iter(accused.values()))
        return Judged(notes=(f"{asked.name}: fails on all {len(tested)} nodes, so it is the test; {line}",))
    if asked.again:
        for node, one in results.items():
            if one.outcome in _NO_END:
                others = f"{sum(seen.outcome == 'passed' for seen in first.values())} of {counted(len(first), 'node')}"
                accused[node] = f"{node}: {asked.name} {one.outcome} twice, {others} passed: {one.because}"
        accused |= _slow(asked, results, first)
    notes = [*_missing(asked, results)]
    if asked.program != "alignment":
        return Judged(accused=accused, notes=tuple(notes))
    aligned = alignment.judge(_runs({**first, **results}), golden)
    accused |= {one.node: one.evidence for one in aligned.accused}
    if len(results) == len({**first, **results}) == 1:
        accused = {**dict(_unsteady(asked, results)), **accused}
    notes += [f"{asked.name}: {line}" for line in aligned.because]
    return Judged(accused=accused, notes=tuple(notes[:_MOST_NOTES]), golden=aligned.to_store)


def _unsteady(asked: StageAsked, results: Results) -> Iterator[tuple[str, str]]:
    """Who does not repeat its own bits: where there is nobody beside it, that has to say enough."""
    for node, one in results.items():
        for reading in one.readings:
            runs = reading.detail.get("runs", ()) if reading.name == "alignment" else ()
            if len(set(runs)) > 1:
                told = f"rank {reading.rank}: {len(runs)} runs gave {len(set(runs))} results"
                yield node, f"{node}: {asked.name}: {told}"


def _missing(asked: StageAsked, results: Results) -> Iterable[str]:
    """Why some could not be tested, the reason once."""
    reasons: dict[str, list[str]] = {}
    for node, one in results.items():
        if one.outcome in (*_SAID_NOTHING, *_NO_END):
            reasons.setdefault(f"{one.outcome}: {one.because}" if one.because else one.outcome, []).append(node)
    for reason, nodes in reasons.items():
        who = "all nodes" if len(nodes) == len(results) > 1 else ", ".join(nodes[:4]) + (", …" if nodes[4:] else "")
        yield f"{asked.name}: {who}: {reason}"


def _runs(results: Results) -> Iterable[NodeRuns]:
    for node, one in results.items():
        readings = {reading.rank: reading for reading in one.readings if reading.name == "alignment"}
        if one.outcome != "passed" or not readings:
            continue
        try:
            ranks = {rank: msgspec.convert(reading.detail, RankRuns) for rank, reading in readings.items()}
            setting = msgspec.convert(readings[min(readings)].detail["setting"], Setting)
            runs = alignment.merged(ranks)
        except (KeyError, msgspec.ValidationError):
            continue  # of another version of the test programs
        yield NodeRuns(node=node, setting=setting, runs=runs)


def _slow(asked: StageAsked, results: Results, fleet: Results) -> dict[str, str]:
    """Nodes below the fleet's rates; only where the job is slow, for a busy machine fails no other test."""
    if asked.symptom != "slow":
        return {}
    expected: dict[str, list[float]] = {}
    for one in fleet.values():
        for name, (value, _) in _rates(one).items():
            expected.setdefault(name, []).append(value)
    found: dict[str, str] = {}
    for node, one in results.items():
        for name, (value, unit) in _rates(one).items():
            usual = median(expected.get(name, [value]))
            if len(expected.get(name, ())) >= FEWEST_RATES and value < SLOW * usual:
                share = f"{value / usual:.0%} of the fleet's median"
                found.setdefault(node, f"{node}: {name}: {value:.4g} {unit}, {share}")
    return found


def _rates(one: Inspected) -> dict[str, tuple[float, str]]:
    """The slowest rank's, by name of the reading."""
    found: dict[str, tuple[float, str]] = {}
    for reading in one.readings:
        if reading.value is not None and reading.unit.endswith("/s") and one.outcome == "passed":
            known = found.get(reading.name)
            if known is None or reading.value < known[0]:
                found[reading.name] = (reading.value, reading.unit)
    return found


# -- nodes with each other ---------------------------------------------------------------------------------------------


def pair_results(stages: Iterable[tuple[StageAsked, Results]]) -> list[PairResult]:
    """What all exchanges gave; those that were none say nothing."""
    found = []
    for asked, results in stages:
        for group in asked.groups:
            both = [results[node] for node in group if node in results]
            if len(group) != 2 or len(both) != 2 or any(one.outcome in _SAID_NOTHING for one in both):
                continue
            readings = [reading for one in both for reading in one.readings]
            rates = [reading.value for reading in readings if reading.value]
            wrong = {str(name) for reading in readings for name in reading.detail.get("mismatches", ())}
            ended = [one for one in both if one.outcome in _NO_END]
            resent = [share for reading in readings if (share := _resent(reading)) is not None]
            found.append(
                PairResult(
                    pair=(group[0], group[1]),
                    bytes_s=min(rates, default=None) if not ended else None,
                    mismatches=tuple(sorted(wrong)),
                    failure=f"{ended[0].outcome}: {ended[0].because}" if ended and not wrong else "",
                    resent=max(resent, default=None),
                )
            )
    return found


def _resent(reading: Reading) -> float | None:
    segments = reading.detail.get("segments") or 0
    return float(reading.detail.get("resent", 0)) / segments if segments >= _FEWEST_SEGMENTS else None


def slow_below(asked: StageAsked) -> float:
    """Below which part of the fleet's rate a pair is bad: a machine that is busy makes no numbers wrong."""
    return {"slow": SLOW, "nccl": pairs.BROKEN}.get(asked.symptom, 0.0)


def together(asked: StageAsked, known: Sequence[PairResult]) -> Judged:
    """What all rounds of exchanges between nodes say."""
    verdict = pairs.judge(asked.nodes, known, slow_below(asked))
    accused = {
        node: f"{node}: {asked.name}: " + "; ".join(line for line in verdict.evidence if node in _both(line))
        for node in verdict.nodes
    }
    notes = [
        f"{asked.name}: the link of {one} and {other} is bad, each is well towards others"
        for one, other in verdict.links
    ]
    if verdict.undecided:
        notes.append(f"{asked.name}: {', '.join(verdict.undecided)}: in a bad pair, and nothing says which is to blame")
    if not accused:
        notes += [f"{asked.name}: {line}" for line in verdict.evidence]
    return Judged(accused=accused, notes=tuple(notes[:_MOST_NOTES]))


def _both(line: str) -> list[str]:
    """`node-1 and node-2: …`"""
    return line.partition(":")[0].split(" and ")


def before(stages: Sequence[Stage], name: str) -> list[tuple[StageAsked, Results]]:
    """What earlier stages of this test have brought, in this inspection."""
    return [(one.asked, one.done.results) for one in stages if one.asked.name == name and one.done is not None]
