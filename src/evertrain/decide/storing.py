"""When does a step go to the shared store, and when does a job go on from there?

    due ─▶ write (all nodes, from their disks) ─▶ finish (one node) ─▶ commit (the controller) ─▶ StoreCommitted
              └────────────── a node fails, or it takes too long ──────────────▶ tried again later

An upload is not in the event log: after a controller is gone what it had ordered is given up, and the next one begins
anew. Training never waits for any of this.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
from msgspec.structs import replace

from evertrain.decide import resume, rollback
from evertrain.decide.picture import Picture, Stored
from evertrain.decide.resume import Resume
from evertrain.decide.state import JobState
from evertrain.model.config import CheckpointConfig
from evertrain.model.copies import StoreSettings, UploadOrder

_RETRY_AT_MOST_S = 1800.0
_FAILURES = 2
"""So many attempts that went on from a stored step may come to nothing before an older one is taken."""


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """A step on its way to the store."""

    name: str
    attempt: int
    step: int
    folder: str
    nodes: tuple[str, ...]
    world_size: int
    began: float
    phase: str = "write"
    """write, finish, commit"""


class Storing(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller remembers of its uploads."""

    upload: Upload | None = None
    count: int = 0
    failures: int = 0
    """In a row."""
    not_before: float = 0.0
    problem: str = ""


def settings(state: JobState, picture: Picture) -> StoreSettings | None:
    """What the script wants of the store, as far as it is known."""
    for node in state.active_nodes() if state.run is not None else ():
        report = picture.report(node)
        if report is not None and report.store is not None:
            return report.store
    return StoreSettings(url=state.stored[-1].url) if state.stored else None


def advance(
    before: Storing, state: JobState, picture: Picture, config: CheckpointConfig, root: str, now: float
) -> Storing:
    """What is to be done now; `root` is the job's place in the store."""
    wanted = settings(state, picture)
    if state.closing or state.ended is not None or wanted is None or state.run is None:
        return replace(before, upload=None)
    if before.upload is not None and not resume.rules(state).allow((before.upload.attempt, before.upload.step)):
        return replace(before, upload=None)  # a later attempt has gone back behind it: nobody will go on from there
    if before.upload is not None:
        return _watch(before, before.upload, picture, config, now)
    if now < before.not_before or not _is_due(state, picture, wanted, now):
        return before
    save = _newest_on_disks(state, picture)
    if save is None or not _is_new(save, state, wanted):
        return before  # rounds bring the next one to the disks
    attempt, step = save
    count = before.count + 1
    upload = Upload(
        # names of files in the store: no controller before or after this one may use them
        name=f"{int(now)}.{state.term}.{count}",
        attempt=attempt,
        step=step,
        folder=f"{root}/attempt-{attempt}/step-{step}",
        nodes=state.active_nodes(),
        world_size=len(state.placement()),
        began=now,
    )
    return replace(before, upload=upload, count=count)


def order(storing: Storing, node: str) -> UploadOrder | None:
    """One node's part in the upload that is under way."""
    upload = storing.upload
    if upload is None or node not in upload.nodes:
        return None
    return UploadOrder(
        name=upload.name,
        attempt=upload.attempt,
        step=upload.step,
        folder=upload.folder,
        world_size=upload.world_size,
        writers=len(upload.nodes),
        finish=upload.phase != "write" and node == upload.nodes[0],
    )


def failed(storing: Storing, because: str, config: CheckpointConfig, now: float) -> Storing:
    """The upload has come to nothing: later again."""
    upload = storing.upload
    assert upload is not None
    wait_s = min(_RETRY_AT_MOST_S, config.store_retry_s * 2**storing.failures)
    problem = f"step {upload.step} did not get into the store: {because}; the next try is in {wait_s:.0f} s"
    return replace(storing, upload=None, failures=storing.failures + 1, not_before=now + wait_s, problem=problem)


def succeeded(storing: Storing) -> Storing:
    return replace(storing, upload=None, failures=0, not_before=0.0, problem="")


