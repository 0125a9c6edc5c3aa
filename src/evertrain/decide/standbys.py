"""Which standbys are fit to take over, and who is to test itself now?

    joining ──self-check passed──▶ standby ──silent──▶ lost ──heard again──▶ joining
       └──────failed──▶ unusable ──asked again, passed──▶ standby

A node answers a number that it was asked (`Desired.check`). Numbers are those of the periods of `ladder.test_every_s`
since the run began, so they follow from the clock: a later question has a higher number, and a controller that takes
over goes on with the same ones. Evicted nodes are asked in every period; what follows from it is decided elsewhere. So
is what follows for nodes that want to join: their numbers are negative, and are about the machine alone.
"""

from __future__ import annotations

from evertrain.decide import changes, lost, starting
from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.model import records as r
from evertrain.model.config import Config
from evertrain.model.copies import Peer
from evertrain.model.report import Check, NodeReport, SelfCheck

_MOST_PEERS = 8
"""So many other nodes are tried: thousands that are reached by each of many standbys would prove no more."""
_MOST_DETAILS = 3


def check_number(state: JobState, picture: Picture, node: str, config: Config, now: float) -> int:
    """The number that `node` should answer, or has answered last; 0: it is asked nothing."""
    if state.run is None or state.ended is not None or not picture.connected(node):
        return 0
    if node in state.memory.blocked and node not in state.roster:
        # not one that it may have answered before it was evicted
        current = _period(state, config, now)
        return current if current > _period(state, config, state.memory.blocked[node].since) else 0
    if not state.roster:
        # it wants to join, and is tested before it is numbered: the machine alone, which takes no time
        answer = _answer(picture, node)
        passed = answer is not None and answer.number < 0 and not answer.failed
        return answer.number if answer is not None and passed else -_period(state, config, now)
    if node not in state.standbys():
        return 0
    answer, known = _answer(picture, node), state.nodes.get(node)
    if known is not None and known.state == "unusable":
        return _period(state, config, now)
    if answer is not None and _counts(state, answer, node, config):
        return answer.number
    return _period(state, config, known.time if known is not None else state.run.time)


def reach(state: JobState, picture: Picture, node: str) -> tuple[Peer, ...]:
    """Nodes in training that `node` should be able to reach, some of all places; nothing for one that is not tested."""
    if state.ended is not None or (node not in state.standbys() and node not in state.memory.blocked):
        return ()
    others = [other for other in state.active_nodes() if other != node]
    every = -(-len(others) // _MOST_PEERS) or 1
    chosen = [other for other in others[::every] if picture.connected(other)]
    return tuple(peer for other in chosen if (peer := starting.peer_of(picture, other)) is not None)


def verdict(report: NodeReport | None, number: int) -> SelfCheck | None:
    """What the node has found out about itself when it was asked this number; None: it has not answered yet."""
    answer = report.self_check if report is not None else None
    return answer if answer is not None and 0 < number == answer.number else None


def standing(state: JobState, picture: Picture, node: str, config: Config, now: float) -> r.NodeChanged | None:
    """What a standby is now; None where nothing is known that could change it."""
    known = state.nodes.get(node)
    if not picture.connected(node):
        silent_s = now - lost.since(state, picture, node)
        if known is None or silent_s < config.machines.broken_s:
            return None  # one that was never heard is not there yet
        return r.NodeChanged(time=now, node=node, state="lost", because=f"silent for {silent_s:.0f} s")
    report, wanted = picture.report(node), changes.prepared(state, picture).digest
    if report is not None and wanted and report.code_failed == wanted:
        return r.NodeChanged(time=now, node=node, state="unusable", because=report.code_problem)
    answer = _answer(picture, node)
    if answer is not None and _counts(state, answer, node, config):
        if answer.failed:
            return r.NodeChanged(time=now, node=node, state="unusable", because=failed(answer))
        return r.NodeChanged(time=now, node=node, state="standby", because=passed(answer))
    if known is None or known.state not in ("joining", "standby", "unusable"):
        return r.NodeChanged(time=now, node=node, state="joining", because="it is testing itself")
    return None


def stuck(picture: Picture, node: str, now: float) -> r.NodeChanged | None:
    """A process that sleeps in the kernel holds what it had: nothing can be started beside it."""
    report = picture.report(node)
    if report is None or not picture.connected(node):
        return None
    for attempt in report.attempts:
        for rank in attempt.ranks:
            if rank.state == "stuck":
                because = f"rank {rank.rank} (pid {rank.pid}) is still there after SIGKILL"
                return r.NodeChanged(time=now, node=node, state="unusable", because=because)
    return None


def failed(answer: SelfCheck) -> str:
    """What was wrong, in one line."""
    return f"its self-check has failed: {_details(answer.failed)}"


def passed(answer: SelfCheck) -> str:
    """With what is odd all the same."""
    return "its self-check has passed" + (f"; yet {_details(answer.odd)}" if answer.odd else "")


def _details(checks: tuple[Check, ...]) -> str:
    lines = [f"{check.name}: {check.detail}" for check in checks]
    more = f"; and {len(lines) - _MOST_DETAILS} more" if len(lines) > _MOST_DETAILS else ""
    return f"{'; '.join(lines[:_MOST_DETAILS])}{more}"


def _answer(picture: Picture, node: str) -> SelfCheck | None:
    report = picture.report(node)
    return report.self_check if report is not None else None


def _counts(state: JobState, answer: SelfCheck, node: str, config: Config) -> bool:
    """Whether the answer is about the node as it is now, not as it was before it came (back)."""
    if answer.number < 0:
        return False  # that was about its machine only
    known = state.nodes.get(node)
    if known is None or known.state in ("standby", "unusable"):
        return True
    return known.state == "joining" and answer.number >= _period(state, config, known.time)


def _period(state: JobState, config: Config, time: float) -> int:
    """Periods are counted from 1."""
    assert state.run is not None
    return 1 + max(0, int((time - state.run.time) / config.ladder.test_every_s))
