"""Could this node take part in the job? What it can find out by itself, beside everything else that it does.

Asked by number (`Desired.check`); the answer carries the number (`SelfCheck`). Each check runs in a thread of its own
with a limit: one that hangs in the kernel, because a disk is dead, has failed and is left behind. What cannot be tried
here is left out: that neither accuses nor acquits. Every detail says what was seen and, where it is wrong, what to do.

What `evertrain check` looks at is part of it, except the kernel's log: the agent's own sensor reads that all the time,
and what it finds is held against the node anyway. Only what is broken for certain fails the check.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import subprocess
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from evertrain.agent import sensing
from evertrain.agent.aside import aside
from evertrain.agent.inspection import CRITICAL, GROUPS, OK, Inspection
from evertrain.agent.node import TIGHT_BYTES
from evertrain.agent.safekeeping import give_way
from evertrain.model.copies import Peer
from evertrain.model.report import Check, Desired, SelfCheck
from evertrain.model.spec import AgentSpec
from evertrain.worker import mapping, room

_log = logging.getLogger(__name__)

LIMIT_S = 20.0
"""So long may one check take."""
START_LIMIT_S = 120.0
"""So long may the keeper and its zygote take to be ready: imports from a slow file system."""
REACH_S = 2.0
_LOOK_S = 0.1

_WRITE_BYTES = 4 << 20
_MEMORY_BYTES = 16 << 20
MIN_FREE_FRACTION = 0.02
"""Of the file system in shared memory."""
_ROUNDS = 100_000
_KNOWN = (7853315990982803361, "0x1.a29854c531a75p-1")
"""What `_compute` gives on every machine whose arithmetic is right."""

State = dict[str, Any]
Done = TypeVar("Done")


class Wrong(Exception):
    """A check that has not passed; the text is its detail."""


class Odd(str):
    """The detail of a check that has passed, and yet somebody should look."""


class SelfChecks:
    """Answers the newest number that is asked."""

    def __init__(self, spec: AgentSpec, keeper: Callable[[], State | None], on_change: Callable[[], None]) -> None:
        """`keeper`: its state as it was pushed last, None while there is no connection."""
        self._spec = spec
        self._keeper = keeper
        self._on_change = on_change
        self._inspection = inspection_of(spec)
        self._running: asyncio.Task[None] | None = None
        self.report: SelfCheck | None = None
        """The newest that is over."""

    def obey(self, order: Desired) -> None:
        """Begin to test this node, if that is asked and not answered. An order that was obeyed changes nothing."""
        answered = self.report.number if self.report is not None else 0
        if order.check != 0 and order.check != answered and self._running is None:
            self._running = asyncio.create_task(self._test(order.check, order.reach))

    async def _test(self, number: int, peers: tuple[Peer, ...]) -> None:
        try:
            keeper = self._keeper if number > 0 else None
            checks = await run(self._spec, keeper, peers, self._inspection)
        except Exception as error:
            _log.exception("the self-check failed")
            checks = (Check(name="self-check", passed=False, detail=_crashed(error)),)
        self.report = SelfCheck(number=number, checks=checks)
        for check in self.report.failed:
            _log.warning("self-check %d: %s: %s", number, check.name, check.detail)
        self._running = None
        self._on_change()


def inspection_of(spec: AgentSpec) -> Inspection:
    # without its folder in shared memory a sensor remembers nothing there: that belongs to the agent's own
    without_memory = replace(spec, node_dir="")
    return Inspection(lambda: [one for one in sensing.sensors_of(without_memory) if one.name != "kernel"])


async def run(
    spec: AgentSpec,
    keeper: Callable[[], State | None] | None,
    peers: tuple[Peer, ...],
    inspection: Inspection | None = None,
) -> tuple[Check, ...]:
    """All checks beside each other. `keeper` None: only the machine is tested."""
    inspection = inspection or inspection_of(spec)
    checks = [
        _named("shared memory", _in_thread(lambda: _shared_memory(spec.node_dir))),
        _named("disk", _in_thread(lambda: _disk(spec.disk_dir))),
        _named("memory", _in_thread(_memory)),
        _named("cpu", _in_thread(_cpu)),
        *(_named(group, _in_thread(partial(_inspect, inspection, group), is_short=True)) for group in GROUPS),
    ]
    if keeper is not None:
        checks.insert(0, _named("keeper", _keeper_is_ready(keeper, spec.python)))
    if peers:
        checks.append(_named("reach", _reach(peers)))
    return tuple(await asyncio.gather(*checks))


async def _named(name: str, check: Awaitable[str]) -> Check:
    try:
        detail = await check
        return Check(name=name, passed=True, detail=str(detail), is_odd=isinstance(detail, Odd))
    except Wrong as wrong:
        return Check(name=name, passed=False, detail=str(wrong))
    except Exception as error:  # a bug of ours, or something that nobody has thought of: the agent lives on
        _log.exception("check %s", name)
        return Check(name=name, passed=False, detail=_crashed(error))


def _crashed(error: Exception) -> str:
    return f"the check itself failed: {type(error).__name__}: {error}; see the agent's log"


async def _in_thread(check: Callable[[], Done], limit_s: float = LIMIT_S, *, is_short: bool = False) -> Done:
    def work() -> Done:
        if not is_short:
            give_way()
        return check()

    try:
        return await asyncio.wait_for(aside("self-check", work), limit_s)
    except TimeoutError:
        raise Wrong(f"no answer within {limit_s:g} s: what it waits for is dead; look at this machine") from None


# -- the checks --------------------------------------------------------------------------------------------------------


async def _keeper_is_ready(keeper: Callable[[], State | None], python: str) -> str:
    """The keeper answers, and ranks can be started in one way or another."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_LIMIT_S
    while (state := keeper()) is None or state["starter"]["state"] != "ready":
        if loop.time() > deadline:
            if state is None:
                raise Wrong(f"the keeper has not answered for {START_LIMIT_S:g} s; see its log")
            mode, reason = state["starter"]["mode"], state["starter"]["reason"]
            raise Wrong(f"{mode} is not ready after {START_LIMIT_S:g} s{f' ({reason})' if reason else ''}; see its log")
        await asyncio.sleep(_LOOK_S)
    starter = state["starter"]
    if starter["mode"] == "spawn":
        # nothing has been started ahead, so nothing is known yet of what would be
        needs_torch = starter["wanted"] != "spawn" and "program" not in starter["reason"]
        await _in_thread(lambda: _interpreter(python, "import torch" if needs_torch else "pass"), START_LIMIT_S)
    instead = f" instead of {starter['wanted']}: {starter['reason']}" if starter["mode"] != starter["wanted"] else ""
    return f"ranks are started by {starter['mode']}{instead}"


