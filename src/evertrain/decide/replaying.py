"""Which groups of stopped nodes replay the job, round after round, and what do they say?

    asked ──▶ a round: some groups at the same time ──all have given something, or are late──▶ `locate.replay`
                 ▲                                                                                 │
                 └──────────────────────────── the next round ◀── no conclusion yet ◀──────────────┤
                                                                                                   ▼
                                    a node is gone, no time ──▶ answered ◀── somebody, or nobody is to blame

Each group is a job of its own: the script with its own arguments, a store of its own, started in two phases like any
attempt. Its number on the nodes is that of the round, negative, so whatever looks for attempts does not see it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import Literal

import msgspec

from evertrain.decide import lost
from evertrain.decide.picture import Picture
from evertrain.decide.state import Incident, JobState, Round
from evertrain.detect import exits
from evertrain.locate import parallel
from evertrain.locate import replay as solver
from evertrain.locate.replay import Conclusion, Replay, Result
from evertrain.model import decisions as d
from evertrain.model.config import DiagnoseConfig
from evertrain.model.records import AnyRecord
from evertrain.model.replays import Group, ReplayAsked, ReplayDone, ReplaySettings
from evertrain.model.report import AttemptReport, RankReport

LEAST_S = 3.0
"""With less time left no further round begins."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One node's part in a round."""

    round: int
    phase: Literal["prepare", "go", "end"]
    group_rank: int
    nodes: tuple[str, ...]
    """Of its group."""
    address: str
    """Of the group's first node, where its store is served,"""
    port: int | None
    """... once that is there."""
    settings: ReplaySettings


# -- whether it can be done --------------------------------------------------------------------------------------------


def why_not(state: JobState) -> str:
    """Why this job cannot be replayed; empty: it can."""
    if not state.takes_replays:
        return "the script takes no part in replays: see docs/diagnosis.md"
    mesh = _mesh(state)
    if not mesh:
        return "the job's parallel dimensions are not known; --mesh names them"
    try:
        begun = solver.begin(state.active_nodes(), _nodes_per_replica(state, mesh))
    except ValueError as error:
        return str(error)
    return begun.conclusion.because if begun.conclusion is not None else ""


def _mesh(state: JobState) -> dict[str, int]:
    assert state.run is not None
    return parallel.sizes(state.run.mesh or state.learnt_mesh)


def _nodes_per_replica(state: JobState, mesh: Mapping[str, int]) -> int:
    """The fewest nodes that hold whole replicas of the model."""
    assert state.run is not None
    return lcm(parallel.ranks_of_replica(mesh), state.run.nproc_per_node) // state.run.nproc_per_node


# -- one step ----------------------------------------------------------------------------------------------------------


def look(
    state: JobState, picture: Picture, incident: Incident, since: float, config: DiagnoseConfig, now: float
) -> list[AnyRecord] | d.Answered:
    """What follows for an incident whose job is being replayed: a record, the answer, or nothing yet."""
    rounds = _since(incident, since)
    newest = rounds[-1] if rounds else None
    left_s = config.replay_budget_s - (now - state.since(since))
    nodes = newest.asked.nodes if newest is not None else state.active_nodes()
    if because := _cannot_go_on(state, picture, nodes, now):
        return _nothing(incident, rounds, because, now)
    if newest is not None and newest.done is None:
        return _ended(state, picture, newest.asked, left_s, now)
    if newest is None and (because := why_not(state)):
        return _nothing(incident, rounds, because, now)  # the nodes are others than when it was decided
    so_far = _begun(state, config) if newest is None else _so_far(rounds)
    if (conclusion := so_far.conclusion) is not None:
        return _answer(incident, rounds, conclusion, now)
    if left_s <= LEAST_S:
        return _nothing(incident, rounds, f"its time was over ({config.replay_budget_s:g} s)", now)
    if not _may_begin(state, picture, nodes):
        return []
    asked = ReplayAsked(
        time=now,
        round=state.next_replay,
        incident=incident.number,
        nodes=nodes,
        nodes_per_replica=newest.asked.nodes_per_replica
        if newest is not None
        else _nodes_per_replica(state, _mesh(state)),
        repeats=so_far.repeats,
        groups=so_far.asked,
        settings=newest.asked.settings if newest is not None else _settings(state, incident, so_far, config),
        limit_s=round(min(left_s, config.replay_round_s), 3),
    )
    return [asked]


