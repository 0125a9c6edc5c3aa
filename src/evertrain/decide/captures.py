"""When are the processes looked at, and is it known yet what that has shown?

    suspected ──▶ first capture ──▶ … ──▶ second, just before somebody is named ──▶ named or acted upon
                                                    └── they work ──▶ third, just before the busy limit

Two captures tell what stands from what moves. A verdict waits for the newest of them, but never for long: a hang is
acted upon with what is known. Slow training is looked at in five rounds, ten seconds apart. While all is well nobody
looks.
"""

from __future__ import annotations

from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, Capture, JobState
from evertrain.detect.hang import Hang, suspicion_s
from evertrain.model.capture_records import CaptureAsked, CaptureReason, HangLocated
from evertrain.model.config import HangConfig
from evertrain.model.stacks import CaptureOrder, Located

COLLECT_S: dict[CaptureReason, float] = {"hang": 6.0, "user": 6.0, "slow": 8.0}
"""So long after the order the controller waits for what the nodes send. An agent that looks at a process which nothing
can stop gives up after five: to be done before it would be to judge without the culprit's node. No verdict waits for so
long (`LATE_S`)."""
AHEAD_S = 1.5
"""So long before its verdict is needed a capture is asked for."""
LATE_S = 2.0
"""So long after that nobody waits for it any more."""
LOST_S = 8.0
"""A capture of a hang that has shown nothing after so long never will: whoever asked for it is gone."""
MOST_LOST = 3
"""Of one suspicion, or one series; then nobody asks again."""
_YOUNG_S = 30.0
_APART_S = 1.0
"""Between two captures of one hang: closer together they show the same of anything."""

ROUNDS, ROUND_S = 5, 10.0
_LOOKS, _EVERY_S = 20, 0.05
_SERIES_AGAIN_S = 600.0
"""From the begin of one series to the next, in one attempt."""
MOST_DUMPS = 512
"""Ranks of a job whose recorders' dumps are kept when it hangs: each is some ten thousand bytes."""
_NAMED = 0.5
"""What a capture says less certainly than this is soon outweighed."""
_SURE = 0.8
"""Ranks that a first capture blames so certainly may be looked at more closely."""


# -- asking ------------------------------------------------------------------------------------------------------------


def ask(
    state: JobState,
    attempt: Attempt,
    reason: CaptureReason,
    now: float,
    *,
    deep: tuple[int, ...] = (),
    dumps: bool = False,
) -> CaptureAsked:
    """The next look at all processes, or at a series of rounds the first one."""
    number = state.next_capture
    asked = CaptureAsked(time=now, capture=number, attempt=attempt.number, reason=reason, deep=deep, dumps=dumps)
    return _round(asked, number, 1) if reason == "slow" else asked


def _round(asked: CaptureAsked, series: int, number: int) -> CaptureAsked:
    return CaptureAsked(
        time=asked.time, capture=asked.capture, attempt=asked.attempt, reason="slow",
        looks=_LOOKS, every_s=_EVERY_S, series=series, round=number,
    )  # fmt: skip


def of_hang(
    state: JobState, attempt: Attempt, picture: Picture, hang: Hang, config: HangConfig, now: float
) -> list[CaptureAsked]:
    """The capture that this hang needs now, if it has not been asked for."""
    mine = _since_suspicion(state, attempt)
    lost = [one for one in mine if one.located is None and now - one.asked.time > LOST_S]
    newest = mine[-1] if mine else None
    if newest is not None and now - newest.asked.time < _APART_S:
        return []
    if sum(one.located is None for one in mine) >= MOST_LOST:
        return []
    if len(mine) - len(lost) >= _wanted(hang, config) or in_flight(state, picture, now):
        return []
    # the ranks may be gone after the second, and their recorders with them
    dumps = newest is not None and len(attempt.started.placement) <= MOST_DUMPS
    return [ask(state, attempt, "hang", now, deep=_closer(hang, newest), dumps=dumps)]


def _wanted(hang: Hang, config: HangConfig) -> int:
    """How many captures this hang should have by now."""
    first_s = suspicion_s(hang.still_limit_s, config)
    moments = {hang.still_limit_s - AHEAD_S, hang.limit_s - AHEAD_S}
    return 1 + sum(first_s + _APART_S <= moment <= hang.for_s for moment in moments)


def _closer(hang: Hang, before: Capture | None) -> tuple[int, ...]:
    """Ranks that are stopped or blamed for standing still: whoever works is not held up any longer than others."""
    if hang.kind == "stopped":
        return hang.ranks
    found = before.located.located if before is not None and before.located is not None else None
    return found.ranks if found is not None and found.confidence >= _SURE and hang.kind != "busy" else ()


