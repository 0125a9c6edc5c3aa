"""From which step does the next attempt go on?

The newest step of which *every* rank can get a whole copy: from its own node's memory or disk, else from other nodes,
whose agents hold backups of it and replicas of its parts; its node fetches it then before the attempt starts. A copy is
void when a later attempt went back behind it: two runs of one step need not have the same bits, so mixing them would
join two trajectories. And no copies are tried a third time that two attempts went wrong with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec
from msgspec.structs import replace

from evertrain.decide import rollback
from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState
from evertrain.model.copies import Copy, Save
from evertrain.model.report import NodeReport

Tier = Literal["memory", "disk", "store"]
Holders = Mapping[int, tuple[str, ...]]
"""By rank: the nodes that have its state, each the whole of it or a piece."""

SOON_STEPS = 3
"""An attempt that goes wrong within so many steps may have gone wrong because of what it went on from."""
TRIES = 2


class Resume(msgspec.Struct, frozen=True):
    """A save, and where each rank finds its copy."""

    step: int
    tiers: dict[int, Tier]
    attempt: int
    """That saved it."""
    fetches: dict[int, tuple[str, ...]] = {}
    """Ranks whose node has no copy yet, with the nodes that have it, or pieces of it."""

    @property
    def save(self) -> Save:
        return self.attempt, self.step


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Which copies may be used at all."""

    lineage: tuple[tuple[int, int], ...] = ()
    """(attempt, step it resumed from) of all attempts so far."""
    first_attempt: int = 1
    last_attempt: int | None = None
    """Saves of later ones are of a version that is being given up; None: none is."""
    spent: frozenset[tuple[Save, int, Tier]] = frozenset()
    """Save, rank and tier of copies that were tried often enough."""

    def allow(self, save: Save) -> bool:
        """Whether the save lies on the trajectory that the job is on now."""
        if self.last_attempt is not None and save[0] > self.last_attempt:
            return False
        return save[0] >= self.first_attempt and all(
            save[1] <= resumed for attempt, resumed in self.lineage if attempt > save[0]
        )


def rules(state: JobState, *, of_any_version: bool = False) -> Rules:
    return Rules(
        lineage=state.lineage,
        first_attempt=state.first_attempt,
        last_attempt=None if of_any_version else rollback.newest_attempt(state),
        spent=_spent(state),
    )


def choose(
    copies: Mapping[str, Iterable[Copy]],
    placement: dict[int, str],
    given: Rules = Rules(),  # noqa: B008
    at_most: int | None = None,
    elsewhere: Mapping[Save, Holders] | None = None,
) -> Resume | None:
    """Pick the newest step that all ranks of `placement` can restore; None: there is none.

    Not a later one than `at_most`, if that is given.
    """
    found = common(copies, placement, given, elsewhere)
    return max((one for one in found if at_most is None or one.step <= at_most), key=lambda one: one.step, default=None)


def common(
    copies: Mapping[str, Iterable[Copy]],
    placement: dict[int, str],
    given: Rules = Rules(),  # noqa: B008
    elsewhere: Mapping[Save, Holders] | None = None,
) -> list[Resume]:
    """Every step that all ranks can restore, oldest first; of two runs of one step the later one.

    `copies` are by node; memory is preferred, then disk, and what has to come from `elsewhere` is last. Copies saved by
    another number of ranks are set aside: their shards do not fit.
    """
    own: dict[Save, dict[int, Tier]] = defaultdict(dict)
    for node, of_node in copies.items():
        for copy in of_node:
            if placement.get(copy.rank) != node or copy.world_size != len(placement):
                continue
            tiers = own[copy.save]
            if (copy.save, copy.rank, copy.tier) not in given.spent and tiers.get(copy.rank) != "memory":
                tiers[copy.rank] = copy.tier
    tried = {(save, rank) for save, rank, _ in given.spent}
    whole: dict[int, Resume] = {}
    for save in sorted({*own, *(elsewhere or {})}):
        tiers, holders = own.get(save, {}), (elsewhere or {}).get(save, {})
        # what others have of a copy that was tried is the same once more
        fetches = {rank: holders[rank] for rank in placement if rank not in tiers and rank in holders}
        fetches = {rank: nodes for rank, nodes in fetches.items() if (save, rank) not in tried}
        if given.allow(save) and len(tiers) + len(fetches) == len(placement):
            attempt, step = save
            whole[step] = Resume(step, tiers, attempt, fetches)
    return [whole[step] for step in sorted(whole)]


def newest(
    state: JobState,
    picture: Picture,
    at_most: int | None = None,
    *,
    fetch: bool = True,
    of_any_version: bool = False,
) -> Resume | None:
    """The newest step that all ranks can get by the newest lists of their nodes; without `fetch` where they are now."""
    last = state.attempt.number if state.attempt is not None else 0
    # a list that was read while ranks ran may name copies that are gone
    reports = {node: seen.report for node, seen in picture.nodes.items() if seen.report.copies_after_attempt >= last}
    copies = {node: report.copies for node, report in reports.items()}
    placement = state.placement()
    connected = {node: report for node, report in reports.items() if picture.connected(node)}
    there = elsewhere(connected, placement) if fetch else {}
    given = rules(state, of_any_version=of_any_version)
    found = choose(copies, placement, given, at_most, there)
    if found is None and given.spent:
        # rather a third time than from nothing
        found = choose(copies, placement, replace(given, spent=frozenset()), at_most, there)
    return found


def all_read(state: JobState, picture: Picture) -> bool:
    """Whether every node has looked at its checkpoints after the last rank of the last attempt was gone.

    Those that were taken out count as well, as long as they can be heard: what they hold may be all that there is.
    """
    last = state.attempt.number if state.attempt is not None else 0
    nodes = (*state.active_nodes(), *_left(state, picture))
    reports = [picture.report(node) for node in nodes]
    return all(report is not None and report.copies_after_attempt >= last for report in reports)


