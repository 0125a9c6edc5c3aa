"""Does the job go on after a failed attempt?

Every abnormal end restarts, as long as there is progress. It ends when the user said so (`--max-restarts`,
`--observe-only`), when the first failing rank raised the same exception at the same step twice, or after three attempts
in a row without progress.
"""

from __future__ import annotations

from typing import Literal

from evertrain.decide.state import Incident, JobState
from evertrain.detect import exits
from evertrain.model.config import RestartConfig


def after_failure(state: JobState, incident: Incident, config: RestartConfig) -> tuple[Literal["restart", "stop"], str]:
    """What to do, and the reason in one line for the person who reads it."""
    assert state.run is not None
    who = culprit(incident)
    if state.run.observe_only:
        return "stop", f"{who} ({incident.opened.cause}); with --observe-only nothing is restarted"
    limit = state.run.max_restarts
    used = state.restarts_used
    if limit is not None and used >= limit:
        return "stop", f"{who} ({incident.opened.cause}); {used} of {limit} restarts are used (--max-restarts)"
    if (repeated := _same_error(state, incident)) >= config.same_error_limit:
        return "stop", f"{who} ended {_times(repeated)} with the same {incident.opened.cause} at the same step"
    idle = _without_progress(state)
    if idle >= config.no_progress_attempts:
        return "stop", f"{who} ({incident.opened.cause}); {idle} attempts in a row made no progress"
    advice = ""
    if incident.opened.source == "hang":
        advice = '; if it comes back at the same step, declare what takes so long: `with evertrain.phase("…"):`'
    return "restart", f"{who} ({incident.opened.cause}): restart in place{advice}"


def culprit(incident: Incident) -> str:
    opened = incident.opened
    if len(opened.ranks) == 1:
        return f"rank {opened.ranks[0]} on {opened.nodes[0]}"
    if opened.nodes:
        return " and ".join(opened.nodes)
    return "an unknown rank"


def _same_error(state: JobState, incident: Incident) -> int:
    """How often in this run the first failing rank has ended with this very exception, this time included; 0: none."""
    signature = _signature(state, incident)
    if signature is None:
        return 0
    mine = [seen for seen in state.incidents.values() if _signature(state, seen) == signature]
    return len(mine)


def _signature(state: JobState, incident: Incident) -> str | None:
    attempt = next((seen for seen in state.attempts if seen.number == incident.opened.attempt), None)
    if attempt is None or len(incident.opened.ranks) != 1:
        return None
    end = attempt.ends.get(incident.opened.ranks[0])
    if end is None or end.error is None or end.follower or exits.is_damage(end.error):
        return None
    return end.error.signature()


def _without_progress(state: JobState) -> int:
    count = 0
    for attempt in reversed(state.attempts):
        if attempt.ended is None or attempt.ended.progress:
            break
        if attempt.ended.outcome == "restarted":
            continue  # it was not given the time
        if any(exits.is_damage(end.error) for end in attempt.ends.values()):
            continue  # the next one goes on from another copy
        count += 1
    return count


def _times(count: int) -> str:
    return {2: "twice"}.get(count, f"{count} times")
