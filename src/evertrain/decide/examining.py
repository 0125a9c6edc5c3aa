"""Which nodes are examined though nobody is suspected, and what follows from it?

    `evertrain diagnose` ─┐
    a standby has come ───┼──▶ under way: one test after the other ──accused──▶ failed, and a certain fault of the node
    one would come back ──┘           │        (`decide.inspection`)  └──none──▶ passed; unknown, where nothing could be
                                      └──its nodes are needed, or nobody may test them any more──▶ given up   tested

No node is tested whose ranks train. What nobody has asked for is not done on a machine on which ranks of other nodes
train either (nodes share a machine where they share an address, as `--local-nodes` do), nor while a job recovers. One
examination is under way at a time; who asks by hand goes before what nobody has asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from evertrain.decide import inspection
from evertrain.decide.inspection import Wanted
from evertrain.decide.picture import Picture
from evertrain.decide.state import Exam, JobState
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.config import Config
from evertrain.model.diagnosis import InspectOrder, Symptom
from evertrain.model.exam_records import ExamAsked, ExamOver, ExamReason
from evertrain.model.records import AnyRecord
from evertrain.model.words import counted

FAILED = "failed_tests"
"""The signal that a node gets which fails them."""
_MOST_NAMED = 8
_WITNESSES = 2
"""With the one that would come back they make a majority."""
_DONE = ("passed", "absent")


# -- asked for by hand -------------------------------------------------------------------------------------------------


def ask(
    state: JobState, picture: Picture, nodes: Sequence[str], symptom: Symptom, budget_s: float, now: float
) -> list[AnyRecord] | str:
    """The examination that the user wants, of all nodes that take part where none is named; nothing
    where it is under way; else why there can be none."""
    chosen = tuple(dict.fromkeys(nodes)) or _all(state, picture)
    exam = state.exam
    if exam is not None and (exam.asked.reason, exam.asked.nodes, exam.asked.symptom) == ("user", chosen, symptom):
        return []  # whoever got no answer asks again, and who wants the same can have the same
    if refusal := _refusal(state, picture, chosen):
        return refusal
    gives_way: list[AnyRecord] = []
    if exam is not None:
        gives_way = [_given_up(exam, "the user asks for other tests", now)]
    # before the nodes are settled any of them may get ranks
    holds = not state.roster or any(node in state.active_nodes() for node in chosen)
    return [*gives_way, _asked(state, "user", symptom, chosen, budget_s, now, holds=holds)]


def _all(state: JobState, picture: Picture) -> tuple[str, ...]:
    return tuple(node for node in state.roster or state.known_nodes() if picture.connected(node))


def _refusal(state: JobState, picture: Picture, nodes: tuple[str, ...]) -> str:
    known = state.known_nodes()
    if unknown := [node for node in nodes if node not in known]:
        return f"it has no node {unknown[0]}; there are {_listed(known)}"
    if state.run is None or state.ended is not None or state.closing:
        return "it is ending; ask again when it has ended"
    attempt, trains = state.active, _with_ranks(state)
    if attempt is not None and (busy := [node for node in nodes if node in trains]):
        others = [node for node in known if node not in trains and picture.connected(node)]
        free = f"; of {_listed(others)} none trains: --nodes {others[0]}" if others else ""
        return (
            f"it trains on {_listed(busy)}, and tests take the machine: `evertrain stop` it first, or name nodes "
            f"without ranks (--nodes){free}"
        )
    if silent := [node for node in nodes if not picture.connected(node)]:
        return f"no word from {_listed(silent)}: its agent cannot be asked"
    if not nodes:
        return "none of its agents can be heard"
    if _inspects(state):
        return "it tests its nodes by itself because of what has happened; see `evertrain incidents`"
    exam = state.exam
    if exam is not None and exam.asked.reason == "user":
        return f"{_listed(exam.asked.nodes)}: tests are under way there that somebody else has asked for"
    return ""


def _listed(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:_MOST_NAMED]) + (f" and {len(nodes) - _MOST_NAMED} more" if nodes[_MOST_NAMED:] else "")


def _asked(
    state: JobState,
    reason: ExamReason,
    symptom: Symptom,
    nodes: tuple[str, ...],
    budget_s: float,
    now: float,
    *,
    holds: bool = False,
) -> ExamAsked:
    return ExamAsked(
        time=now, exam=state.next_exam, reason=reason, symptom=symptom, nodes=nodes, budget_s=budget_s, holds=holds
    )


# -- what nobody has to ask for ----------------------------------------------------------------------------------------


def _standbys_to_test(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """Those that have come, once training goes its way."""
    if not _is_wanted(state, config) or not _is_calm(state):
        return []
    new = [node for node in state.usable_standbys() if node not in state.examined and picture.connected(node)]
    nodes = tuple(node for node in _apart(state, picture, new) if not _is_tight(picture, node))
    return [_asked(state, "joining", "returning", nodes, config.diagnose.budget_s, now)] if nodes else []


def of_returning(state: JobState, picture: Picture, node: str, config: Config, now: float) -> list[AnyRecord] | None:
    """What has to come before an evicted node may be a standby again; None: nothing, empty: it is waited for."""
    if not _is_wanted(state, config):
        return None
    over = state.examined.get(node)
    if over is not None and node in over.passed:
        return None
    if not _apart(state, picture, [node]):
        return None if over is None else []
    if state.exam is not None or _inspects(state):
        return []
    if over is not None and now - state.since(over.time) < config.ladder.quiet_s:
        return []
    # where no bits are stored to compare with, standbys that wait say what is right
    waiting = [one for one in state.usable_standbys() if picture.connected(one)] if not state.golden else []
    nodes = (node, *_apart(state, picture, waiting)[:_WITNESSES])
    return [_asked(state, "returning", "returning", nodes, config.diagnose.budget_s, now)]


def _is_wanted(state: JobState, config: Config) -> bool:
    watches_only = state.run is None or state.run.observe_only
    return config.diagnose.enabled and config.diagnose.returning and not watches_only


def _is_calm(state: JobState) -> bool:
    attempt = state.active
    trains = attempt is not None and attempt.ending is None and attempt.resumed is not None
    return trains and state.incident is None and state.suspicion is None


def _is_tight(picture: Picture, node: str) -> bool:
    report = picture.report(node)
    return report is None or report.memory_is_tight


def _with_ranks(state: JobState) -> frozenset[str]:
    """Nodes on which something of the newest attempt may run."""
    return frozenset(state.active.started.placement.values()) if state.active is not None else frozenset()


def _apart(state: JobState, picture: Picture, nodes: Iterable[str]) -> list[str]:
    """Those on whose machine no ranks train."""
    busy = {_machine(picture, node) for node in _with_ranks(state)}
    return [node for node in nodes if _machine(picture, node) not in busy]


def _machine(picture: Picture, node: str) -> str:
    report = picture.report(node)
    address = report.address if report is not None else ""
    return "here" if address == "::1" or address.startswith("127.") else address


# -- while one is under way --------------------------------------------------------------------------------------------


def look(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """The next test, the end, or the beginning of another one; nothing while there is nothing to do but wait."""
    exam = state.exam
    if exam is None:
        return _standbys_to_test(state, picture, config, now)
    if why := _why_given_up(state, exam):
        return [_given_up(exam, why, now)]
    asked, stages = exam.asked, exam.stages
    left_s = asked.budget_s - (now - state.since(asked.time))
    if stages and stages[-1].done is None:
        return inspection.ended(state, picture, stages, left_s, now)
    if not exam.accused:
        wanted = Wanted(0, asked.symptom, asked.nodes)
        following = inspection.following_stage(state, picture, wanted, stages, config.diagnose, left_s, now)
        if following is not None:
            return [following]
        if not stages and left_s > 0 and not inspection.may_begin(picture, asked.nodes):
            return []
    return _over(exam, now)


def _why_given_up(state: JobState, exam: Exam) -> str:
    asked = exam.asked
    if state.closing:
        return "the job is ending"
    if _inspects(state):
        return "the job tests its nodes because of what has happened"
    busy = _with_ranks(state) if asked.holds else {*_with_ranks(state), *state.active_nodes()}
    if taken := [node for node in asked.nodes if node in busy]:
        return f"{_listed(taken)}: ranks are started there"
    if asked.reason == "joining" and not _is_calm(state):
        return "the job recovers; they are tested when it trains"
    return ""


def _inspects(state: JobState) -> bool:
    """Whether an incident waits for tests of its own."""
    incident = state.incident
    if incident is None or incident.decided is not None or not incident.decisions:
        return False
    return any(isinstance(action, d.Inspect) for action in incident.decisions[-1].actions)


def _given_up(exam: Exam, why: str, now: float) -> ExamOver:
    return ExamOver(time=now, exam=exam.asked.exam, outcome="given_up", because=why)


def _over(exam: Exam, now: float) -> list[AnyRecord]:
    """What they have come to; a node that has failed is broken for certain."""
    accused = exam.accused
    outcomes: dict[str, dict[str, str]] = {node: {} for node in exam.asked.nodes}
    for one in exam.stages:
        for node, result in (one.done.results if one.done is not None else {}).items():
            outcomes[node][one.asked.name] = result.outcome  # tested again: the second time counts
    passed = tuple(
        node
        for node, seen in outcomes.items()
        if node not in accused and "passed" in seen.values() and all(one in _DONE for one in seen.values())
    )
    if accused:
        outcome, because = "failed", "; ".join(accused.values())
    elif len(passed) == len(outcomes):
        outcome, because = "passed", f"{counted(len(passed), 'node')} passed"
    else:
        rest = [node for node in outcomes if node not in passed]
        outcome, because = "unknown", f"{_listed(rest)}: could not be tested to the end"
    over = ExamOver(
        time=now,
        exam=exam.asked.exam,
        outcome=outcome,  # type: ignore[arg-type]
        because=because,
        passed=passed,
    )
    told = {node: _told(node, line) for node, line in accused.items()}
    return [over, *(r.SignalRaised(time=now, node=node, signal=FAILED, evidence=line) for node, line in told.items())]


def _told(node: str, line: str) -> str:
    """Without the name, which stands before it wherever it is shown."""
    return line.removeprefix(f"{node}: ")


# -- what agents and starts are told -----------------------------------------------------------------------------------


def order(state: JobState, node: str) -> InspectOrder | None:
    """This node's part in the test that runs; None: it is not examined."""
    exam = state.exam
    if exam is None or not exam.stages or state.ended is not None or state.closing or node in _with_ranks(state):
        return None
    return inspection.part_of(state, node, exam.stages[-1])


def holds(state: JobState) -> bool:
    """Whether the next start waits for the end of tests."""
    return state.exam is not None and state.exam.asked.holds
