"""Which tests do stopped nodes run, one after the other, and when has enough been said?

    asked ──▶ stage ──all answered, or late──▶ somebody is accused ──────────────▶ suspects
                ▲                                 │ in doubt ──▶ the same again, those only
                └──────── the next test ◀─────────┘ nobody
                                                  └── no test left, or no time ──▶ clean

Cheap tests come first, and all nodes run a test at the same time, so that it takes as long on a thousand as on one.
All of it together has a limit: a job is never kept from its start for longer (`diagnose.budget_s`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from evertrain.decide import answering, inspected, lost
from evertrain.decide.inspected import Judged
from evertrain.decide.picture import Picture
from evertrain.decide.state import Incident, JobState, Stage
from evertrain.locate import pairs
from evertrain.locate.pairs import PairResult, Seat
from evertrain.model import decisions as d
from evertrain.model.config import Config, DiagnoseConfig
from evertrain.model.diagnosis import Inspected, InspectOrder, Reading, StageAsked, StageDone, Symptom
from evertrain.model.records import AnyRecord

START_S = 30.0
"""So much longer than its budget a node may take with the first test: a process has to import torch."""
LATE_S = 5.0
"""... and with the others."""
LEAST_S = 3.0
"""With less time left no further test begins."""
MOST_AGAIN = 2
"""Rounds of pairs beyond the usual ones, to tell links from nodes."""
_WITNESSES = 3
"""So many nodes make a majority; where fewer are inspected, standbys that wait are tested beside them."""


class Test(msgspec.Struct, frozen=True):
    """One test of a suite."""

    __test__ = False  # no test of ours

    name: str
    program: str
    budget_s: float
    pairs: bool = False


_VENDOR = Test("vendor diagnostics", "vendor", 60.0)
_COMPUTE = Test("compute", "compute", 20.0)
_MEMORY = Test("memory", "memory", 20.0)
_TRANSFER = Test("transfer", "transfer", 20.0)
_STORAGE = Test("storage", "storage", 20.0)
_WITHIN = Test("exchange within the node", "exchange", 20.0)
_BETWEEN = Test("exchange between nodes", "exchange", 20.0, pairs=True)
_ALIGNMENT = Test("bit-wise alignment", "alignment", 30.0)

SUITES: dict[Symptom, tuple[Test, ...]] = {
    "nccl": (_VENDOR, _WITHIN, _BETWEEN),
    "nan": (_VENDOR, _COMPUTE, _ALIGNMENT, _WITHIN, _BETWEEN),
    "illegal_access": (_VENDOR, _COMPUTE, _MEMORY, _ALIGNMENT),
    "crash": (_VENDOR, _COMPUTE, _MEMORY, _WITHIN, _BETWEEN, _ALIGNMENT),
    "slow": (_VENDOR, _COMPUTE, _MEMORY, _TRANSFER, _STORAGE, _WITHIN, _BETWEEN),
    "returning": (_VENDOR, _COMPUTE, _MEMORY, _ALIGNMENT),
}


def sources(config: Config) -> tuple[d.Rung, ...]:
    """Who can be asked, as it is configured."""
    can_ask: dict[d.Rung, bool] = {
        "inspect": config.diagnose.enabled, "roll_back": True, "replay": config.diagnose.replay
    }  # fmt: skip
    return tuple(rung for rung, can in can_ask.items() if can)


def symptom_of(category: str, cause: str) -> Symptom:
    """By what an incident was seen."""
    words = cause.lower()
    if category == "numerics":
        return "nan"
    if "nccl" in words or "network" in category:
        return "nccl"
    if "illegal" in words or "misaligned" in words:
        return "illegal_access"
    return "slow" if "slow" in category else "crash"


# -- one step of the suite ---------------------------------------------------------------------------------------------


def look(
    state: JobState,
    picture: Picture,
    incident: Incident,
    asked: d.Inspect,
    since: float,
    config: DiagnoseConfig,
    now: float,
) -> list[AnyRecord] | d.Answered:
    """What follows for an incident whose nodes are being tested: a record, the answer, or nothing yet."""
    stages = [one for one in incident.stages if one.asked.time >= since]
    left_s = config.budget_s - (now - state.since(since))
    newest = stages[-1] if stages else None
    if newest is not None and newest.done is None:
        return ended(state, picture, stages, left_s, now)
    accused = {node: line for one in stages if one.done is not None for node, line in one.done.accused.items()}
    for node in state.usable_standbys():
        if node in accused:  # it was only to be compared with, and is to take nobody's place
            fault = d.NodeFault(time=now, node=node, signal="failed_tests", evidence=accused[node])
            return answering.answer(state, fault)
    if accused:
        return _answer(incident, asked, stages, accused, now)
    symptom = symptom_of(incident.opened.category, incident.opened.cause)
    wanted = Wanted(incident.number, symptom, _with_witnesses(state, picture, asked.nodes))
    if following := following_stage(state, picture, wanted, stages, config, left_s, now):
        return [following]
    if newest is None and left_s > 0 and not may_begin(picture, asked.nodes):
        return []
    return _answer(incident, asked, stages, {}, now)


def _answer(
    incident: Incident, asked: d.Inspect, stages: Sequence[Stage], accused: Mapping[str, str], now: float
) -> d.Answered:
    suspects = tuple(node for node in asked.nodes if node in accused)
    notes = [note for one in stages if one.done is not None for note in one.done.notes]
    has_passed = any(
        result.outcome == "passed" for one in stages if one.done is not None for result in one.done.results.values()
    )
    outcome: Literal["suspects", "clean", "not_available"] = (
        "suspects" if suspects else "clean" if has_passed else "not_available"
    )
    return d.Answered(
        time=now,
        incident=incident.number,
        rung="inspect",
        outcome=outcome,
        nodes=suspects,
        evidence=tuple(accused.values()) or tuple(notes[:4]),
    )


class Wanted(msgspec.Struct, frozen=True):
    """Whose tests these are."""

    incident: int
    """0: an examination's."""
    symptom: Symptom
    nodes: tuple[str, ...]