def _watch(storing: Storing, upload: Upload, picture: Picture, config: CheckpointConfig, now: float) -> Storing:
    states = {}
    for node in upload.nodes:
        report = picture.report(node)
        if report is not None and report.upload is not None and report.upload.name == upload.name:
            states[node] = report.upload.state
            if report.upload.state == "failed":
                return failed(storing, f"{node}: {report.upload.because}", config, now)
    if now - upload.began > config.store_limit_s:
        return failed(storing, f"it took more than {config.store_limit_s:g} s", config, now)
    if upload.phase == "write" and all(states.get(node) == "written" for node in upload.nodes):
        return replace(storing, upload=replace(upload, phase="finish"))
    if upload.phase == "finish" and states.get(upload.nodes[0]) == "finished":
        return replace(storing, upload=replace(upload, phase="commit"))
    return storing


def _is_due(state: JobState, picture: Picture, wanted: StoreSettings, now: float) -> bool:
    if wanted.every_steps is not None:
        return True  # which step there is decides
    assert state.run is not None
    last = state.stored[-1].time if state.stored else 0.0
    return now - max(last, state.run.time) >= wanted.every_s


def _is_new(save: tuple[int, int], state: JobState, wanted: StoreSettings) -> bool:
    """Whether the store should have this save, by what it has."""
    attempt, step = save
    newest = state.stored[-1] if state.stored else None
    if newest is None:
        return step >= (wanted.every_steps or 1)
    if attempt == newest.attempt or step > newest.step:
        return step >= newest.step + (wanted.every_steps or 1)
    # a later attempt has gone back behind what is stored
    return not resume.Rules(lineage=state.lineage).allow((newest.attempt, newest.step))


def _newest_on_disks(state: JobState, picture: Picture) -> tuple[int, int] | None:
    """The newest save of which the disks of all nodes have every rank."""
    placement = state.placement()
    given = resume.rules(state)
    ranks: dict[tuple[int, int], set[int]] = defaultdict(set)
    for node, seen in picture.nodes.items():
        for copy in seen.report.copies:
            is_ours = placement.get(copy.rank) == node and copy.world_size == len(placement)
            if copy.tier == "disk" and is_ours and given.allow(copy.save):
                ranks[copy.attempt, copy.step].add(copy.rank)
    return max((save for save, having in ranks.items() if len(having) == len(placement)), default=None)


# -- going on from the store -------------------------------------------------------------------------------------------


def since(state: JobState) -> float:
    """Steps of lives of the job that began before are void."""
    return state.life if state.is_anew else 0.0


def is_known(state: JobState) -> bool:
    """Whether steps of the store are chosen here: what was passed over must not be taken by ranks that look there."""
    return bool(state.stored) or any(attempt.started.folder for attempt in state.attempts)


def must_look(state: JobState, picture: Picture, chosen: Resume | None, now: float, config: CheckpointConfig) -> bool:
    """Whether the next attempt has to wait until somebody has looked into the store."""
    if picture.stored is not None or settings(state, picture) is None:
        return False
    if chosen is not None and all(chosen.step >= one.step for one in _of_log(state)):
        return False
    return now - max(state.run.time if state.run is not None else 0.0, state.term_time) < config.store_look_s


def newer_than(chosen: Resume | None, state: JobState, picture: Picture, at_most: int | None) -> Stored | None:
    """The step of the store that the next attempt goes on from; None: what is nearer is as new, or there is none.

    What an earlier life of the job has stored is for those who have nothing else.
    """
    listed = picture.stored if picture.stored is not None else _of_log(state)
    usable = [one for one in listed if (at_most is None or one.step <= at_most) and not _fails(one.folder, state)]
    ours = [one for one in usable if one.life == state.life]
    given = resume.Rules(lineage=state.lineage, last_attempt=rollback.newest_attempt(state))
    own = [one for one in ours if given.allow((one.attempt, one.step))]
    if own:
        newest = max(own, key=lambda one: one.step)
        return newest if chosen is None or newest.step > chosen.step else None
    others = [one for one in usable if since(state) <= one.life < state.life]
    return others[-1] if others and chosen is None else None


def _of_log(state: JobState) -> tuple[Stored, ...]:
    """What the event log says of the store, which somebody may have emptied since."""
    return tuple(
        Stored(
            folder=one.folder, attempt=one.attempt, step=one.step, world_size=one.world_size, life=state.life
        )
        for one in state.stored
    )  # fmt: skip


def _fails(folder: str, state: JobState) -> bool:
    """Whether attempts of this run have tried this step and not come into their training loops."""
    tried = [one for one in state.attempts if one.started.folder == folder and one.resumed is None]
    return len(tried) >= _FAILURES