def _left(state: JobState, picture: Picture) -> list[str]:
    """Nodes of the last attempt that are out since, and whose ranks have ended in an orderly way."""
    attempt = state.attempt
    if attempt is None:
        return []
    placement = attempt.started.placement
    out = [node for node in dict.fromkeys(placement.values()) if node not in state.roster and picture.connected(node)]
    if not out:
        return []
    unseen = {placement[rank] for rank, end in attempt.ends.items() if end.status is None}
    reports = {node: report for node in out if node not in unseen and (report := picture.report(node)) is not None}
    # without its keeper an agent does not know whether something still writes, and never will
    return [node for node, report in reports.items() if report.keeper is not None]


# -- what lies on other nodes ----------------------------------------------------------------------------------------


def elsewhere(reports: Mapping[str, NodeReport], placement: dict[int, str]) -> dict[Save, Holders]:
    """For each save the ranks whose node could fetch it, and from where; what failed before is left out."""
    failed = {(one.rank, one.save) for report in reports.values() for one in report.failed_fetches}
    found: dict[Save, dict[int, tuple[str, ...]]] = {}
    for save, pieces in _pieces(reports).items():
        if pieces.world_size == len(placement):
            ranks = {rank: pieces.holders(rank) for rank in pieces.heads if (rank, save) not in failed}
            found[save] = {rank: nodes for rank, nodes in ranks.items() if nodes}
    for node, report in reports.items():
        for copy in report.copies:
            fits = copy.world_size == len(placement) and placement.get(copy.rank) != node
            if fits and (copy.rank, copy.save) not in failed:
                of_save = found.setdefault(copy.save, {})
                of_save[copy.rank] = tuple(dict.fromkeys((node, *of_save.get(copy.rank, ()))))
    return {save: holders for save, holders in found.items() if holders}


def survives_any_node(reports: Mapping[str, NodeReport], placement: dict[int, str], given: Rules) -> int | None:
    """The newest step that would still be there if any one node were lost with all it has; None: there is none."""
    steps = [
        save[1]
        for save, pieces in _pieces(reports).items()
        if given.allow(save)
        and pieces.world_size == len(placement)
        and all(pieces.holders(rank, without=node) for rank, node in placement.items())
    ]
    return max(steps, default=None)


class _Pieces:
    """Where the pieces of one save are."""

    def __init__(self) -> None:
        self.world_size = 0
        self.parts: dict[str, list[str]] = defaultdict(list)
        """Nodes, by digest."""
        self.heads: dict[int, tuple[list[str], frozenset[str]]] = {}
        """By rank: nodes that keep its head for it, and the parts that it speaks of."""

    def holders(self, rank: int, *, without: str | None = None) -> tuple[str, ...]:
        """The nodes that together have all of a rank's state; none if something is missing."""
        nodes, digests = self.heads.get(rank, ([], frozenset()))
        lists = [[node for node in nodes if node != without]]
        lists += [[node for node in self.parts[digest] if node != without] for digest in sorted(digests)]
        return tuple(dict.fromkeys(node for one in lists for node in one)) if all(lists) else ()


def _pieces(reports: Mapping[str, NodeReport]) -> dict[Save, _Pieces]:
    """Only of saves of which something is kept for another node."""
    found: dict[Save, _Pieces] = defaultdict(_Pieces)
    for node, report in reports.items():
        for backup in report.backups:
            pieces = found[backup.save]
            pieces.world_size = max(pieces.world_size, backup.world_size)
            for rank, parts in backup.heads.items():
                pieces.heads.setdefault(rank, ([], frozenset(part.digest for part in parts)))[0].append(node)
            for part in backup.parts:
                pieces.parts[part.digest].append(node)
    for node, report in reports.items():
        for pinned in report.pinned:
            if pinned.save in found:
                for part in pinned.parts or ():
                    found[pinned.save].parts[part.digest].append(node)
    return found


# -- copies that attempts went wrong with ----------------------------------------------------------------------------


def _spent(state: JobState) -> frozenset[tuple[Save, int, Tier]]:
    """The copies that two attempts of this run went on from and went wrong soon after.

    That a version of the code fails which has come since says nothing about what another one has saved: once it is gone
    back from, training goes on there.
    """
    tried: dict[tuple[Save, int, Tier], int] = defaultdict(int)
    for attempt in state.attempts:
        started = attempt.started
        version = state.ran.get(attempt.number)
        if version != state.own and version != state.ran.get(started.resume_attempt or 0):
            continue
        if started.resume is not None and started.resume_attempt is not None and _went_wrong_soon(attempt):
            # `decide.storing` counts for the store itself
            for rank, tier in started.tiers.items() if not started.folder else ():
                tried[(started.resume_attempt, started.resume), rank, tier] += 1
    return frozenset(copy for copy, often in tried.items() if often >= TRIES)


def _went_wrong_soon(attempt: Attempt) -> bool:
    ended, resumed = attempt.ended, attempt.started.resume
    if ended is None or resumed is None:
        return False
    if not ended.loss_is_finite:
        return True  # nothing has been saved since that could be gone on from instead
    done = ended.relative_step if ended.step is None else ended.step - resumed
    return ended.outcome == "failed" and done <= SOON_STEPS and _failed_by_itself(attempt)


def _failed_by_itself(attempt: Attempt) -> bool:
    """Whether a rank did: a hang, or a node that goes away, says nothing about a copy."""
    failures = attempt.failures()
    return any(not end.follower for end in failures) and all(end.status is not None for end in failures)
