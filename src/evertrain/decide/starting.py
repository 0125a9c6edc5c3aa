"""When may the next attempt start? When all nodes have prepared it and nothing of the old one is left."""

from __future__ import annotations

from evertrain.decide import changes, closing, examining, lost, planned, resume, rollback, storing, verdicts
from evertrain.decide.picture import Picture
from evertrain.decide.resume import Resume
from evertrain.decide.state import Attempt, JobState
from evertrain.model import records as r
from evertrain.model.config import Config
from evertrain.model.copies import Fetch, Peer
from evertrain.model.records import AnyRecord

_MOST_LINES = 8
_SPEAKS_S = 5.0
"""So long a node that was taken out may take to be heard again: an agent that starts again needs a second or two."""


def start(state: JobState, picture: Picture, config: Config, now: float) -> list[AnyRecord]:
    """Everything is prepared and nothing of the old attempt is left: go."""
    if state.closing or state.active is not None or not state.roster or _is_held(state, now):
        return []
    if dropped := changes.drop(state, picture, config, now):
        return dropped
    if missing := _not_ready(state, picture):
        return _give_up_waiting(state, picture, config, now, missing)
    if not resume.all_read(state, picture):
        return []
    assert state.run is not None
    nodes = state.active_nodes()
    first = picture.attempt(nodes[0], state.next_attempt)
    report = picture.report(nodes[0])
    assert first is not None and first.store_port is not None and report is not None
    chosen = _chosen(state, picture)
    if _may_speak_yet(state, picture, config, chosen, now):
        return []
    if storing.must_look(state, picture, chosen, now, config.checkpoint):
        return []
    stored = storing.newer_than(chosen, state, picture, planned.latest_step(state))
    if stored is not None:
        from_store: dict[int, resume.Tier] = dict.fromkeys(state.placement(), "store")
        chosen = Resume(stored.step, from_store, stored.attempt)
    elif chosen is not None and chosen.fetches:
        return []  # the nodes that need it are bringing it
    elif chosen is None and not state.attempts and (theirs := _of_another_size(state, picture)):
        # to begin anew would void what they saved: that is for the user to say
        return [r.JobEnded(time=now, state="failed", exit_code=1, message=f"{theirs}; --fresh begins anew")]
    asked, change, version = planned.pending(state), changes.pending(state), changes.next_version(state)
    started = r.AttemptStarted(
        time=now,
        attempt=state.next_attempt,
        restart_count=len(state.attempts),
        placement=state.placement(),
        keepers={node: picture.report(node).keeper for node in nodes},  # type: ignore[union-attr,misc]
        master_addr=report.address,
        master_port=first.store_port,
        resume=chosen.step if chosen else None,
        resume_attempt=chosen.attempt if chosen else None,
        passed_over=_passed_over(state, picture, chosen),
        tiers=chosen.tiers if chosen else {},
        reached=state.best_step,
        folder=stored.folder if stored is not None else "",
        restart=asked.asked.restart if asked is not None else None,
        version=version,
        code=changes.digest(state, version),
        change=change.asked.change if change is not None else None,
    )
    return [started]


def _is_held(state: JobState, now: float) -> bool:
    """Whether it has not been decided yet how training goes on, storage is given time, or the user has nodes tested."""
    undecided = state.incident is not None and state.incident.decided is None
    return undecided or now < state.memory.hold_until or examining.holds(state)


def _may_speak_yet(state: JobState, picture: Picture, config: Config, chosen: Resume | None, now: float) -> bool:
    """Whether a node that was taken out and cannot be heard may still say what it holds, and that would help.

    Its agent may just be starting again; what its memory holds may be all that there is.
    """
    attempt = state.attempt
    if attempt is None or attempt.ended is None:
        return False
    if now - state.since(attempt.ended.time) > min(_SPEAKS_S, config.machines.broken_s):
        return False
    reached, placement = attempt.ended.step, attempt.started.placement
    if chosen is not None and reached is not None and chosen.step >= reached:
        return False
    stuck = {placement[rank] for rank in picture.stuck(attempt.number)}
    out = set(placement.values()) - set(state.roster) - stuck
    return any(state.nodes[node].state == "evicted" and not _has_spoken(picture, node, attempt) for node in out)


def _has_spoken(picture: Picture, node: str, attempt: Attempt) -> bool:
    report = picture.report(node)
    return report is not None and picture.connected(node) and report.copies_after_attempt >= attempt.number


def fetches(state: JobState, picture: Picture, config: Config) -> dict[str, tuple[Fetch, ...]]:
    """What nodes are to get from others before the next attempt can start, or the job can end; by node."""
    if not may_fetch(state, picture):
        return {}
    chosen = _chosen(state, picture)
    if chosen is None:
        return {}
    placement, found = state.placement(), dict[str, tuple[Fetch, ...]]()
    for rank, nodes in sorted(chosen.fetches.items()):
        # ranks that need the same pieces do not all begin with the same node
        turned = (*nodes[rank % len(nodes) :], *nodes[: rank % len(nodes)])
        peers = tuple(peer for node in turned if (peer := peer_of(picture, node)) is not None)
        if not peers:
            continue  # their agents have just been started
        attempt, step = chosen.save
        fetch = Fetch(rank=rank, attempt=attempt, step=step, peers=peers, within_s=config.checkpoint.fetch_s)
        found[placement[rank]] = (*found.get(placement[rank], ()), fetch)
    return found