def may_begin(picture: Picture, nodes: Iterable[str]) -> bool:
    """Whether nothing of the old attempt is left on any node that can be heard."""
    reports = [picture.report(node) for node in nodes if picture.connected(node)]
    return bool(reports) and not any(report is None or report.gpus_held for report in reports)


def following_stage(
    state: JobState,
    picture: Picture,
    wanted: Wanted,
    stages: Sequence[Stage],
    config: DiagnoseConfig,
    left_s: float,
    now: float,
) -> StageAsked | None:
    """The next test; None: there is none any more, or it cannot begin yet, or there is no time left."""
    if left_s <= LEAST_S or (not stages and not may_begin(picture, wanted.nodes)):
        return None
    symptom, nodes = wanted.symptom, stages[0].asked.nodes if stages else wanted.nodes

    def stage(
        test: Test, groups: Iterable[tuple[str, ...]], parameters: dict[str, Any], again: bool = False
    ) -> StageAsked:
        return StageAsked(
            time=now, stage=state.next_stage, incident=wanted.incident, symptom=symptom, name=test.name,
            program=test.program, parameters=parameters, budget_s=round(min(test.budget_s, left_s), 3), nodes=nodes,
            groups=tuple(groups), again=again,
        )  # fmt: skip

    newest = stages[-1] if stages else None
    if newest is not None and newest.done is not None:
        test = _test_of(newest.asked)
        # a second time with less time than the first would accuse whoever is merely slow
        is_time = left_s >= newest.asked.budget_s
        if is_time and (again := inspected.doubtful(newest.asked, newest.done.results)):
            return stage(test, [(node,) for node in again], newest.asked.parameters, again=True)
        if test.pairs and (groups := _following_round(stages, newest.asked)):
            return stage(test, groups, newest.asked.parameters)
    done = {one.asked.name for one in stages}
    for test in SUITES[symptom]:
        if test.name in done:
            continue
        if not test.pairs:
            return stage(test, [(node,) for node in nodes], _parameters(state, test, config))
        store = _store(state, picture)
        rounds = pairs.pairings(pairs.ring(_seat(picture, node) for node in nodes))
        if store is not None and rounds:
            return stage(test, rounds[0], {"store": store})
    return None


def _with_witnesses(state: JobState, picture: Picture, nodes: Sequence[str]) -> tuple[str, ...]:
    """Who takes part: those that are asked, and standbys where they are too few to outvote one of them."""
    missing = max(0, _WITNESSES - len(nodes))
    waiting = [node for node in state.usable_standbys() if picture.connected(node) and node not in nodes]
    return (*nodes, *waiting[:missing])


def _test_of(asked: StageAsked) -> Test:
    return next(test for test in SUITES[asked.symptom] if test.name == asked.name)


def _parameters(state: JobState, test: Test, config: DiagnoseConfig) -> dict[str, Any]:
    if test.program != "alignment":
        return {}
    mesh = state.run.mesh if state.run is not None else None
    has_experts = any(part.strip().startswith("ep=") for part in (mesh or "").split(","))
    kind = config.kind if config.kind != "auto" else "moe" if has_experts else "dense"
    return {"kind": kind}


def _seat(picture: Picture, node: str) -> Seat:
    report = picture.report(node)
    return Seat(node, report.address if report is not None else "")


def _store(state: JobState, picture: Picture) -> dict[str, Any] | None:
    """Where nodes find each other: the store that waits for the next attempt; None: it does not."""
    nodes = state.active_nodes()
    waiting = picture.attempt(nodes[0], state.next_attempt) if nodes else None
    report = picture.report(nodes[0]) if nodes else None
    if waiting is None or report is None or waiting.store_port is None:
        return None
    return {"host": report.address, "port": waiting.store_port}


