"""Who is to blame for the end of an attempt? The rank that failed first, by the clock of its keeper.

Followers (lost connections, errors of collectives) accuse nobody. If there are only followers, a rank that left early
with 0 is why the others lost it; if there is none, the culprit is unknown and nobody is named.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evertrain.decide.state import Attempt, Incident, JobState
from evertrain.detect import exits
from evertrain.model import records as r
from evertrain.model.collectives import Component, Step
from evertrain.model.stacks import LocatedKind
from evertrain.model.words import counted


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict about one failed attempt."""

    source: r.Source = "exit"

    fault_time: float
    cause: str
    category: str
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    confidence: float = 1.0
    evidence: tuple[str, ...] = ()
    located: LocatedKind | Literal[""] = ""
    """What stacks say it is; `group`, `group_nodes` and `captures` as in `IncidentOpened`."""
    group: tuple[int, ...] = ()
    group_nodes: tuple[str, ...] = ()
    captures: tuple[int, ...] = ()
    component: Component | Literal[""] = ""
    """What the records of collectives say it is; `links` and `path` as in `IncidentOpened`."""
    links: tuple[tuple[int, int], ...] = ()
    path: tuple[Step, ...] = ()

    def differs(self, opened: r.IncidentOpened) -> bool:
        return (self.cause, self.ranks, self.nodes, self.evidence) != (
            opened.cause,
            opened.ranks,
            opened.nodes,
            opened.evidence,
        )

    def correction(self, incident: int, now: float) -> r.IncidentCorrected:
        return r.IncidentCorrected(
            time=now,
            incident=incident,
            fault_time=min(self.fault_time, now),
            cause=self.cause,
            category=self.category,
            ranks=self.ranks,
            nodes=self.nodes,
            confidence=self.confidence,
            evidence=self.evidence,
            source=self.source,
            component=self.component,
            links=self.links,
            path=self.path,
        )


def blame(state: JobState, attempt: Attempt, incident: Incident | None = None) -> Blame:
    """Judge `attempt` by all that is known of it; `incident` is the one already open for it, if any."""
    failures = attempt.failures()
    own = [end for end in failures if not end.follower]
    lost = [end for end in own if end.status is None]
    if incident is not None and incident.opened.source not in ("exit", "lost"):
        return _as_opened(incident)
    if lost and not any(end.status is not None for end in own):
        return _node_lost(state, lost, failures)
    if own:
        return _first_failure(next(end for end in own if end.status is not None), failures)
    early = sorted((end for end in attempt.ends.values() if end.status == 0), key=lambda end: end.ended_time)
    if early:
        return _left_early(early, attempt, failures)
    return Blame(
        fault_time=failures[0].failed_time,
        cause="connection lost",
        category="unknown",
        confidence=0.0,
        evidence=tuple(_line(end) for end in failures[:3]),
    )


def _first_failure(first: r.RankEnd, failures: list[r.RankEnd]) -> Blame:
    followers = sum(end.follower for end in failures)
    after = f"; {counted(followers, 'other rank')} ended after it with lost connections" if followers else ""
    return Blame(
        fault_time=first.failed_time,
        cause=exits.cause(first.status, first.error),
        category=exits.category(first.status, first.error),
        ranks=(first.rank,),
        nodes=(first.node,),
        evidence=(_line(first) + after,),
    )


def _node_lost(state: JobState, lost: list[r.RankEnd], failures: list[r.RankEnd]) -> Blame:
    nodes = tuple(dict.fromkeys(end.node for end in lost))
    ranks = tuple(end.rank for end in lost)
    return Blame(
        source="lost",
        # the survivors felt it before anybody could tell
        fault_time=min(end.ended_time for end in failures),
        cause="node lost",
        category="host_os",
        ranks=ranks,
        nodes=nodes,
        evidence=tuple(_how_lost(state, node) for node in nodes),
    )


def _how_lost(state: JobState, node: str) -> str:
    if node in state.nodes and state.nodes[node].state == "lost":
        return f"{node}: {state.nodes[node].because}"
    return f"the keeper of {node} is gone and its ranks with it"


def _left_early(early: list[r.RankEnd], attempt: Attempt, failures: list[r.RankEnd]) -> Blame:
    first = early[0]
    named = sorted(early, key=lambda end: end.rank)
    others = failures[0].ended_time if failures else first.ended_time
    still = len(attempt.alive()) + len(failures)
    return Blame(
        fault_time=min(first.ended_time, others),
        cause="exited early with 0",
        category="user_code",
        ranks=tuple(end.rank for end in named),
        nodes=tuple(dict.fromkeys(end.node for end in named)),
        confidence=0.8,
        evidence=(f"rank {first.rank} on {first.node} exited with 0 while {still} other ranks were still running",),
    )


def _as_opened(incident: Incident) -> Blame:
    opened = incident.opened
    return Blame(
        source=opened.source,
        fault_time=opened.fault_time,
        cause=opened.cause,
        category=opened.category,
        ranks=opened.ranks,
        nodes=opened.nodes,
        confidence=opened.confidence,
        evidence=opened.evidence,
        component=opened.component,
        links=opened.links,
        path=opened.path,
    )


def _line(end: r.RankEnd) -> str:
    message = end.error.message.strip().splitlines()[0][:200] if end.error and end.error.message.strip() else ""
    return f"rank {end.rank} on {end.node}: {exits.cause(end.status, end.error)}{f': {message}' if message else ''}"