def begin_rounds(state: JobState, now: float) -> list[CaptureAsked]:
    """The first look at an attempt that has become slow; none where there was one not long ago, or it hangs."""
    attempt = state.active
    if attempt is None or attempt.ending is not None or state.suspicion is not None:
        return []
    mine = [one.asked for one in state.captures if one.asked.series and one.asked.attempt == attempt.number]
    if mine and now - mine[-1].time < _SERIES_AGAIN_S:
        return []
    return [ask(state, attempt, "slow", now)]


def next_round(state: JobState, attempt: Attempt, picture: Picture, now: float) -> list[CaptureAsked]:
    """The next look at an attempt that has become slow. One that hangs meanwhile is not slow."""
    newest = next((one for one in reversed(state.captures) if one.asked.series), None)
    if newest is None or newest.asked.attempt != attempt.number or state.suspicion is not None:
        return []
    asked, age_s = newest.asked, now - newest.asked.time
    if newest.located is not None or age_s < ROUND_S or in_flight(state, picture, now):
        return []
    number = asked.round + 1
    if number > ROUNDS:  # nobody has said what all of them have shown
        same = [one for one in state.captures if one.asked.series == asked.series and one.asked.round == ROUNDS]
        if len(same) > MOST_LOST:
            return []
        number = ROUNDS
    return [_round(ask(state, attempt, "slow", now), asked.series, number)]


# -- what is on its way ------------------------------------------------------------------------------------------------


def collect_s(asked: CaptureAsked) -> float:
    """So long after the order what nodes have seen is waited for."""
    return COLLECT_S[asked.reason]


def in_flight(state: JobState, picture: Picture, now: float) -> CaptureAsked | None:
    """The newest capture, while nodes still look: another order would take its place."""
    attempt, newest = state.active, state.captures[-1] if state.captures else None
    if attempt is None or newest is None or newest.located is not None:
        return None
    asked = newest.asked
    if asked.attempt != attempt.number or asked.time < state.term_time or now - asked.time > collect_s(asked):
        return None
    reports = (picture.report(node) for node in attempt.alive_by_node() if picture.connected(node))
    looks = any(report is not None and report.captured < asked.capture for report in reports)
    return asked if looks else None


def order(state: JobState, now: float) -> CaptureOrder | None:
    """What agents are told; an answer that comes too late is asked of nobody."""
    attempt, newest = state.active, state.captures[-1] if state.captures else None
    if attempt is None or attempt.ending is not None or newest is None or newest.located is not None:
        return None
    asked = newest.asked
    if asked.attempt != attempt.number or asked.time < state.term_time or now - asked.time > _YOUNG_S:
        return None
    return CaptureOrder(
        number=asked.capture,
        attempt=asked.attempt,
        looks=asked.looks,
        every_s=asked.every_s,
        # of a slow job the operations say little, and five times as much is sent
        recorder=asked.reason != "slow",
        deep=asked.deep,
        dumps=asked.dumps,
    )


# -- what was found ----------------------------------------------------------------------------------------------------


def _since_suspicion(state: JobState, attempt: Attempt) -> list[Capture]:
    if state.suspicion is None:
        return []
    since = state.suspicion.time
    return [
        one
        for one in state.captures
        if one.asked.reason == "hang" and one.asked.attempt == attempt.number and one.asked.time >= since
    ]


def found(state: JobState, attempt: Attempt) -> HangLocated | None:
    """What the captures of the hang that is suspected have shown: the newest, unless it could not tell what one before
    it could, because the node of the culprit has sent nothing in time."""
    shown = [one.located for one in _since_suspicion(state, attempt) if one.located is not None]
    named = [one for one in shown if one.located.ranks and one.located.confidence >= _NAMED]
    if shown and shown[-1].located.kind == "unknown" and named:
        return named[-1]
    return shown[-1] if shown else None


def is_awaited(state: JobState, attempt: Attempt, hang: Hang, due_s: float, now: float) -> bool:
    """Whether it will soon be known better who is to blame, at an age of the hang of `due_s`."""
    mine = _since_suspicion(state, attempt)
    in_time = hang.for_s < due_s + LATE_S
    if not mine:
        return in_time
    # one that began late has its time, too; asking again gains none
    return mine[-1].located is None and (in_time or now - mine[0].asked.time < LATE_S)


def stands(hang: Hang, seen: HangLocated | None) -> bool:
    """Whether ranks that seem to work do not: they wait at one place for their device or the network, and spin."""
    if hang.kind != "busy" or seen is None:
        return False
    return set(hang.ranks) <= set(seen.standing) or (
        seen.located.kind == "device" and len(seen.located.captures) > 1 and set(hang.ranks) <= set(seen.located.ranks)
    )


def of_slowness(state: JobState, attempt: Attempt) -> tuple[CaptureAsked, Located] | None:
    """The newest series of rounds of this attempt, when it is known what they have shown."""
    for one in reversed(state.captures):
        if one.asked.series and one.asked.attempt == attempt.number:
            return (one.asked, one.located.located) if one.located is not None else None
    return None
