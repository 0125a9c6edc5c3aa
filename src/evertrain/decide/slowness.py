"""Training has become slower: is there a rank that the others wait for?

    `slow` is told ──▶ five captures, ten seconds apart ──▶ votes ──▶ a rank is named, in an incident of its own
                                                              └──▶ all are equally slow: nothing follows

What is done about a named rank is the ladder's to say (`decide.stragglers`).
"""

from __future__ import annotations

from evertrain.decide import answering, captures, communication, incidents
from evertrain.decide.blame import Blame
from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.records import AnyRecord

_DOUBTFUL = 0.5
CAUSE = "slow rank"


def look(state: JobState, attempt: Attempt, picture: Picture, step: int | None, now: float) -> list[AnyRecord]:
    """The next capture of a series that has begun, or what all of its captures have shown."""
    if asked := captures.next_round(state, attempt, picture, now):
        return [*asked]
    found = captures.of_slowness(state, attempt)
    if found is None or not state.policy:
        return []
    asked_last, located = found
    if located.kind != "slow" or not located.ranks or not located.nodes or located.confidence < _DOUBTFUL:
        return []
    if any(asked_last.capture in one.opened.captures for one in state.incidents.values()):
        return []
    if (seen := communication.cause_of(state, attempt)) is not None and seen.symptom == "slow":
        return []  # it is an incident already, and the records of collectives say more than looks
    verdict = Blame(
        source="metrics",
        fault_time=asked_last.time,
        cause=CAUSE,
        category=located.category if located.category != "unknown" else "straggler",
        ranks=located.ranks,
        nodes=located.nodes,
        confidence=located.confidence,
        evidence=located.evidence,
        located=located.kind,
        group=located.group,
        group_nodes=located.eviction,
        captures=tuple(dict.fromkeys((*located.captures, asked_last.capture))),
    )
    # ByteRobust takes out the whole group
    is_group = bool(located.eviction) and state.policies[state.policy].hang_policy == "paper"
    number = max(state.incidents, default=0) + 1
    event = d.SlowRank(
        time=now,
        incident=number,
        ranks=located.ranks,
        nodes=located.eviction if is_group else located.nodes,
        confidence=located.confidence,
        evidence=located.evidence,
        is_group=is_group,
    )
    decided = answering.decision(state, event, number)
    acts = bool(answering.evicted_ranks_of(state, decided))
    opened = incidents.opened(state, attempt.number, verdict, step, now, tolerated=not acts)
    if acts:
        return [*incidents.over(state, now), opened, decided, *answering.consequences(state, decided)]
    # it disturbs nothing that is going on
    return [opened, decided, r.IncidentClosed(time=now, incident=number, first_new_step=None, passed_time=None)]
