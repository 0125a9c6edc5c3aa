"""Which commands bring the keeper from what is to what should be? Pure, and safe to ask again at any time.

The order of the controller and the state of the keeper are both complete pictures, so an agent that has just come back
needs no memory: it compares and sends what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from evertrain.model.report import Desired, DesiredAttempt

State = dict[str, Any]
"""The keeper's state as it pushes it: JSON."""

GoLines = Callable[[DesiredAttempt], dict[str, Any]]
"""What each rank of an attempt is to be told, by rank."""

NOT_READY: Final = "not ready"
Code = dict[str, Any] | Literal["not ready"] | None
"""The version of the code that ranks are to be of: as the keeper knows it; not on this node yet; None: in place."""


def commands(
    order: Desired, state: State, go_lines: GoLines, early: dict[str, Any] | None = None, code: Code = None
) -> list[dict[str, Any]]:
    """The keeper's next commands; empty when all is as it should be.

    `early`: what ranks are told that run ahead of their start; None: there are to be none.
    `code`: while that is not ready, what waits stays as it is, and nothing of it is let go.
    """
    if order.shutdown:
        return [{"do": "shutdown", "term": order.term}]
    listed: State = state.get("attempts", {})
    wanted = {attempt.attempt: attempt for attempt in order.attempts}
    found: list[dict[str, Any]] = []
    is_current = order.env == state.get("env", {}) and code == state.get("code")
    if not is_current and code != NOT_READY:
        # whatever waits is started anew by this, so nothing of it may be let go before the keeper has answered
        found.append({"do": "configure", "term": order.term, "env": order.env, "code": code})
    digest = code["digest"] if isinstance(code, dict) else ""
    for number in map(int, listed):
        if number not in wanted:
            found += _drop(order.term, number, listed[str(number)])
    for attempt in order.attempts:
        if is_current or attempt.phase != "go":
            found += _toward(order.term, attempt, listed.get(str(attempt.attempt)), go_lines, digest)
    # after what is prepared: that takes those that are there
    if is_current and early != state.get("early", {}).get("asked"):
        found.append({"do": "run_ahead", "term": order.term, "asked": early})
    return found


def _toward(
    term: int, attempt: DesiredAttempt, seen: State | None, go_lines: GoLines, digest: str
) -> list[dict[str, Any]]:
    if attempt.phase == "end":
        return [] if seen is None or seen["phase"] == "ended" else [_end(term, attempt.attempt, attempt.signal)]
    if seen is None:
        # an attempt that is running by the log but unknown here died with its keeper; the controller will see that
        return [_prepare(term, attempt)] if attempt.phase == "prepare" else []
    if attempt.phase == "prepare":
        return _drop(term, attempt.attempt, seen) if _is_spoilt(attempt, seen) else []
    if seen["phase"] == "prepared":
        return [{"do": "go", "term": term, "attempt": attempt.attempt, "ranks": go_lines(attempt), "code": digest}]
    return []


def _is_spoilt(attempt: DesiredAttempt, seen: State) -> bool:
    """A prepared attempt that could no longer start: one of its ranks has died, or it holds the wrong ones."""
    if seen["phase"] == "ended" or seen.get("error"):
        return True
    if seen["phase"] != "prepared":
        return False
    ranks = seen["ranks"]
    return {int(rank) for rank in ranks} != set(attempt.ranks) or any(
        rank["state"] != "waiting" for rank in ranks.values()
    )


def _prepare(term: int, attempt: DesiredAttempt) -> dict[str, Any]:
    command = {
        "do": "prepare",
        "term": term,
        "attempt": attempt.attempt,
        "ranks": list(attempt.ranks),
        "store": attempt.store,
    }
    return command if attempt.store_port is None else {**command, "store_port": attempt.store_port}


def _end(term: int, number: int, signal: int) -> dict[str, Any]:
    return {"do": "end", "term": term, "attempt": number, "signal": signal}


def _drop(term: int, number: int, seen: State) -> list[dict[str, Any]]:
    if seen["phase"] == "ended":
        return [{"do": "forget", "term": term, "attempt": number}]
    return [_end(term, number, 9)]