def _interpreter(python: str, line: str) -> None:
    try:
        done = subprocess.run(
            [python, "-c", line], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Wrong(
            f"the ranks' interpreter cannot be started here: {error}; install it as on the other nodes"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Wrong(f"`{python} -c '{line}'` fails: {last}; install what is missing as on the other nodes")


def _shared_memory(node_dir: str) -> str:
    """Pages, trace rings and checkpoints of the node lie there."""
    try:
        found = os.statvfs(node_dir)
        free = room.free_bytes(node_dir)
    except OSError as error:
        raise Wrong(f"{node_dir} cannot be used: {error.strerror}; is /dev/shm mounted?") from None
    fraction = found.f_bavail / found.f_blocks if found.f_blocks else 1.0
    seen = f"{free >> 20:,} MiB free, {fraction:.0%} of {node_dir}"
    if free < TIGHT_BYTES or fraction < MIN_FREE_FRACTION:
        raise Wrong(f"{seen}; remove what fills /dev/shm or memory (`evertrain clean` removes what dead runs left)")
    path = os.path.join(node_dir, "self-check")
    try:
        mapping.allocate(path, _WRITE_BYTES)
        _write_and_compare(path)
    except OSError as error:
        raise Wrong(f"{node_dir} cannot be written: {error.strerror}; look at its rights, and at /dev/shm") from None
    finally:
        _remove(path)
    return seen


def _disk(disk_dir: str) -> str:
    """The disk tier of the node's checkpoints."""
    path = os.path.join(disk_dir, "self-check")
    try:
        Path(disk_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_and_compare(path)
    except OSError as error:
        raise Wrong(f"{disk_dir} cannot be written: {error.strerror}; look at the disk and at its rights") from None
    finally:
        _remove(path)
    return f"{_WRITE_BYTES >> 20} MiB written to {disk_dir}"


def _write_and_compare(path: str) -> None:
    content = hashlib.shake_128(path.encode()).digest(_WRITE_BYTES)
    with open(path, "wb", buffering=0) as file:
        written = 0
        while written < len(content):
            written += file.write(memoryview(content)[written:])
        os.fsync(file.fileno())
    with open(path, "rb") as file:
        if file.read() != content:
            raise Wrong(f"what was written to {path} reads differently; do not trust this machine")


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _memory() -> str:
    for value in (0x55, 0xAA):
        page = bytes([value]) * 4096
        taken = bytearray(page) * (_MEMORY_BYTES // len(page))
        if taken.count(value) != len(taken):
            raise Wrong("memory reads differently from what was written; test this machine's memory")
    return f"{_MEMORY_BYTES >> 20} MiB hold what was written"


def _cpu() -> str:
    for _ in range(2):
        if (got := _compute()) != _KNOWN:
            raise Wrong(f"a fixed computation gives {got} instead of {_KNOWN}; do not trust this machine")
    return "a fixed computation gives what it should"


def _compute() -> tuple[int, str]:
    """Integers modulo 2^64 and a chaotic map: a single wrong bit anywhere shows at the end."""
    number, chaos = 1, 0.3
    for _ in range(_ROUNDS):
        number = (number * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
        chaos = 3.9 * chaos * (1.0 - chaos)
    return number, chaos.hex()


def _inspect(inspection: Inspection, group: str) -> str:
    """What `evertrain check` would say of this group now."""
    found = inspection.look(group)
    if broken := [f"{one.name}: {one.line}" for one in found if one.status == CRITICAL]:
        raise Wrong(f"{'; '.join(broken)}; see `evertrain check {group}` on this machine")
    odd = any(one.status != OK for one in found)
    detail = "; ".join(f"{one.name}: {one.line}" for one in found if one.status != OK or not odd)
    return Odd(detail) if odd else detail


async def _reach(peers: tuple[Peer, ...]) -> str:
    tried = await asyncio.gather(*map(_connect, peers))
    if failed := [line for line in tried if line]:
        others = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
        raise Wrong(f"no connection to {'; '.join(failed[:3])}{others}; look at this machine's network and firewalls")
    return f"{len(peers)} other nodes reached"


async def _connect(peer: Peer) -> str:
    """Empty when it answers, else what was wrong."""
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(peer.address, peer.port), REACH_S)
    except TimeoutError:
        return f"{peer.node} ({peer.address}:{peer.port}): no answer within {REACH_S:g} s"
    except OSError as error:
        return f"{peer.node} ({peer.address}:{peer.port}): {error.strerror or error}"
    writer.close()
    return ""
