"""How does a node leave a job without losing a step? What memory holds goes to disk before the keeper clears it.

Two ways out: the controller says that the job has ended; or the node is alone: the first node is gone for good, or
`run` was asked to stop and cannot pass that on. Alone nobody can say which step all nodes share, so all steps that
memory holds go to disk, and the next start picks the common one.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import time
from pathlib import Path

from evertrain.agent.keeper_link import KeeperLink
from evertrain.checkpoint import disk
from evertrain.model.report import Desired
from evertrain.model.spec import AgentSpec

_log = logging.getLogger(__name__)

_SHUTDOWN_S = 10.0
_KILLED_S = 10.0
_LOOK_S = 0.02


async def by_order(order: Desired, spec: AgentSpec, keeper: KeeperLink, slots_dir: Path) -> None:
    """The controller has ended the job."""
    problems: tuple[str, ...] = ()
    if order.keep_all:
        _, problems = await asyncio.to_thread(disk.flush_all, slots_dir, spec.disk_dir)
    if order.discard_checkpoints:
        shutil.rmtree(spec.disk_dir, ignore_errors=True)
    _write_result(spec, order.outcome, order.exit_code, order.message, *problems)
    await _shut_down(keeper, {"term": order.term})


async def alone(because: str, spec: AgentSpec, keeper: KeeperLink, slots_dir: Path) -> None:
    """Nobody else ends this node's part: tell its ranks, bring what they saved to disk, go.

    In no controller's name: an agent that was started again while it was cut off knows of no term.
    """
    _log.warning("leaving the job: %s", because)
    if not await _ended(keeper, 15, within_s=spec.grace_s * 0.6):
        await _ended(keeper, 9, within_s=_KILLED_S)
    steps, problems = await asyncio.to_thread(disk.flush_all, slots_dir, spec.disk_dir)
    kept = f"steps {', '.join(map(str, steps))} of this node are on disk" if steps else ""
    if not steps and not problems:
        kept = "nothing was in memory to keep"
    _write_result(spec, "failed", 1, because, kept, *problems)
    await _shut_down(keeper, {})


async def _ended(keeper: KeeperLink, signal: int, *, within_s: float) -> bool:
    """Whether every rank has ended within this time of being told."""
    deadline = time.monotonic() + within_s
    told: set[str] = set()
    while time.monotonic() < deadline:
        if keeper.state is None:
            return True  # ranks die with their keeper
        left = [number for number, seen in keeper.state["attempts"].items() if seen["phase"] != "ended"]
        if not left:
            return True
        for number in left:
            if number not in told:
                keeper.send({"do": "end", "attempt": int(number), "signal": signal})
                told.add(number)
        await asyncio.sleep(_LOOK_S)
    return False


async def _shut_down(keeper: KeeperLink, by: dict[str, int]) -> None:
    deadline = time.monotonic() + _SHUTDOWN_S
    while keeper.state is not None and time.monotonic() < deadline:
        keeper.send({"do": "shutdown", **by})
        await asyncio.sleep(_LOOK_S)


def _write_result(spec: AgentSpec, state: str, exit_code: int, *said: str) -> None:
    """For the `run` of this node; the first node's has the controller's."""
    if not spec.result_file:
        return
    fresh = Path(spec.result_file).with_suffix(".new")
    result = {"state": state, "exit_code": exit_code, "message": "; ".join(filter(None, said))}
    try:
        fresh.write_text(json.dumps(result))
        os.replace(fresh, spec.result_file)
    except OSError as error:
        _log.error("%s cannot be written: %s", spec.result_file, error)
