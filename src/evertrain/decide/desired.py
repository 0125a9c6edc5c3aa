"""What should each node be doing? A function of the job's state, sent again and again until the reports agree."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from evertrain.decide import changes, planned, reaching, storing
from evertrain.decide.changes import Prepared
from evertrain.decide.closing import at_rest, flush_step
from evertrain.decide.picture import Picture
from evertrain.decide.replaying import Part
from evertrain.decide.state import Attempt, JobState
from evertrain.model.config import Config
from evertrain.model.copies import Fetch, Peer, RoundOrder
from evertrain.model.diagnosis import InspectOrder
from evertrain.model.report import Desired, DesiredAttempt, Go, RankOrder
from evertrain.model.spec import ControllerSpec
from evertrain.model.stacks import CaptureOrder


def desired(
    state: JobState,
    picture: Picture,
    spec: ControllerSpec,
    config: Config,
    node: str,
    *,
    backup_round: RoundOrder | None = None,
    fetches: tuple[Fetch, ...] = (),
    check: int = 0,
    reach: tuple[Peer, ...] = (),
    placed: Mapping[str, tuple[int, ...]] | None = None,
    running: Mapping[str, tuple[int, ...]] | None = None,
    prepared: Prepared | None = None,
    tried: Mapping[str, tuple[str, ...]] | None = None,
    capture: CaptureOrder | None = None,
    inspect: InspectOrder | None = None,
    replay: Part | None = None,
) -> Desired:
    """Everything that `node` should be doing now.

    Its part in backups and restores is decided for all nodes at once. `placed` are all ranks by node, `running` those
    of the active attempt, `prepared` what waits to become ranks, `tried` the peers of each node, `capture` the look at
    all processes that is wanted now, `inspect` its part in the tests of stopped nodes, `replay` in a replay; whoever
    asks for many nodes looks them up once.
    """
    if prepared is None:
        prepared = changes.prepared(state, picture)
    ranks = (state.ranks_by_node() if placed is None else placed).get(node, ())
    attempts: list[DesiredAttempt] = []
    if running is None:
        running = state.active.by_node() if state.active is not None else {}
    if state.active is not None and node in running:
        attempts.append(_current(state, state.active, running, spec, node))
    if ranks and _prepares(state, picture, spec, node):
        store = ranks[0] == 0
        attempts.append(
            DesiredAttempt(
                attempt=state.next_attempt, phase="prepare", ranks=ranks, store=store, store_port=spec.master_port
            )
        )
    if replay is not None:
        attempts.append(_replay(state, spec, prepared.version, replay))
    flushes = state.closing and at_rest(state, picture) and state.flushed is None
    ended = state.ended
    waits = state.incident is not None or planned.verifying(state) is not None
    return Desired(
        job=spec.job,
        term=state.term,
        attempts=tuple(attempts),
        ranks=ranks,
        last_attempt=state.next_attempt - 1,
        first_attempt=state.first_attempt,
        env=prepared.env,
        code=changes.order(state, prepared, config.code),
        compare=planned.compare(state),
        flush_step=flush_step(state, picture) if flushes else None,
        shutdown=ended is not None,
        discard_checkpoints=ended is not None and ended.state == "done",
        keep_all=ended is not None and ended.state != "done" and (state.flushed is None or state.flushed.step is None),
        outcome=ended.state if ended is not None else "",
        exit_code=ended.exit_code if ended is not None else 0,
        message=ended.message if ended is not None else "",
        read_pages_s=config.agent.read_pages_s,
        heartbeat_s=config.agent.heartbeat_s,
        gpu_wait_s=config.agent.gpu_wait_s,
        eager=waits or state.active is None or state.active.resumed is None or bool(spec.faults),
        round=backup_round,
        fetches=fetches,
        check=check,
        reach=reach,
        peers=reaching.peers(picture, (reaching.tried(state) if tried is None else tried).get(node, ())),
        early=_early(state, picture, spec, node, prepared),
        capture=capture if node in running else None,
        inspect=inspect,
    )


def _prepares(state: JobState, picture: Picture, spec: ControllerSpec, node: str) -> bool:
    """Whether the next attempt's ranks should wait: always between attempts; ahead of need where that is cheap."""
    assert state.run is not None
    if state.closing or state.ended is not None:
        return False
    active = state.active
    if active is None:
        return True
    if active.ending is not None:
        # a port that the user fixed is free only when the old attempt's store is gone
        return spec.master_port is None
    limit = state.run.max_restarts
    if state.run.observe_only or (limit is not None and state.restarts_used >= limit):
        return False
    report = picture.report(node)
    if report is None or report.memory_is_tight:
        return False
    ahead = report.starter.mode in ("zygote", "parked") and report.starter.state == "ready"
    # forks ahead must not slow the way back down
    return ahead and spec.master_port is None and active.resumed is not None and state.incident is None


