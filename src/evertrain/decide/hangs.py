"""What follows from a job that makes no step? Suspicion, a name, and at the limit a restart in place.

    moving ──half the limit──▶ suspected ──limit, still──▶ incident, restart
                                   │  └────limit, busy───▶ named and watched ──busy limit──▶ incident, restart
                                   └──it moves again──▶ cleared

A hang alone never convicts a node. One that comes back at the same step may be no hang at all but something that takes
its time: each repeat doubles the limit, and the user is told how to declare it.
"""

from __future__ import annotations

from evertrain.decide import blame, incidents
from evertrain.decide.blame import Blame
from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState
from evertrain.detect.hang import Hang, find_hang
from evertrain.model import records as r
from evertrain.model.config import HangConfig
from evertrain.model.records import AnyRecord

_CATEGORY = {"mismatch": "user_code"}


def look(
    state: JobState, attempt: Attempt, picture: Picture, step: int | None, config: HangConfig, now: float
) -> list[AnyRecord]:
    """The records that follow from how still the ranks stand."""
    assert state.run is not None
    alive = attempt.alive()
    seen = [one for one in picture.activities(attempt.started.placement, now) if one.rank in alive]
    hang = find_hang(seen, len(alive), config, stretch=2.0 ** _repeats(state, step))
    if hang is not None and hang.kind != "stuck" and _has_left(attempt):
        hang = None  # the work may be done, and the last ranks upload or clean up; they have a deadline of their own
    if hang is None:
        return _all_well(state, attempt, step, now)
    if hang.is_due and not state.run.observe_only:
        return incidents.act(state, attempt, _verdict(state, attempt, hang, now), step, now)
    if state.suspicion is None:
        return [
            r.HangSuspected(time=now, attempt=attempt.number, hang=hang.kind, ranks=hang.ranks, evidence=hang.evidence)
        ]
    named = hang.is_due or (hang.kind == "busy" and hang.for_s >= config.still_limit_s)
    if named and (state.tolerated is None or state.tolerated.opened.ranks != hang.ranks):
        return incidents.watch(state, attempt, _verdict(state, attempt, hang, now), step, now)
    return []


def _all_well(state: JobState, attempt: Attempt, step: int | None, now: float) -> list[AnyRecord]:
    """Whatever it was, it is over."""
    records: list[AnyRecord] = []
    if state.tolerated is not None and state.tolerated.opened.source == "hang":
        number = state.tolerated.number
        records.append(r.IncidentClosed(time=now, incident=number, first_new_step=step, passed_time=now))
    if state.suspicion is not None:
        records.append(r.HangCleared(time=now, attempt=attempt.number))
    return records


def _verdict(state: JobState, attempt: Attempt, hang: Hang, now: float) -> Blame:
    if hang.kind == "stuck" and _has_left(attempt):
        return blame.blame(state, attempt)  # they wait for one that has left
    return Blame(
        source="hang",
        fault_time=now - hang.for_s,
        cause=f"hang ({hang.kind})",
        category=_CATEGORY.get(hang.kind, "unknown"),
        ranks=hang.ranks,
        nodes=hang.nodes,
        confidence=0.9 if hang.ranks else 0.3,
        evidence=hang.evidence,
    )


def _has_left(attempt: Attempt) -> bool:
    return any(end.status == 0 for end in attempt.ends.values())


def _repeats(state: JobState, step: int | None) -> int:
    """How often a hang has ended an attempt of this run at this very step."""
    return sum(
        seen.opened.source == "hang" and seen.opened.step == step and not seen.opened.tolerated
        for seen in state.incidents.values()
        if any(attempt.number == seen.opened.attempt for attempt in state.attempts)
    )
