"""How does a job end that has not come to its own end? The newest common step goes to disk, then it is over.

Nothing starts any more; what the ranks have saved is final when none of them runs.
"""

from __future__ import annotations

from evertrain.decide import resume
from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.model import records as r
from evertrain.model.config import Config
from evertrain.model.records import AnyRecord


def close(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """No attempt will follow: bring the newest common step to disk, then end the job."""
    if not state.closing or not at_rest(state, picture):
        return []
    if state.flushed is None:
        if _is_on_its_way(state, picture, config, now):
            return []
        step = flush_step(state, picture)
        reports = [picture.report(node) for node in state.active_nodes()]
        problems = tuple(line for report in reports if report is not None for line in report.problems)
        if step is None:
            return (
                [r.Flushed(time=now, step=None)]
                if resume.all_read(state, picture) or _out_of_time(state, config, now)
                else []
            )
        if all(report is not None and report.flushed_step == step for report in reports):
            return [r.Flushed(time=now, step=step, problems=problems)]
        if problems and all(
            report is not None and (report.problems or report.flushed_step == step) for report in reports
        ):
            return [r.Flushed(time=now, step=None, problems=problems)]
        if _out_of_time(state, config, now):
            return [r.Flushed(time=now, step=None, problems=(*problems, "the flush to disk did not end in time"))]
        return []
    kept = ""
    if state.flushed.step is not None:
        kept = f"; step {state.flushed.step} is on disk, the same command resumes there"
    elif state.flushed.problems:
        kept = f"; the newest step is not on disk: {state.flushed.problems[-1]}"
    if state.stop is not None:
        left = unkillable(state)
        return stopped(state, state.stop.because + kept + (f"; {left}" if left else ""), now)
    incident = state.incident
    assert incident is not None and incident.decided is not None
    closed = r.IncidentClosed(time=now, incident=incident.number, first_new_step=None, passed_time=None)
    ended = r.JobEnded(time=now, state="failed", exit_code=1, message=incident.decided.because + kept)
    return [closed, ended]


def stopped(state: JobState, message: str, now: float) -> list[AnyRecord]:
    assert state.stop is not None
    ended = r.JobEnded(time=now, state="stopped", exit_code=128 + state.stop.signal, message=message)
    if state.incident is None:
        return [ended]
    number = state.incident.number
    return [r.IncidentClosed(time=now, incident=number, first_new_step=None, passed_time=None), ended]


def at_rest(state: JobState, picture: Picture) -> bool:
    """Whether no rank runs any more: all are gone, or never leave the kernel again. What they have saved is final."""
    attempt = state.active
    return attempt is None or (attempt.ending is not None and picture.stuck(attempt.number).issuperset(attempt.alive()))


def unkillable(state: JobState) -> str:
    return "; ".join(f"{node.node}: {node.because}" for node in state.nodes.values() if node.state == "unusable")


def flush_step(state: JobState, picture: Picture) -> int | None:
    """The newest common step, if a rank has it in memory only."""
    chosen = resume.newest(state, picture, fetch=False)
    return chosen.step if chosen is not None and "memory" in chosen.tiers.values() else None


def _is_on_its_way(state: JobState, picture: Picture, config: Config, now: float) -> bool:
    """Whether a newer step is being fetched for a node that has lost its own; for half of the time that there is."""
    if not resume.all_read(state, picture) or _since_asked(state, now) > config.grace_s / 2:
        return False
    chosen = resume.newest(state, picture)
    return chosen is not None and bool(chosen.fetches)


def _out_of_time(state: JobState, config: Config, now: float) -> bool:
    # the last seconds of the grace belong to the processes' own ends
    return _since_asked(state, now) > config.grace_s - 2.0


def _since_asked(state: JobState, now: float) -> float:
    """For so long it has been known that the job ends."""
    incident = state.incident
    since = state.stop or (incident.decided if incident is not None else None)
    return now - state.since(since.time) if since is not None else 0.0