def _current(
    state: JobState, attempt: Attempt, running: Mapping[str, tuple[int, ...]], spec: ControllerSpec, node: str
) -> DesiredAttempt:
    started, ranks, nodes = attempt.started, running[node], tuple(running)
    store = node == nodes[0]
    if attempt.ending is not None:
        return DesiredAttempt(
            attempt=attempt.number, phase="end", ranks=ranks, store=store, signal=attempt.ending.signal
        )
    go = replace(
        _unnumbered(state, spec, state.ran.get(attempt.number), len(ranks)),
        master_addr=spec.master_addr or started.master_addr,
        master_port=started.master_port,
        world_size=len(started.placement),
        group_rank=nodes.index(node),
        group_world_size=len(nodes),
        restart_count=started.restart_count,
        resume=started.resume,
        reached=started.reached,
        ranks=tuple(
            RankOrder(rank=rank, local_rank=local, resume_tier=started.tiers.get(rank))
            for local, rank in enumerate(ranks)
        ),
        resume_attempt=started.resume_attempt,
        resume_folder=started.folder,
        store_since=storing.since(state) if started.resume is None and not storing.is_known(state) else None,
    )
    return DesiredAttempt(attempt=attempt.number, phase="go", ranks=ranks, store=store, go=go)


def _replay(state: JobState, spec: ControllerSpec, version: int | None, part: Part) -> DesiredAttempt:
    """A group is a job of its own: what it runs is what the next attempt will."""
    assert state.run is not None
    nproc = state.run.nproc_per_node
    ranks = tuple(range(part.group_rank * nproc, (part.group_rank + 1) * nproc))
    asked = DesiredAttempt(attempt=-part.round, phase=part.phase, ranks=ranks, store=part.group_rank == 0)
    if part.phase != "go" or part.port is None:
        return asked if part.phase == "end" else replace(asked, phase="prepare")
    go = replace(
        _unnumbered(state, spec, version, nproc),
        master_addr=part.address,
        master_port=part.port,
        world_size=len(part.nodes) * nproc,
        group_rank=part.group_rank,
        group_world_size=len(part.nodes),
        faults=(),
        mesh=None,
        ranks=tuple(RankOrder(rank=rank, local_rank=local) for local, rank in enumerate(ranks)),
        replay=part.settings,
    )
    return replace(asked, go=go)


def _unnumbered(state: JobState, spec: ControllerSpec, version: int | None, ranks: int) -> Go:
    """What is the same for the ranks of every node that run a version."""
    return Go(
        master_addr="",
        master_port=0,
        world_size=0,
        group_rank=0,
        group_world_size=0,
        local_world_size=ranks,
        restart_count=0,
        max_restarts=spec.max_restarts or 0,
        role=spec.role,
        signals_to_handle=spec.signals_to_handle,
        virtual_local_rank=spec.virtual_local_rank,
        mesh=spec.mesh,
        resume=None,
        reached=None,
        faults=spec.faults,
        ranks=tuple(RankOrder(rank=-1, local_rank=local) for local in range(ranks)),
        args=changes.args(state, version),
    )


def _early(state: JobState, picture: Picture, spec: ControllerSpec, node: str, prepared: Prepared) -> Go | None:
    """A standby that is fit runs its script up to `evertrain.init()`, if that is wanted and there is memory for it."""
    if spec.standby_barrier != "init" or state.closing or state.ended is not None or node not in state.standbys():
        return None
    known, report = state.nodes.get(node), picture.report(node)
    if known is None or known.state != "standby" or report is None or report.memory_is_tight:
        return None
    # the first start of all is not to be slowed down; from then on what waits must stay, above all in an incident
    if not any(attempt.resumed is not None for attempt in state.attempts):
        return None
    return _unnumbered(state, spec, prepared.version, state.run.nproc_per_node)  # type: ignore[union-attr]