def _settings(state: JobState, incident: Incident, replay: Replay, config: DiagnoseConfig) -> ReplaySettings:
    assert state.run is not None
    mesh, step = _mesh(state), incident.opened.step
    layers = {"auto": mesh.get("pp", 1), "all": None}.get(str(config.replay_layers), config.replay_layers)
    return ReplaySettings(
        layers=layers if isinstance(layers, int) else None,
        dp=replay.division.m * state.run.nproc_per_node // parallel.ranks_of_replica(mesh),
        steps=config.replay_steps,
        # so that the step at which it failed is the last one
        from_step=max(0, step - config.replay_steps) if step is not None else None,
        seed=incident.number,
    )


def _since(incident: Incident, since: float) -> tuple[Round, ...]:
    """Rounds of the replay that was asked for then."""
    return tuple(one for one in incident.replays if one.asked.time >= since)


def _begun(state: JobState, config: DiagnoseConfig) -> Replay:
    return solver.begin(state.active_nodes(), _nodes_per_replica(state, _mesh(state)), config.replay_repeats)


def _so_far(rounds: Sequence[Round]) -> Replay:
    """What the solver knows: it goes on from what the log says, by whatever version that was written."""
    asked = rounds[0].asked
    begun = solver.begin(asked.nodes, asked.nodes_per_replica, asked.repeats)
    known = (tuple(map(Result, one.asked.groups, one.done.digests)) for one in rounds if one.done is not None)
    return msgspec.structs.replace(begun, rounds=tuple(known))


def _cannot_go_on(state: JobState, picture: Picture, nodes: Sequence[str], now: float) -> str:
    if tuple(nodes) != state.active_nodes():
        return "the nodes are not the same any more"
    for node in nodes:
        if lost.is_gone(state, picture, node, now):  # no group would be what the others are
            return f"{node} cannot be heard"
    return ""


def _may_begin(state: JobState, picture: Picture, nodes: Iterable[str]) -> bool:
    """Whether all nodes can be heard, and nothing of what ran before is left on any of them."""
    reports = [picture.report(node) if picture.connected(node) else None for node in nodes]
    return state.active is None and not any(report is None or report.gpus_held for report in reports)


def _nothing(incident: Incident, rounds: Sequence[Round], because: str, now: float) -> d.Answered:
    """It came to no conclusion."""
    outcome: Literal["clean", "not_available"] = (
        "clean" if any(digest for one in rounds if one.done is not None for digest in one.done.digests)
        else "not_available"
    )  # fmt: skip
    return d.Answered(time=now, incident=incident.number, rung="replay", outcome=outcome, evidence=(because,))


def _answer(incident: Incident, rounds: Sequence[Round], conclusion: Conclusion, now: float) -> d.Answered:
    digests = [digest for one in rounds if one.done is not None for digest in one.done.digests]
    if not any(digests):
        whys = [why for one in rounds if one.done is not None for why in one.done.because if why]
        return _nothing(incident, rounds, whys[0] if whys else conclusion.because, now)
    evidence = [conclusion.because]
    if conclusion.suspects:
        evidence.append(f"to be tried by hand: {', '.join(conclusion.suspects)}")
    return d.Answered(
        time=now,
        incident=incident.number,
        rung="replay",
        outcome="suspects" if conclusion.nodes else "clean",
        nodes=conclusion.nodes,
        evidence=tuple(evidence),
    )


def conclusion(incident: Incident) -> Conclusion | None:
    """What the replay of an incident has come to; None: nothing, or nothing yet. Of each there is one at most."""
    return _so_far(incident.replays).conclusion if incident.replays else None


def usual(incident: Incident) -> str | None:
    """What healthy groups gave; None: that cannot be said."""
    return _so_far(incident.replays).usual if incident.replays else None


# -- the end of a round ------------------------------------------------------------------------------------------------


