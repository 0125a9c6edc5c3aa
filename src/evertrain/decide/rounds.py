"""Which save is kept safe next, and what has each node to do for it?

    rest ──due──▶ pin: a step ahead that all ranks keep ──all have the same──▶ copy to other nodes ──all there──▶ rest
      ▲                     └──ranks keep different ones: further ahead──▶ pin                          │
      └───────────────────────────── the attempt ends, or a node cannot do its part ────────────────────┘

One save is common to all ranks, or it is worth nothing; so all are asked for one that lies ahead. While it is copied
the last one that is safe stays where it is. Beside it, now and then, each node writes such a save to its own disk;
that may take longer than the copies and does not keep them waiting.

Training never waits for any of this, and nothing of it is in the log: after a controller has taken over, what agents
report says which save is safe. `advance` is asked again with every change of the picture.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import ceil

import msgspec
from msgspec.structs import replace

from evertrain.decide import resume
from evertrain.decide.picture import Picture
from evertrain.decide.starting import peer_of
from evertrain.decide.state import Attempt, JobState
from evertrain.model.config import CheckpointConfig
from evertrain.model.copies import Part, Pinned, Pull, RoundOrder, Save
from evertrain.model.report import NodeReport

AHEAD_S, AHEAD_STEPS = 1.0, 2
"""So far ahead of the ranks a step is chosen: the order must be there before any of them has passed it."""
MOST_AHEAD = 16.0
_BACK_OFF_S, _LONGEST_S = 10.0, 60.0
_UNKNOWN_STEP_S = 0.05
_DISK_PATIENCE = 6
"""Times `disk_every_s`: a disk that takes longer may be dead, and copies on other nodes do not wait for it for ever."""


class Shard(msgspec.Struct, frozen=True):
    """One piece of state, and all ranks that have these very bytes."""

    name: str
    owners: tuple[int, ...]
    bytes: int


class Placed(msgspec.Struct, frozen=True):
    """Which node keeps a copy of a shard, and the owner that sends it; None: its owners are as safe as it gets."""

    holder: str | None
    source: int | None


Groups = tuple[tuple[int, ...], ...]
Place = Callable[[tuple[Shard, ...], Mapping[int, str], Groups], tuple[Placed, ...]]
"""Says where shards go, in their order."""


class Rounds(msgspec.Struct, frozen=True, kw_only=True):
    """How far the job is in this."""

    known: bool = False
    """Whether the agents have said what is safe already."""
    last: Save | None = None
    """The newest save whose every piece lies where it should."""
    attempt: int = 0
    """Whose saves the round is about; 0: none is going on."""
    wanted: int = 0
    """The first step that would do."""
    save: Save | None = None
    """What it has become, once all ranks have it."""
    pulls: dict[str, tuple[Pull, ...]] | None = None
    """By node; None: not planned yet."""
    began: float = 0.0
    next_time: float = 0.0
    misses: int = 0
    """In a row."""
    disk: Save | None = None
    """On its way to disk."""
    disk_began: float = 0.0
    disk_s: float = 0.0
    """The last one took so long."""

    @property
    def kept(self) -> tuple[Save, ...]:
        """Saves that ranks must not overwrite."""
        return tuple(dict.fromkeys(save for save in (self.last, self.save, self.disk) if save is not None))


def advance(
    now_at: Rounds, state: JobState, picture: Picture, config: CheckpointConfig, place: Place, mesh: Groups, now: float
) -> Rounds:
    """The next state; `mesh` are the groups that the user named, if any."""
    if state.run is None or state.ended is not None or not state.roster:
        return now_at
    if not now_at.known:
        return _adopt(state, picture, now)
    given = resume.rules(state)
    last, save = (one if one is not None and given.allow(one) else None for one in (now_at.last, now_at.save))
    now_at = replace(now_at, last=last, save=save)
    attempt = state.active
    if attempt is None or attempt.ending is not None or state.closing:
        # what was being copied may all have been there, and been called safe: it stays until training is back
        return replace(_at_rest(now_at, now), save=save, disk=None)
    now_at = _disk_written(now_at, state, picture, config, now)
    if now_at.attempt != attempt.number:
        if attempt.resumed is None:
            return now_at
        return _begin(
            _at_rest(_settled(now_at, state, picture), now_at.next_time), state, attempt, picture, config, now
        )
    if now_at.save is None:
        now_at = _pin(now_at, attempt, picture, config, now)
    if now_at.save is not None:
        now_at = _copy(now_at, state, attempt, picture, config, place, mesh, now)
    return now_at


def order(
    now_at: Rounds, node: str, config: CheckpointConfig, *, has_ranks: bool = True, pinned: Save | None = None
) -> RoundOrder | None:
    """What `node` is to do for it; one without ranks has nothing of its own to write. `pinned` stays in any case."""
    if not now_at.known:
        return None
    searching = now_at.attempt and now_at.save is None
    pins = () if pinned is None else (pinned,)
    return RoundOrder(
        wanted=(now_at.attempt, now_at.wanted) if searching else None,
        kept=tuple(dict.fromkeys((*now_at.kept, *pins))),
        pulls=(now_at.pulls or {}).get(node, ()),
        backups=tuple(dict.fromkeys(save for save in (now_at.last, now_at.save, *pins) if save is not None)),
        pinned=pinned,
        disk=now_at.disk if has_ranks else None,
        bytes_per_s=config.peer_bytes_per_s,
    )


def _adopt(state: JobState, picture: Picture, now: float) -> Rounds:
    """Begin with what there is, when all nodes have said what that is."""
    reports = {node: picture.report(node) for node in state.active_nodes()}
    if not all(picture.connected(node) and report is not None for node, report in reports.items()):
        return Rounds()
    heads: dict[Save, set[int]] = defaultdict(set)
    for report in reports.values():
        for backup in report.backups if report is not None else ():
            heads[backup.save] |= set(backup.heads)
    ranks = set(state.placement())
    safe = [save for save, found in heads.items() if found >= ranks and resume.rules(state).allow(save)]
    return Rounds(known=True, last=max(safe, default=None), disk_began=now)


def _settled(now_at: Rounds, state: JobState, picture: Picture) -> Rounds:
    """Whether the save that was being copied when the attempt before ended has become safe after all."""
    reports = {node: report for node in state.active_nodes() if (report := picture.report(node)) is not None}
    safe = resume.survives_any_node(reports, state.placement(), resume.rules(state))
    return replace(now_at, last=now_at.save) if now_at.save is not None and safe == now_at.save[1] else now_at


def _at_rest(now_at: Rounds, next_time: float) -> Rounds:
    return replace(now_at, attempt=0, wanted=0, save=None, pulls=None, next_time=next_time)


# -- pin -------------------------------------------------------------------------------------------------------------


def _begin(
    now_at: Rounds, state: JobState, attempt: Attempt, picture: Picture, config: CheckpointConfig, now: float
) -> Rounds:
    """Ask for a common save, if there is something to do with it and ranks save at all."""
    due = _goes_to_peers(state, config) or _disk_is_due(now_at, config, now)
    # two saves beside the turning ones are all that a rank has room for
    if not due or now < now_at.next_time or len(now_at.kept) > 1:
        return now_at
    pages = picture.pages(attempt.number)
    if attempt.resumed is None or not pages.keys() >= attempt.started.placement.keys():
        return now_at
    reports = [picture.report(node) for node in state.active_nodes()]
    if not all(report and any(copy.attempt == attempt.number for copy in report.copies) for report in reports):
        return now_at
    step_s = max(min(page.step_s or _UNKNOWN_STEP_S for page in pages.values()), 1e-4)
    # a page tells of the past: by now its rank is further
    seen = [page.step + (now - page.progress_time) / step_s for page in pages.values() if page.step is not None]
    if not seen:
        return now_at
    ahead = min(2.0**now_at.misses, MOST_AHEAD) * AHEAD_S / step_s + AHEAD_STEPS
    return replace(now_at, attempt=attempt.number, wanted=ceil(max(seen) + ahead), began=now)


def _pin(now_at: Rounds, attempt: Attempt, picture: Picture, config: CheckpointConfig, now: float) -> Rounds:
    """See which save each rank keeps; all the same, or the order came too late for some."""
    found: dict[int, Save] = {}
    for pinned in _pinned(attempt, picture):
        if pinned.attempt == attempt.number and pinned.step >= now_at.wanted:
            found[pinned.rank] = min(pinned.save, found.get(pinned.rank, pinned.save))
    if found.keys() != attempt.started.placement.keys():
        return now_at
    if len(set(found.values())) == 1:
        return replace(now_at, save=found[0], misses=0)
    return _again(replace(now_at, misses=now_at.misses + 1), config, now)


def _again(now_at: Rounds, config: CheckpointConfig, now: float) -> Rounds:
    wait_s = config.round_s if now_at.misses < 4 else min(_LONGEST_S, config.round_s * 2.0**now_at.misses)
    return _at_rest(now_at, now + wait_s)


def _pinned(attempt: Attempt, picture: Picture) -> Iterable[Pinned]:
    placement = attempt.started.placement
    for node in dict.fromkeys(placement.values()):
        report = picture.report(node)
        for pinned in report.pinned if report is not None else ():
            if placement.get(pinned.rank) == node:
                yield pinned


# -- copy ------------------------------------------------------------------------------------------------------------


def _copy(
    now_at: Rounds,
    state: JobState,
    attempt: Attempt,
    picture: Picture,
    config: CheckpointConfig,
    place: Place,
    mesh: Groups,
    now: float,
) -> Rounds:
    """Bring it to disk if that is due, and to other nodes if there are any; the round is over when all is there."""
    nodes = state.active_nodes()
    reports = {node: report for node in nodes if (report := picture.report(node)) is not None}
    if any(report.refused == now_at.save for report in reports.values()):
        return _at_rest(now_at, now + _BACK_OFF_S)
    if now_at.disk is None and _disk_is_due(now_at, config, now):
        now_at = replace(now_at, disk=now_at.save, disk_began=now)
    if not _goes_to_peers(state, config):
        return _at_rest(now_at, now + config.round_s)
    pinned = {one.rank: one for one in _pinned(attempt, picture) if one.save == now_at.save}
    if pinned.keys() != attempt.started.placement.keys():
        gone = [rank for rank, node in attempt.started.placement.items() if rank not in pinned and node in reports]
        # one that all had is overwritten only where a rank has no room for it
        return _again(replace(now_at, misses=now_at.misses + 1), config, now) if gone else now_at
    if now_at.pulls is None:
        if any(one.parts is None for one in pinned.values()) or any(peer_of(picture, node) is None for node in nodes):
            return now_at
        ranks = attempt.started.placement.keys()
        groups = mesh or tuple({group for report in reports.values() for group in report.groups})
        # a mesh of another size says nothing about these ranks
        groups = tuple(group for group in groups if ranks >= set(group))
        now_at = replace(now_at, pulls=_planned(pinned, attempt.started.placement, groups, place, picture))
    assert now_at.pulls is not None
    pulls = _addressed(now_at.pulls, attempt.started.placement, picture)
    if all(_has_all(reports.get(node), of_node) for node, of_node in pulls.items()):
        next_time = max(now_at.began + config.round_s, now)
        return _at_rest(replace(now_at, last=now_at.save), next_time)
    return replace(now_at, pulls=pulls)


def _planned(
    pinned: Mapping[int, Pinned], placement: Mapping[int, str], groups: Groups, place: Place, picture: Picture
) -> dict[str, tuple[Pull, ...]]:
    """Which node gets what from whom. Equal parts count once; a rank's head is a part of its own."""
    owners: dict[Part, list[int]] = defaultdict(list)
    names: dict[Part, str] = {}
    for rank, one in sorted(pinned.items()):
        for number, part in enumerate(one.parts or ()):
            owners[part].append(rank)
            # not by digest: what changes with every step must not change who keeps it
            names.setdefault(part, f"r{rank}.{number}")
    parts = list(owners)
    shards = [Shard(names[part], tuple(owners[part]), part.bytes) for part in parts]
    shards += [Shard(f"r{rank}", (rank,), one.head_bytes) for rank, one in sorted(pinned.items())]
    digests = [part.digest for part in parts] + [""] * len(pinned)
    found: dict[str, list[Pull]] = defaultdict(list)
    for shard, digest, placed in zip(shards, digests, place(tuple(shards), placement, groups), strict=True):
        if placed.holder is None or placed.source is None:
            continue
        peer = peer_of(picture, placement[placed.source])
        assert peer is not None
        attempt, step = pinned[placed.source].save
        found[placed.holder].append(
            Pull(attempt=attempt, step=step, rank=placed.source, digest=digest, bytes=shard.bytes, peer=peer)
        )
    return {node: tuple(pulls) for node, pulls in found.items()}