def may_fetch(state: JobState, picture: Picture) -> bool:
    """Whether it is time to look what nodes lack."""
    if state.run is None or state.ended is not None or not state.roster:
        return False
    waits = closing.at_rest(state, picture) if state.closing else state.active is None
    return waits and resume.all_read(state, picture)


def peer_of(picture: Picture, node: str) -> Peer | None:
    """Where a node gives out copies; None while it cannot be asked."""
    report = picture.report(node)
    if report is None or not report.transfer_port:
        return None
    return Peer(node, report.address, report.transfer_port)


def _chosen(state: JobState, picture: Picture) -> Resume | None:
    chosen = resume.newest(state, picture, planned.latest_step(state))
    if chosen is not None or rollback.begins_anew(state):
        return chosen
    if rollback.newest_attempt(state) is not None and storing.newer_than(None, state, picture, None) is not None:
        return None  # what that version has saved is in the store only
    # what was there when a restart was asked for may have been overwritten since: never from nothing because of that
    return resume.newest(state, picture) or resume.newest(state, picture, of_any_version=True)


def _passed_over(state: JobState, picture: Picture, chosen: Resume | None) -> tuple[str, ...]:
    """What went wrong with copies on the way to this choice."""
    lines = [
        f"{node}: step {one.step} of rank {one.rank} could not be fetched: {one.because}"
        for node in state.active_nodes()
        if (report := picture.report(node)) is not None
        for one in report.failed_fetches
    ]
    last = rollback.newest_attempt(state)
    if chosen is not None and last is not None and chosen.attempt > last:
        lines.append(f"no checkpoint of the version that is gone back to is left; step {chosen.step} is a later one's")
    if chosen is None and state.best_step is not None:
        reason = _of_another_size(state, picture) or "no checkpoint that all ranks have"
        lines.append(f"{reason}; started again from nothing after step {state.best_step}")
    return tuple(lines[-_MOST_LINES:])


def _of_another_size(state: JobState, picture: Picture) -> str:
    """What there is but for the number of ranks that saved it; empty if there is no such thing."""
    now = len(state.placement())
    copies = [copy for seen in picture.nodes.values() for copy in seen.report.copies if copy.world_size != now]
    newest = max(copies, key=lambda copy: copy.save, default=None)
    if newest is None:
        return ""
    return (
        f"step {newest.step} was saved by {newest.world_size} ranks and now there are {now}, for which only a step in "
        f"a shared store can be divided anew"
    )


def _not_ready(state: JobState, picture: Picture) -> str:
    """Which node keeps the start waiting, and why; empty when all have prepared."""
    nodes, code = state.active_nodes(), changes.prepared(state, picture)
    wanted: dict[str, set[int]] = {}
    for rank, node in state.placement().items():
        wanted.setdefault(node, set()).add(rank)
    for node in nodes:
        report = picture.report(node)
        if report is None or not picture.connected(node):
            return f"{node}: no word from its agent"
        if report.keeper is None:
            return f"{node}: its agent cannot reach the keeper"
        if report.code != code.digest:
            why = f" ({report.code_problem})" if code.digest and report.code_failed == code.digest else ""
            return f"{node}: it has not got version {code.version} of the code yet{why}"
        if report.env != code.env:
            return f"{node}: ranks do not get the new environment yet"
        attempt = picture.attempt(node, state.next_attempt)
        if attempt is None or attempt.phase != "prepared" or (node == nodes[0] and attempt.store_port is None):
            return f"{node}: ranks are not prepared{f' ({attempt.error})' if attempt and attempt.error else ''}"
        if {one.rank for one in attempt.ranks} != wanted[node]:
            return f"{node}: ranks are prepared under the numbers that they had before"
        if any(rank.state != "waiting" for rank in attempt.ranks):
            return f"{node}: a prepared rank has ended"
        if report.gpus_held:
            return f"{node}: {report.gpus_held}"
    return ""


def _give_up_waiting(state: JobState, picture: Picture, config: Config, now: float, missing: str) -> list[AnyRecord]:
    assert state.run is not None
    node = missing.partition(":")[0]
    report = picture.report(node)
    if because := lost.away(state, picture, config.machines, node, now):
        return verdicts.missing(state, node, because, now)
    if report is not None and picture.connected(node) and report.starter.state == "starting":
        return []  # imports may take as long as they need
    newest = state.attempt
    since = max(
        newest.ended.time if newest is not None and newest.ended is not None else state.run.time,
        lost.since(state, picture, node),
        # on several machines nothing could be prepared before all were there
        state.nodes[node].time if node in state.nodes else 0.0,
    )
    limit_s = config.restart.node_return_s
    attempt = picture.attempt(node, state.next_attempt)
    if report is not None and report.keeper is not None and picture.connected(node) and not (attempt and attempt.error):
        # it is there and at work; how long its imports took was not held against it either
        limit_s = max(limit_s, config.hang.start_limit_s)
    if now - since <= limit_s:
        return []
    message = f"{missing} for {now - since:.0f} s; see logs/agent-{node}.log and logs/keeper-{node}.log"
    return [r.JobEnded(time=now, state="failed", exit_code=1, message=message)]
