"""What does a user see of a job's nodes? State and ranks; why a node is out, and how it comes back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from evertrain.controller.store import append_to, read_log
from evertrain.decide import draining, eviction
from evertrain.decide.applying import fold
from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState
from evertrain.model.config import LadderConfig
from evertrain.model.records import AllowAsked

Json = dict[str, Any]


def nodes_of(database: Path, now: float) -> list[Json]:
    """The nodes of a job that no controller serves."""
    return nodes(fold(read_log(database)), Picture(), now)


def allow_later(database: Path, node: str, because: str, now: float) -> str:
    """Note in the log of a job that no controller serves that its next run may use a node; else why not."""
    state = fold(read_log(database))
    # that it has ended is no reason here
    refusal = draining.allow_refusal(replace(state, ended=None), node)
    if not refusal:
        append_to(database, AllowAsked(time=now, node=node, because=because))
    return refusal


def nodes(state: JobState, picture: Picture, now: float) -> list[Json]:
    """All that take part, in rank order, then standbys, then those that are out, from this run or an earlier one."""
    names = dict.fromkeys((*state.known_nodes(), *state.memory.blocked))
    ranks = state.ranks_by_node() if state.run else {}
    out = _out(state, names)
    return [_node(state, picture, node, now, ranks.get(node, ()), is_out=node in out) for node in names]


def node_state(state: JobState, node: str) -> str:
    if node in state.nodes:
        return state.nodes[node].state
    return "evicted" if node in state.memory.blocked and node not in state.roster else "joining"


def _node(state: JobState, picture: Picture, node: str, now: float, ranks: tuple[int, ...], *, is_out: bool) -> Json:
    changed, blocked = state.nodes.get(node), state.memory.blocked.get(node)
    wish = next((one for one in state.asked if one.node == node), None)
    answer = state.answers.get(node)
    return {
        "id": node,
        "state": node_state(state, node),
        "ranks": list(ranks),
        "since": changed.time if changed is not None else blocked.since if blocked is not None else None,
        "because": blocked.because if blocked is not None else changed.because if changed is not None else "",
        "returns": _returns(state, node, now) if blocked is not None else "",
        "self_check": _self_check(picture, node),
        "asked": None if wish is None else "allow" if isinstance(wish, AllowAsked) else "drain",
        "answer": None if answer is None else {"time": answer.time, "action": answer.action, "because": answer.because},
        "is_out": is_out,
    }


def _policy(state: JobState) -> LadderConfig:
    return state.policies[state.policy].ladder if state.policy in state.policies else LadderConfig()


def _returns(state: JobState, node: str, now: float) -> str:
    """How a node that is out comes back."""
    blocked, config = state.memory.blocked[node], _policy(state)
    by_hand = f"by `evertrain node allow {node}` only"
    if blocked.is_drained:
        return f"{by_hand}: it was drained"
    if blocked.is_certain:
        return f"{by_hand}: no test of ours can clear it"
    if too_often := eviction.too_often(state.memory, node, now, config):
        return f"{by_hand}: it was {too_often}"
    return (
        f"as a standby once it passes its test and nothing was seen of it for {config.quiet_s:g} s, "
        f"or by `evertrain node allow {node}`"
    )


def _self_check(picture: Picture, node: str) -> Json | None:
    """The newest; None where there was none, or nobody can be asked."""
    report = picture.report(node)
    if report is None or report.self_check is None:
        return None
    failed = report.self_check.failed
    return {
        "passed": not failed,
        "checks": len(report.self_check.checks),
        "failed": [f"{check.name}: {check.detail}" for check in failed],
        "odd": [f"{check.name}: {check.detail}" for check in report.self_check.odd],
    }


def _out(state: JobState, nodes: Iterable[str]) -> frozenset[str]:
    """Those that have left, where training is back without them; where steps cannot be seen, a start has to do."""
    attempt = state.active
    if attempt is None or attempt.ending is not None:
        return frozenset()
    if attempt.resumed is None and _steps_were_seen(state.attempts[:-1]):
        return frozenset()
    return frozenset(nodes).difference(state.roster, attempt.started.placement.values())


def _steps_were_seen(attempts: tuple[Attempt, ...]) -> bool:
    return bool(attempts) and attempts[-1].resumed is not None
