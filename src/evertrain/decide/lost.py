"""Is a node gone for good? Only if it is silent, and its peers are stalled.

Silence alone says nothing: the controller may be the one that is cut off, and training goes on without it. The ranks of
a lost node count as ended, so that the attempt ends and something can follow; nothing else is done to the node. Should
it come back, it finds that its attempt is over, ends what it still runs, and takes part in the next one.
"""

from __future__ import annotations

from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState
from evertrain.model import records as r
from evertrain.model.config import MachinesConfig
from evertrain.model.records import AnyRecord


def look(state: JobState, picture: Picture, config: MachinesConfig, now: float) -> list[AnyRecord]:
    """Nodes that are lost, with the ends of their ranks."""
    attempt = state.active
    if attempt is None:
        return []
    holders = {attempt.started.placement[rank] for rank in attempt.alive()}
    silent_s = {node: now - since(state, picture, node) for node in holders if not picture.connected(node)}
    silent = [node for node, length_s in silent_s.items() if length_s >= config.lost_s]
    if not silent or not _peers_are_stalled(attempt, picture, config, now):
        return []
    records: list[AnyRecord] = []
    for node in sorted(silent):
        because = f"silent for {silent_s[node]:.0f} s, and the ranks that wait for it stand still"
        records.append(r.NodeChanged(time=now, node=node, state="lost", because=because))
        ranks = [rank for rank in attempt.alive() if attempt.started.placement[rank] == node]
        ends = (r.RankEnd(rank=rank, node=node, pid=0, status=None, ended_time=now) for rank in ranks)
        records.append(r.RanksEnded(time=now, attempt=attempt.number, ends=tuple(ends)))
    return records


def since(state: JobState, picture: Picture, node: str) -> float:
    """When the node fell silent; a controller that has never heard it has listened from its own start on."""
    return picture.nodes[node].since if node in picture.nodes else state.term_time


def _peers_are_stalled(attempt: Attempt, picture: Picture, config: MachinesConfig, now: float) -> bool:
    """Whether every rank that can be heard has ended or stood still for as long; unknown where nobody is heard."""
    placement = attempt.started.placement
    if not any(picture.connected(node) for node in placement.values()):
        return False
    running = {rank for rank in attempt.alive() if picture.connected(placement[rank])}
    still = {one.rank for one in picture.activities(placement, now) if one.still_s >= config.lost_s}
    return running <= still
