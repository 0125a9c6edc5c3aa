"""What follows from what we know? The rules that carry a job from its first attempt to its end.

    prepare ──all prepared──▶ running ──a rank fails──▶ ending ──all ended──▶ decided ──restart──▶ prepare
                                 │                                              └──stop──▶ flush ──▶ ended
                                 └──all exit 0──▶ done

`decide(state, picture, config, now)` returns the records that come next; the caller writes them down, applies them,
and asks again until nothing follows. What the nodes should do is then a function of the state alone (`decide.desired`).
The rules stand in the order in which they are asked; each is a function of a few lines that returns what it adds.
"""

from __future__ import annotations

from math import isfinite

from msgspec.structs import replace

from evertrain.decide import (
    blame,
    changes,
    closing,
    communication,
    examining,
    hangs,
    incidents,
    joining,
    lost,
    notices,
    planned,
    saves,
    slowness,
    standbys,
    starting,
    verdicts,
)
from evertrain.decide.picture import Picture
from evertrain.decide.progress import steps
from evertrain.decide.state import Attempt, JobState
from evertrain.detect import exits
from evertrain.model import records as r
from evertrain.model.config import Config
from evertrain.model.records import AnyRecord
from evertrain.model.report import NodeReport, PageReport

_MARK_EVERY_S = 10.0
_LEAVE_S = 5.0
"""So long the ranks of a node that was taken out may take to end."""


