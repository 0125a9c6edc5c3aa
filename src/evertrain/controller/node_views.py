"""What does a user see of a job's nodes? State and ranks; why a node is out, and how it comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from evertrain.controller.store import append_to, read_log
from evertrain.decide import draining, eviction
from evertrain.decide.applying import fold
from evertrain.decide.memory import Blocked
from evertrain.decide.picture import Picture
from evertrain.decide.state import Attempt, JobState
from evertrain.model.config import LadderConfig
from evertrain.model.records import AllowAsked

Json = dict[str, Any]


def nodes_of(database: Path) -> list[Json]:
    """The nodes of a job that no controller serves."""
    return nodes(fold(read_log(database)), Picture())


def allow_later(database: Path, node: str, because: str, now: float) -> str:
    """Note in the log of a job that no controller serves that its next run may use a node; else why not."""
    state = fold(read_log(database))
    # that it has ended is no reason here
    refusal = draining.allow_refusal(replace(state, ended=None), node)
    if not refusal:
        append_to(database, AllowAsked(time=now, node=node, because=because))
    return refusal


def nodes(state: JobState, picture: Picture) -> list[Json]:
    """All that take part, in rank order, then standbys, then those that are out, from this run or an earlier one."""
    names = dict.fromkeys((*state.known_nodes(), *state.memory.blocked))
    running = frozenset(state.active.by_node()) if state.active is not None else frozenset[str]()
    return [_node(state, picture, node, running) for node in names]


def node_state(state: JobState, node: str) -> str:
    if node in state.nodes:
        return state.nodes[node].state
    return "evicted" if node in state.memory.blocked and node not in state.roster else "joining"


def _node(state: JobState, picture: Picture, node: str, running: frozenset[str]) -> Json:
    changed, blocked = state.nodes.get(node), state.memory.blocked.get(node)
    wish = next((one for one in state.asked if one.node == node), None)
    answer = state.answers.get(node)
    return {
        "id": node,
        "state": node_state(state, node),
        "ranks": list(state.ranks_on(node)) if state.run else [],
        "since": changed.time if changed is not None else blocked.since if blocked is not None else None,
        "because": blocked.because if blocked is not None else changed.because if changed is not None else "",
        "returns": _returns(state, node, blocked) if blocked is not None else "",
        "self_check": _self_check(picture, node),
        "asked": None if wish is None else "allow" if isinstance(wish, AllowAsked) else "drain",
        "answer": None if answer is None else {"time": answer.time, "action": answer.action, "because": answer.because},
        "is_out": _is_out(state, node, running),
    }


def _policy(state: JobState) -> LadderConfig:
    return state.policies[state.policy].ladder if state.policy in state.policies else LadderConfig()


def _returns(state: JobState, node: str, blocked: Blocked) -> str:
    """How a node that is out comes back."""
    config = _policy(state)
    by_hand = f"by `evertrain node allow {node}` only"
    if blocked.is_drained:
        return f"{by_hand}: it was drained"
    if blocked.is_certain:
        return f"{by_hand}: no test of ours can clear it"
    if often := eviction.too_often(state.memory, node, blocked.since, config):
        return f"{by_hand}: it was {often}"
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
    }


def _is_out(state: JobState, node: str, running: frozenset[str]) -> bool:
    """Whether the node has left and training is back without it; where steps cannot be seen, a start has to do."""
    if node in state.roster:
        return False
    attempt = state.active
    if attempt is None or attempt.ending is not None or node in running:
        return False
    return attempt.resumed is not None or not _steps_were_seen(state.attempts[:-1])


def _steps_were_seen(attempts: tuple[Attempt, ...]) -> bool:
    return bool(attempts) and attempts[-1].resumed is not None
