"""What follows from a job that makes no step? Suspicion, a name, and at the limit a restart in place.

    moving ──half the limit──▶ suspected ──limit, still──▶ incident, restart
                                   │  └────limit, busy───▶ named and watched ──busy limit──▶ incident, restart
                                   └──it moves again──▶ cleared

From suspicion on the stacks of all processes are looked at (`decide.captures`): they say who is to blame and why, where
they can. One hang alone never convicts a node. One that comes back at the same step, or with the same ranks standing
still, may be no hang at all but something that takes its time: each repeat doubles the limit, and the user is told how
to declare it.
"""

from __future__ import annotations

from msgspec.structs import replace

from evertrain.decide import blame, captures, communication, incidents
from evertrain.decide.blame import Blame
from evertrain.decide.memory import NO_HARDWARE
from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState
from evertrain.detect.hang import Hang, find_hang
from evertrain.locate.words import named
from evertrain.model import records as r
from evertrain.model.capture_records import HangLocated
from evertrain.model.config import HangConfig
from evertrain.model.findings import Category
from evertrain.model.records import AnyRecord
from evertrain.model.stacks import Located, LocatedKind

_DOUBTFUL = 0.5
"""What stacks say less certainly than this is no verdict."""
_AS_SEEN: frozenset[LocatedKind] = frozenset(("unknown", "outside", "loop", "slow"))
"""They add nothing to what was seen without stacks: the words for that stay (`still`, `busy`, …)."""
_NO_MORE = _AS_SEEN - {"loop"}
"""... nor to what the records of collectives say of the same rank."""
_NO_NAME: frozenset[LocatedKind] = frozenset(("unknown", "network", "slow"))
"""Where stacks see that all wait, the records of collectives may tell for whom."""
_CATEGORY: dict[str, Category] = {
    "loader": "hang_dataloader", "checkpoint": "storage", "storage": "storage", "skipped": "user_code",
    "order": "user_code", "mismatch": "user_code", "deadlock": "user_code", "loop": "user_code",
}  # fmt: skip
"""Of what is no machine's fault: a hang of these kinds never costs a node its place."""


def look(
    state: JobState, attempt: Attempt, picture: Picture, step: int | None, config: HangConfig, now: float
) -> list[AnyRecord]:
    """The records that follow from how still the ranks stand."""
    assert state.run is not None
    alive = attempt.alive()
    seen = [one for one in picture.activities(attempt.started.placement, now) if one.rank in alive]
    hang = find_hang(seen, len(alive), config, stretch=2.0 ** _repeats(state, step))
    if hang is not None and hang.kind == "still":
        hang = find_hang(seen, len(alive), config, stretch=2.0 ** _repeats(state, step, hang.ranks))
    if hang is not None and hang.kind != "stuck" and _has_left(attempt):
        hang = None  # the work may be done, and the last ranks upload or clean up; they have a deadline of their own
    if hang is None:
        return _all_well(state, attempt, step, now)
    if state.suspicion is None or state.suspicion.attempt != attempt.number:
        return [
            r.HangSuspected(time=now, attempt=attempt.number, hang=hang.kind, ranks=hang.ranks, evidence=hang.evidence)
        ]
    found = captures.found(state, attempt)
    if captures.stands(hang, found):
        spins = "it waits at the same place in every capture, for its device or the network, and only spins"
        hang = replace(hang, kind="still", limit_s=hang.still_limit_s, evidence=(*hang.evidence, spins))
    if asked := captures.of_hang(state, attempt, picture, hang, config, now):
        return [*asked]
    due_s = hang.limit_s if hang.is_due else hang.still_limit_s
    if hang.for_s < due_s or captures.is_awaited(state, attempt, hang, due_s, now):
        return []
    verdict = _verdict(state, attempt, hang, found, now)
    if hang.is_due and not state.run.observe_only:
        return incidents.act(state, attempt, verdict, step, now)
    watched = state.tolerated.opened if state.tolerated is not None else None
    is_known = watched is not None and watched.source == communication.SOURCE and watched.ranks == verdict.ranks
    if is_known and (not verdict.located or verdict.located in _NO_MORE):
        return []
    if watched is None or (watched.ranks, watched.located) != (verdict.ranks, verdict.located):
        return incidents.watch(state, attempt, verdict, step, now)
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


def _verdict(state: JobState, attempt: Attempt, hang: Hang, found: HangLocated | None, now: float) -> Blame:
    if hang.kind == "stuck" and _has_left(attempt):
        return blame.blame(state, attempt)  # they wait for one that has left
    seen = Blame(
        source="hang",
        fault_time=now - hang.for_s,
        cause=f"hang ({hang.kind})",
        category=_CATEGORY.get(hang.kind, "unknown"),
        ranks=hang.ranks,
        nodes=hang.nodes,
        confidence=0.9 if hang.ranks else 0.3,
        evidence=hang.evidence,
    )
    cause = communication.cause_of(state, attempt)
    if found is None:
        return communication.of_hang(seen, cause) if cause is not None and hang.kind != "stopped" else seen
    located = found.located
    seen = replace(seen, captures=located.captures or (found.capture,))
    if _is_certain(hang, located):
        return replace(seen, evidence=(*hang.evidence, *located.evidence))
    if cause is not None and (located.kind in _NO_NAME or located.confidence < _DOUBTFUL):
        return communication.of_hang(replace(seen, evidence=(*located.evidence, *hang.evidence)), cause)
    if located.kind in ("unknown", "slow") or located.confidence < _DOUBTFUL:
        return replace(seen, evidence=(*hang.evidence, *located.evidence))
    return _by_stacks(seen, hang, located)


def _is_certain(hang: Hang, located: Located) -> bool:
    """Whether what was seen is a fact that no stack can contradict."""
    return hang.kind == "stopped" and located.kind != "stopped"


def _by_stacks(seen: Blame, hang: Hang, located: Located) -> Blame:
    """What was seen without stacks backs what they say."""
    alone = not located.ranks
    group = (f"{named(located.group)} share group {located.group_name}",) if located.group_name else ()
    return replace(
        seen,
        cause=f"hang ({hang.kind if located.kind in _AS_SEEN else located.kind})",
        category=_category(located),
        ranks=located.ranks,
        nodes=located.nodes,
        confidence=located.confidence,
        evidence=tuple(dict.fromkeys((*located.evidence, *(group if alone else ()), *hang.evidence))),
        located=located.kind,
        group=located.group,
        group_nodes=() if located.is_software else located.eviction,
    )


def _category(located: Located) -> str:
    if located.is_software:
        return located.category if located.category in NO_HARDWARE else _CATEGORY[located.kind]
    # what is seen without stacks says less, and may be wrong
    return located.category


def _has_left(attempt: Attempt) -> bool:
    return any(end.status == 0 for end in attempt.ends.values())


def _repeats(state: JobState, step: int | None, ranks: tuple[int, ...] = ()) -> int:
    """How often a hang has ended an attempt of this run at this very step, or because of just these ranks."""
    return sum(
        seen.opened.source == "hang"
        and not seen.opened.tolerated
        and (seen.opened.step == step or (bool(ranks) and seen.opened.ranks == ranks))
        for seen in state.incidents.values()
        if any(attempt.number == seen.opened.attempt for attempt in state.attempts)
    )