def _ended(state: JobState, picture: Picture, asked: ReplayAsked, left_s: float, now: float) -> list[AnyRecord]:
    """The round that runs, when every group has given something or nobody waits any more."""
    found = [_came_to(state, picture, asked, group) for group in asked.groups]
    is_late = left_s <= 0 or now - state.since(max(asked.time, state.term_time)) >= asked.limit_s
    if not is_late and any(digest is None and not why for digest, why in found):
        return []
    late = f"no result within {asked.limit_s:g} s"
    return [
        ReplayDone(
            time=now,
            round=asked.round,
            incident=asked.incident,
            digests=tuple(digest for digest, _ in found),
            because=tuple("" if digest else why or late for digest, why in found),
        )
    ]


def _came_to(state: JobState, picture: Picture, asked: ReplayAsked, group: Group) -> tuple[str | None, str]:
    """The digest of a group, or why there will be none; neither: it is under way."""
    assert state.run is not None
    nproc = state.run.nproc_per_node
    digests: dict[int, str] = {}
    for node in group.nodes:
        report = picture.report(node)
        if report is not None and report.replayed is not None and report.replayed.round == asked.round:
            digests |= report.replayed.digests
    if digests.keys() >= set(range(len(group.nodes) * nproc)):
        whole = hashlib.sha256("\n".join(digests[rank] for rank in range(len(group.nodes) * nproc)).encode())
        return whole.hexdigest(), ""
    failed: list[tuple[bool, float, str]] = []
    for node in group.nodes:
        listed = picture.attempt(node, -asked.round)
        if listed is not None and listed.error:
            return None, f"{node}: {listed.error}"
        for rank in listed.ranks if listed is not None else ():
            if rank.exit is not None and rank.rank not in digests:
                follows = rank.killed or exits.is_follower(rank.exit.status, rank.exit.error, rank.exit.stderr_tail)
                failed.append((follows, rank.exit.time, f"rank {rank.rank} of the group, on {node}: {_end(rank)}"))
    return None, min(failed)[2] if failed else ""


def _end(rank: RankReport) -> str:
    assert rank.exit is not None
    status, error = rank.exit.status, rank.exit.error
    how = f"signal {-status}" if status < 0 else f"exit code {status}"
    if error is not None:
        message = error.message.strip().partition("\n")[0]
        return f"{how} ({error.type}: {message[:200]})"
    return how if status else "it ended before its steps were done"


# -- what agents are told ----------------------------------------------------------------------------------------------


def parts(state: JobState, picture: Picture) -> dict[str, Part]:
    """By node, its part in the round that runs; none where no job is replayed."""
    incident = state.incident
    if incident is None or incident.decided is not None or not incident.replays or state.closing:
        return {}
    newest = incident.replays[-1]
    last = incident.decisions[-1]
    is_wanted = any(isinstance(action, d.Replay) for action in last.actions) and newest.asked.time >= last.time
    if state.ended is not None or state.active is not None or newest.done is not None or not is_wanted:
        return {}
    return {
        node: part for group in newest.asked.groups for node, part in _of_group(state, picture, newest.asked, group)
    }


def _of_group(
    state: JobState, picture: Picture, asked: ReplayAsked, group: Group
) -> Iterable[tuple[str, Part]]:  # fmt: skip
    number = -asked.round
    listed = [picture.attempt(node, number) for node in group.nodes]
    digest, failed = _came_to(state, picture, asked, group)
    phase: Literal["prepare", "go", "end"] = "prepare"
    if digest is not None or failed:
        phase = "end"
    elif any(one is not None and one.phase == "running" for one in listed) or all(
        _is_ready(picture, node, one, number) for node, one in zip(group.nodes, listed, strict=True)
    ):
        phase = "go"
    first, report = listed[0], picture.report(group.nodes[0])
    for at, node in enumerate(group.nodes):
        yield (
            node,
            Part(
                round=asked.round,
                phase=phase,
                group_rank=at,
                nodes=group.nodes,
                address=report.address if report is not None else "",
                port=first.store_port if first is not None else None,
                settings=asked.settings,
            ),
        )


def _is_ready(picture: Picture, node: str, listed: AttemptReport | None, number: int) -> bool:
    """Whether its ranks wait, and those of the round before have gone."""
    report = picture.report(node)
    if report is None or listed is None or not picture.connected(node) or report.gpus_held:
        return False
    others = (one for one in report.attempts if one.attempt < 0 and one.attempt != number)
    return listed.phase == "prepared" and all(one.phase == "ended" for one in others)