def _following_round(stages: Sequence[Stage], asked: StageAsked) -> tuple[tuple[str, ...], ...]:
    """The next pairs; none: all is said."""
    known = inspected.before(stages, asked.name)
    return _round_after(asked, len(known), inspected.pair_results(known), known[0][0].groups)


def _round_after(
    asked: StageAsked, done: int, results: Sequence[PairResult], first: Sequence[tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    rounds = _rounds_of(asked.nodes, first)
    if done < len(rounds):
        return rounds[done]
    if done >= len(rounds) + MOST_AGAIN:
        return ()
    return pairs.again(asked.nodes, results, inspected.slow_below(asked))


def _rounds_of(nodes: Sequence[str], first: Sequence[tuple[str, ...]]) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """The pairings whose first one was this: the ring is read off its pairs, wherever addresses are by now."""
    ring = [node for group in first for node in group]
    ring += [node for node in nodes if node not in ring]
    return pairs.pairings(ring)


# -- the end of a stage ------------------------------------------------------------------------------------------------


def ended(state: JobState, picture: Picture, stages: Sequence[Stage], left_s: float, now: float) -> list[AnyRecord]:
    """The stage that runs, when all have answered or nobody waits any more."""
    *earlier, newest = stages
    asked = newest.asked
    results: dict[str, Inspected] = {}
    waits = False
    for node in (node for group in asked.groups for node in group):
        report = picture.report(node)
        said = report.inspected if report is not None else None
        if said is not None and said.number == asked.stage:
            results[node] = said
        else:
            waits = waits or not lost.is_gone(state, picture, node, now)
            results[node] = Inspected(number=asked.stage, outcome="silent", because="no answer in time")
    limit_s = asked.budget_s + (LATE_S if earlier else START_S)
    if waits and left_s > 0 and now - state.since(max(asked.time, state.term_time)) < limit_s:
        return []
    judged = _judged(state, earlier, asked, results)
    return [
        StageDone(
            time=now, stage=asked.stage, incident=asked.incident, results={n: kept(one) for n, one in results.items()},
            accused=judged.accused, notes=judged.notes, golden=judged.golden,
        )
    ]  # fmt: skip


def _judged(state: JobState, earlier: Sequence[Stage], asked: StageAsked, results: Mapping[str, Inspected]) -> Judged:
    before = inspected.before(earlier, asked.name)
    if not inspected.is_of_pairs(asked):
        return inspected.alone(asked, results, before[0][1] if asked.again and before else {}, state.golden)
    stages = [*before, (asked, results)]
    known = inspected.pair_results(stages)
    if _round_after(asked, len(stages), known, stages[0][0].groups):
        return Judged()  # more is to come
    return inspected.together(asked, known)


def kept(one: Inspected) -> Inspected:
    """What the log keeps: every number, of hashes one a run, or one where all are the same; the setting once a node."""
    return replace(one, readings=tuple(replace(reading, detail=_kept(reading)) for reading in one.readings))


def _kept(reading: Reading) -> dict[str, Any]:
    detail = {name: value for name, value in reading.detail.items() if _is_kept(name, reading)}
    if reading.name == "alignment" and len(set(runs := detail.get("runs", ()))) == 1:
        detail |= {"runs": list(runs[:1]), "same_runs": len(runs)}
    return detail


def _is_kept(name: str, reading: Reading) -> bool:
    return name != "records" and (name != "setting" or (reading.name == "alignment" and reading.rank == 0))


# -- what agents are told ----------------------------------------------------------------------------------------------


def order(state: JobState, node: str) -> InspectOrder | None:
    """This node's part in the test that runs; None: nobody is tested."""
    incident = state.incident
    if incident is None or incident.decided is not None or not incident.stages or state.closing:
        return None
    if state.ended is not None or (state.active is not None and state.active.ending is None):
        return None
    newest = incident.stages[-1]
    if not incident.decisions or not _is_asked(incident, newest.asked):
        return None
    return part_of(state, node, newest)


def part_of(state: JobState, node: str, newest: Stage) -> InspectOrder | None:
    """What this node does in a test; None: it has no part in it."""
    asked = newest.asked
    assert state.run is not None
    if node not in asked.nodes:
        return None
    ready = InspectOrder(number=asked.stage, ranks=state.run.nproc_per_node)
    for at, group in enumerate(asked.groups):
        if node in group and newest.done is None:
            with_others = {"nodes": list(group), "key": f"{asked.stage}-{at}"} if len(group) > 1 else {}
            return replace(
                ready, program=asked.program, parameters={**asked.parameters, **with_others}, budget_s=asked.budget_s
            )
    return ready


def _is_asked(incident: Incident, asked: StageAsked) -> bool:
    """Whether what is waited for is the answer of these tests, and not of another rung."""
    last = incident.decisions[-1]
    return any(isinstance(action, d.Inspect) for action in last.actions) and asked.time >= last.time