def decide(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """The records that follow at once; none when there is nothing to do but wait."""
    if state.run is None or state.ended is not None:
        return []
    for rule in (
        _nodes_come_and_go,
        _node_states,
        notices.look,
        _ranks_ended,
        _attempt_running,
        _attempt_over,
        verdicts.look,
        examining.look,
        closing.close,
        starting.start,
    ):
        if records := rule(state, picture, config, now):
            return records
    return []


def _nodes_come_and_go(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """Nodes come and go; one that its `run` has left stops the job as a signal would."""
    if state.stop is None:
        for node in state.roster or state.known_nodes():
            report = picture.report(node)
            if report is not None and report.owner_gone:
                return [r.StopRequested(time=now, signal=15, because=f"`evertrain run` on {node} is gone")]
    return joining.settle(state, picture, config.machines, now) or lost.look(state, picture, config.machines, now)


def _node_states(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """A node joins when it is first heard; a process that cannot be killed makes it unusable; a standby is tested."""
    waiting = state.standbys()
    changed: list[AnyRecord] = []
    for node in state.roster:
        wanted = standbys.stuck(picture, node, now)
        if wanted is None and node in waiting:
            wanted = standbys.standing(state, picture, node, config, now)
        elif wanted is None and picture.connected(node):
            wanted = r.NodeChanged(time=now, node=node, state="active", because="its agent reports")
        before = state.nodes.get(node)
        if wanted is not None and (before is None or before.state != wanted.state):
            changed.append(wanted)
    return changed


def _ranks_ended(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """Note every end that an agent reports and the log does not know."""
    attempt = state.active
    if attempt is None:
        return []
    ends: list[r.RankEnd] = []
    for node, alive in attempt.alive_by_node().items():
        report = picture.report(node)
        seen = _new_ends(attempt, node, alive, report, now) if report is not None else []
        if not seen and _is_written_off(state, picture, attempt, node, now):
            seen = [_unseen_end(rank, node, now, killed=True) for rank in alive]
        ends += seen
    return [r.RanksEnded(time=now, attempt=attempt.number, ends=tuple(ends))] if ends else []


def _is_written_off(state: JobState, picture: Picture, attempt: Attempt, node: str, now: float) -> bool:
    """Whether nobody waits for the end of ranks of a node that was taken out.

    Whatever they still do there, they belong to an attempt that is over: nobody takes anything from them.
    """
    if attempt.ending is None or node in state.roster:
        return False
    return not picture.connected(node) or now - state.since(attempt.ending.time) > _LEAVE_S


def _unseen_end(rank: int, node: str, now: float, *, killed: bool = False) -> r.RankEnd:
    return r.RankEnd(rank=rank, node=node, pid=0, status=None, ended_time=now, killed=killed)


def _new_ends(attempt: Attempt, node: str, alive: list[int], report: NodeReport, now: float) -> list[r.RankEnd]:
    if report.keeper is None:
        return []
    listed = next((seen for seen in report.attempts if seen.attempt == attempt.number), None)
    if report.keeper != attempt.started.keepers[node] or listed is None:
        # ranks die with their keeper; nobody saw when, so the moment we learnt of it stands in
        return [_unseen_end(rank, node, now) for rank in alive]
    return [
        r.RankEnd(
            rank=seen.rank,
            node=node,
            pid=seen.pid,
            status=seen.exit.status,
            ended_time=seen.exit.time,
            killed=seen.killed,
            follower=exits.is_follower(seen.exit.status, seen.exit.error, seen.exit.stderr_tail),
            error=seen.exit.error,
        )
        for seen in listed.ranks
        if seen.rank in alive and seen.exit is not None
    ]


def _attempt_running(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """While ranks run: faults, the way back after an incident, marks, and a stop that was asked for."""
    attempt = state.active
    if attempt is None or attempt.ending is not None:
        return _end_harder(state, picture, config, now)
    if state.stop is not None:
        because = state.stop.because
        return [r.AttemptEnding(time=now, attempt=attempt.number, signal=15, because=because)]
    if _scripts_are_over(attempt, picture, config, now):
        left = ", ".join(f"rank {rank}" for rank in attempt.alive()[:8])
        because = f"{left} has done its work and does not leave"
        return [r.AttemptEnding(time=now, attempt=attempt.number, signal=9, because=because, completed=True)]
    step, _ = steps(attempt, picture)
    if attempt.failures():
        return incidents.act(state, attempt, blame.blame(state, attempt), step, now)
    if attempt.ends and attempt.alive() and _left_behind(state, attempt, picture, config, now):
        return incidents.act(state, attempt, blame.blame(state, attempt), step, now)
    return (
        changes.drop(state, picture, config, now)
        or changes.due(state, picture, attempt, config.restart.node_return_s, now)
        or planned.end(state, picture, attempt, config.restart.node_return_s, now)
        or hangs.look(state, attempt, picture, step, config.hang, now)
        or communication.look(state, attempt, step, now)
        or slowness.look(state, attempt, picture, step, now)
        or planned.verify(state, picture, attempt, now)
        or saves.look(state, picture, attempt, step, config.checkpoint.failed_saves_limit, now)
        or verdicts.proven(state, attempt, step, config, now)
        or changes.proven(state, attempt, *steps(attempt, picture), config, now)
        or _milestones(state, attempt, picture, config, now)
    )


def _scripts_are_over(attempt: Attempt, picture: Picture, config: Config, now: float) -> bool:
    """Whether nothing is left to do: every rank has exited with 0, or has long been in the interpreter's own exit.

    torch 2.13 can hang there for ever (DDP freed after its process group); nothing of the user's runs any more then.
    """
    if any(end.status != 0 for end in attempt.ends.values()):
        return False
    pages = picture.pages(attempt.number)
    last = [pages[rank] for rank in attempt.alive() if rank in pages]
    return len(last) == len(attempt.alive()) > 0 and all(
        page.phase == "exit" and now - page.progress_time > config.restart.leave_s for page in last
    )


def _left_behind(state: JobState, attempt: Attempt, picture: Picture, config: Config, now: float) -> bool:
    """Whether ranks stand without progress since another one exited with 0, for longer than the deadline."""
    last_exit = max(end.ended_time for end in attempt.ends.values())
    pages = picture.pages(attempt.number)
    moved = [pages[rank].progress_time for rank in attempt.alive() if rank in pages]
    return now - max([last_exit, state.term_time, *moved]) > config.restart.exit_deadline_s


def _milestones(state: JobState, attempt: Attempt, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    pages = picture.pages(attempt.number)
    ranks = attempt.started.placement
    records: list[AnyRecord] = []
    long_enough = now - state.since(attempt.started.time) > config.restart.progress_s
    resumed = [pages[rank].resumed_time for rank in ranks if rank in pages and pages[rank].resumed_time > 0]
    if attempt.resumed is None and resumed and (len(resumed) == len(ranks) or long_enough):
        takes, mesh = _script(attempt, picture)
        records.append(
            r.AttemptResumed(
                time=now, attempt=attempt.number, resumed_time=max(resumed), takes_replays=takes, mesh=mesh
            )
        )
    incident = state.incident
    if incident is not None and incident.failover_attempt == attempt.number:
        passed = [pages[rank] for rank in ranks if rank in pages and pages[rank].passed_time > 0]
        if passed and (len(passed) == len(ranks) or long_enough):
            records.append(_closed(incident.number, max(page.passed_time for page in passed), attempt, picture, now))
        elif long_enough and not passed and not any(page.relative_step for page in pages.values()):
            # no steps are ever seen: run time counts
            records.append(_closed(incident.number, now, attempt, picture, now))
    mark = attempt.progress
    step, relative = steps(attempt, picture)
    moved = [page.progress_time for page in pages.values() if page.progress_time > 0]
    due = mark is None or planned.has_passed(attempt, step)
    if moved and (due or max(moved) - mark.progress_time >= _MARK_EVERY_S):  # type: ignore[union-attr]
        records.append(_mark(attempt, pages, step, relative, now))
    return records


def _script(attempt: Attempt, picture: Picture) -> tuple[bool, str]:
    """Whether it takes part in replays, and the mesh that its ranks have made."""
    takes = any(page.takes_replays for page in picture.pages(attempt.number).values())
    reports = (picture.report(node) for node in attempt.by_node())
    return takes, next((report.mesh for report in reports if report is not None and report.mesh), "")


def _mark(attempt: Attempt, pages: dict[int, PageReport], step: int | None, relative: int, now: float) -> r.Progress:
    known = attempt.progress.tokens if attempt.progress is not None else 0.0
    # without all pages there is no sum to compare with the last one
    whole = pages.keys() >= attempt.started.placement.keys()
    return r.Progress(
        time=now,
        attempt=attempt.number,
        step=step,
        relative_step=relative,
        progress_time=max(page.progress_time for page in pages.values()),
        tokens=sum(page.tokens for page in pages.values()) if whole else known,
    )


def _closed(incident: int, passed: float, attempt: Attempt, picture: Picture, now: float) -> r.IncidentClosed:
    first_new = [page.passed_step for page in picture.pages(attempt.number).values() if page.passed_step is not None]
    return r.IncidentClosed(
        time=now, incident=incident, first_new_step=min(first_new, default=None), passed_time=passed
    )


def _end_harder(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """A rank that does not heed SIGTERM is killed while there is time to flush; no end is waited for without limit."""
    attempt = state.active
    if attempt is None or attempt.ending is None:
        return []
    # of a job that stops the rest of the time is needed to bring what was saved to disk
    patience_s = config.grace_s * (0.6 if state.stop is not None else 1.0)
    if attempt.ending.signal != 9 and now - state.since(attempt.ending.time) > patience_s:
        because = f"SIGTERM was not heeded for {patience_s:.0f} s"
        return [replace(attempt.ending, time=now, signal=9, because=because)]
    if state.stop is not None:
        waited_s, limit_s = now - state.since(state.stop.time), config.grace_s
    else:
        waited_s, limit_s = now - max(attempt.ending.time, state.term_time), config.restart.node_return_s
    if not attempt.alive() or waited_s <= limit_s:
        return []
    left = ", ".join(f"rank {rank} on {attempt.started.placement[rank]}" for rank in attempt.alive()[:8])
    message = f"{left}: no word of its end {waited_s:.0f} s after the order to end it; look at that node"
    if state.stop is not None:
        return closing.stopped(state, message, now)
    incident = state.incident
    if incident is not None and incident.opened.attempt == attempt.number and closing.at_rest(state, picture):
        if state.closing:
            return []  # what is saved is being brought to disk
        because = (
            f"{closing.unkillable(state)} for {waited_s:.0f} s: what it waits for (a disk, a mount, a driver) is dead"
        )
        return [r.Decided(time=now, incident=incident.number, action="stop", because=because)]
    return [r.JobEnded(time=now, state="failed", exit_code=1, message=message)]


def _attempt_over(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """All ranks have ended: say how, with the verdict as all records together give it."""
    attempt = state.active
    if attempt is None or attempt.alive():
        return []
    pages = picture.pages(attempt.number)
    step, relative = steps(attempt, picture)
    records: list[AnyRecord] = []
    ending = attempt.ending
    whole = ending is None or ending.completed
    asked = ending is not None and ending.restart is not None
    completed = (whole and all(end.status == 0 or end.killed for end in attempt.ends.values())) or (
        # they came to their end just before they were to be ended for a restart
        asked and all(end.status == 0 and not _heeded(end, attempt) for end in attempt.ends.values())
    )
    records += planned.verify(state, picture, attempt, now, over=True)
    outcome = "completed" if completed else "stopped" if state.stop is not None else "restarted" if asked else "failed"
    incident = state.incident
    if incident is not None and incident.opened.attempt == attempt.number:
        verdict = blame.blame(state, attempt, incident)
        if verdict.differs(incident.opened):
            records.append(verdict.correction(incident.number, now))
    elif incident is not None and completed:
        records.append(_closed(incident.number, now, attempt, picture, now))
    moved = [page.progress_time for page in pages.values() if page.progress_time > 0]
    if moved:
        records.append(_mark(attempt, pages, step, relative, now))
    takes, mesh = _script(attempt, picture)
    lasted = max(moved) - attempt.resumed.resumed_time if moved and attempt.resumed is not None else 0.0
    records.append(
        r.AttemptEnded(
            time=now,
            attempt=attempt.number,
            outcome=outcome,  # type: ignore[arg-type]
            step=step,
            relative_step=relative,
            progress=_made_progress(state, attempt, step, relative, lasted, config, now),
            loss_is_finite=all(page.loss is None or isfinite(page.loss) for page in pages.values()),
            takes_replays=takes,
            mesh=mesh,
        )
    )
    if completed:
        last = "" if step is None else f" at step {step}"
        records.append(r.JobEnded(time=now, state="done", exit_code=0, message=f"every rank exited with 0{last}"))
    return records


def _heeded(end: r.RankEnd, attempt: Attempt) -> bool:
    """Whether a rank may have left in an orderly way because it was told to, and not because its work was done."""
    return end.killed and attempt.told_to_end


def _made_progress(
    state: JobState, attempt: Attempt, step: int | None, relative: int, lasted_s: float, config: Config, now: float
) -> bool:
    """DESIGN section 1: a higher absolute step than ever; else steps for a minute; else a minute of run time."""
    if step is not None:
        return state.best_step is None or step > state.best_step
    ran_s = max(end.ended_time for end in attempt.ends.values()) - attempt.started.time
    return (lasted_s if relative else ran_s) >= config.restart.progress_s
