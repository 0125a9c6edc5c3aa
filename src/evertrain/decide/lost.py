"""Is a node gone for good? Only if it is silent, most others can be heard, and its peers saw it go or stand still.

Silence alone says nothing: the controller may be the one that is cut off, and training goes on without it. Where the
connections to its ranks have broken, a short silence is enough; where the others merely wait, a link may be down that
heals, so it takes longer. The ranks of a lost node count as ended, so that the attempt ends and a standby can take its
place. Should it come back, it finds that its attempt is over and ends what it still runs.
"""

from __future__ import annotations

from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState
from evertrain.model import records as r
from evertrain.model.config import MachinesConfig
from evertrain.model.records import AnyRecord

_BEFORE_S = 10.0
"""A connection breaks at once; that an agent is silent is noticed a few heartbeats later."""
GONE_S = 10.0
"""Who takes part in a test or a replay and has been silent for so long is not waited for any more."""


def look(state: JobState, picture: Picture, config: MachinesConfig, now: float) -> list[AnyRecord]:
    """Nodes that are lost, with the ends of their ranks."""
    attempt = state.active
    if attempt is None:
        return []
    alive = attempt.alive_by_node()
    silent_s = {node: now - since(state, picture, node) for node in alive if not picture.connected(node)}
    broken = {node for node, length_s in silent_s.items() if length_s >= _broken_s(config)}
    if not broken or not most_are_heard(state, picture):
        return []
    gone = {node for node in broken if _is_seen_going(attempt, picture, now - silent_s[node], now)}
    how = "connections to its ranks have broken"
    if not gone:
        gone = {node for node in broken if silent_s[node] >= config.lost_s}
        if not gone or not _peers_are_stalled(attempt, picture, config.lost_s, now):
            return []
        how = "the ranks that wait for it stand still"
    records: list[AnyRecord] = []
    for node in sorted(gone):
        because = f"silent for {silent_s[node]:.0f} s, and {how}"
        records.append(r.NodeChanged(time=now, node=node, state="lost", because=because))
        ends = (r.RankEnd(rank=rank, node=node, pid=0, status=None, ended_time=now) for rank in alive[node])
        records.append(r.RanksEnded(time=now, attempt=attempt.number, ends=tuple(ends)))
    return records


def away(state: JobState, picture: Picture, config: MachinesConfig, node: str, now: float) -> str:
    """Why a node that is needed counts as lost, when a standby could take its place; empty: it does not.

    Nothing runs that could be harmed, so a short silence is enough.
    """
    if picture.connected(node) or not state.usable_standbys() or not most_are_heard(state, picture):
        return ""
    silent_s = now - since(state, picture, node)
    return f"silent for {silent_s:.0f} s, and no rank runs" if silent_s >= _broken_s(config) else ""


def _broken_s(config: MachinesConfig) -> float:
    """Who wants to know of a loss sooner where ranks merely stand still wants so where connections have broken."""
    return min(config.broken_s, config.lost_s)


def most_are_heard(state: JobState, picture: Picture) -> bool:
    """Whether half of the nodes or more can be heard: else it is we who are cut off."""
    nodes = state.roster
    return sum(map(picture.connected, nodes)) * 2 > len(nodes) - 1


def _is_seen_going(attempt: Attempt, picture: Picture, silent_since: float, now: float) -> bool:
    """Whether ranks lost a connection when the node fell silent or later, and nobody who can be heard is the reason.

    Who still runs may be that reason: its end may not have been told yet.
    """
    failures = attempt.failures()
    lost_it = any(end.follower and end.ended_time >= silent_since - _BEFORE_S for end in failures)
    return lost_it and all(end.follower for end in failures) and _peers_are_stalled(attempt, picture, 0.0, now)


def since(state: JobState, picture: Picture, node: str) -> float:
    """When the node fell silent; a controller that has never heard it has listened from its own start on."""
    return picture.nodes[node].since if node in picture.nodes else state.term_time


def is_gone(state: JobState, picture: Picture, node: str, now: float) -> bool:
    """Whether nothing is to be expected of a node that was asked for something while no rank runs."""
    return not picture.connected(node) and now - state.since(since(state, picture, node)) > GONE_S


def _peers_are_stalled(attempt: Attempt, picture: Picture, for_s: float, now: float) -> bool:
    """Whether every rank that can be heard has ended or stood still for as long; unknown where nobody is heard."""
    placement = attempt.started.placement
    if not any(picture.connected(node) for node in placement.values()):
        return False
    running = {rank for rank in attempt.alive() if picture.connected(placement[rank])}
    still = {one.rank for one in picture.activities(placement, now) if one.still_s >= for_s}
    return running <= still