def _addressed(
    pulls: Mapping[str, tuple[Pull, ...]], placement: Mapping[int, str], picture: Picture
) -> dict[str, tuple[Pull, ...]]:
    """The same with everybody where they are now: an agent that was started again listens elsewhere."""
    return {
        node: tuple(replace(pull, peer=peer_of(picture, placement[pull.rank]) or pull.peer) for pull in of_node)
        for node, of_node in pulls.items()
    }


def _has_all(report: NodeReport | None, pulls: tuple[Pull, ...]) -> bool:
    if report is None:
        return not pulls
    kept = {backup.save: backup for backup in report.backups}
    parts = {(backup.save, part.digest) for backup in report.backups for part in backup.parts}
    return all(
        (pull.save, pull.digest) in parts if pull.digest else pull.save in kept and pull.rank in kept[pull.save].heads
        for pull in pulls
    )


def _goes_to_peers(state: JobState, config: CheckpointConfig) -> bool:
    return config.peers and len(state.active_nodes()) > 1


# -- disk ------------------------------------------------------------------------------------------------------------


def _disk_is_due(now_at: Rounds, config: CheckpointConfig, now: float) -> bool:
    since_s = now - now_at.disk_began
    return now_at.disk is None and since_s >= config.disk_every_s and since_s >= 2 * now_at.disk_s


def _disk_written(now_at: Rounds, state: JobState, picture: Picture, config: CheckpointConfig, now: float) -> Rounds:
    """Whether every node is done with writing, well or not."""
    if now_at.disk is None:
        return now_at
    reports = [picture.report(node) for node in state.active_nodes()]
    took_s = now - now_at.disk_began
    done = all(report is not None and report.disk_tried == now_at.disk for report in reports)
    if done or took_s > _DISK_PATIENCE * config.disk_every_s:
        return replace(now_at, disk=None, disk_s=took_s)
    return now_at
