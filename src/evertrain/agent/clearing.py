"""Is a process of an attempt that is over still on a GPU of this node? The next one would find its memory taken.

    ranks have ended ──asks NVML──▶ nobody of theirs ──▶ the node is ready
                          ├─ one of theirs: asked again, until it has gone or `Desired.gpu_wait_s` have passed
                          └─ no answer: whoever cannot see holds nobody up

Theirs are the ranks and what they have started, by pid and start time: whoever has a rank above it or is of its
session, and whom the GPU sensor saw on a device when that still held. The driver may go on to list a process that has
left /proc. Anybody else's process is left alone. Where the sensor sees no GPU, nothing is asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from evertrain.agent.aside import aside
from evertrain.agent.sensing import KEEP_S
from evertrain.model.config import AgentConfig
from evertrain.model.report import Desired
from evertrain.model.sensing import GpuReading, Sign

_log = logging.getLogger(__name__)

POLL_S = 0.2
ANSWER_S = 1.0
"""So long may NVML take to say who is there."""
_MOST_NAMED = 4
_MOST_ANCESTORS = 64

State = dict[str, Any]


class Gpus(Protocol):
    """The GPU sensor, as far as it is asked here."""

    @property
    def readings(self) -> Sequence[GpuReading]: ...
    @property
    def can_be_asked(self) -> bool: ...
    def computing(self) -> Mapping[int, tuple[str, ...]]: ...


class Process(NamedTuple):
    """One process for ever."""

    pid: int
    start_ticks: int


class Found(NamedTuple):
    """A process that is in /proc."""

    itself: Process
    session: int
    leader: Process | None
    """Of the session; None: it has ended."""
    above: tuple[Process, ...]
    """Its parent, the parent of that one, and so on."""


Find = Callable[[int], Found | None]


class Clearing:
    """`look` whenever the keeper's state may be another one; then `held` says whether the next attempt has to wait."""

    def __init__(
        self,
        gpus: Gpus | None,
        wake: Callable[[], None],
        *,
        find: Find | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called in the event loop when `held` has changed."""
        self._gpus = gpus
        self._wake = wake
        self._find = find or find_process
        self._clock = clock
        self._limit_s = AgentConfig().gpu_wait_s
        self._noted: Sequence[GpuReading] = ()
        self._known: dict[Process, int] = {}
        """Ranks, and what they had on a GPU; with their attempt."""
        self._strangers: frozenset[int] = frozenset()
        self._over: set[int] = set()
        """Attempts of which nothing should be there any more."""
        self._given_up: set[Process] = set()
        self._asked: asyncio.Future[list[_Left]] | None = None
        """May never be answered: no second question is asked beside it."""
        self._waiting: asyncio.Task[None] | None = None
        self._signs: list[tuple[Sign, float]] = []
        self.held = ""

    @property
    def signs(self) -> tuple[Sign, ...]:
        """What was not waited for any longer."""
        now = self._clock()
        return tuple(sign for sign, time in self._signs if now - time <= KEEP_S)

    def look(self, state: State | None, order: Desired | None) -> None:
        """Costs nothing where there is no GPU, and next to nothing where nothing has changed."""
        if self._gpus is None or state is None:
            return
        if order is not None:
            self._limit_s = order.gpu_wait_s
        attempts = {int(number): attempt for number, attempt in state["attempts"].items()}
        new = [number for number, one in attempts.items() if one["phase"] == "ended" and number not in self._over]
        self._over.update(new)
        if not self._gpus.can_be_asked:
            return
        for number, attempt in attempts.items():
            for rank in attempt["ranks"].values():
                self._known[Process(rank["pid"], rank["start_ticks"])] = number
        self._note(attempts)
        if new and self._waiting is None:
            self.held = "it asks NVML who is still on its GPUs"
            self._waiting = asyncio.create_task(self._wait())

    def _note(self, attempts: dict[int, Any]) -> None:
        """Remember whose the processes are that the sensor has seen: when their rank is gone nobody can tell."""
        assert self._gpus is not None
        readings = self._gpus.readings
        if readings is self._noted:
            return
        self._noted = readings
        pids = {pid for reading in readings for pid in reading.processes}
        for pid in pids - self._strangers - {one.pid for one in self._known}:
            if (found := self._find(pid)) is not None and (number := _attempt_of(found, self._known)) is not None:
                self._known[found.itself] = number
        self._strangers = frozenset(pids - {one.pid for one in self._known})
        # what was known of earlier attempts is of no use once nobody lists it
        self._known = {one: number for one, number in self._known.items() if number in attempts or one.pid in pids}

    # -- waiting -------------------------------------------------------------------------------------------------------

    async def _wait(self) -> None:
        began, seen = self._clock(), False
        try:
            while left := await self._left():
                waited_s = self._clock() - began
                if waited_s >= self._limit_s:
                    self._give_up(left, waited_s)
                    return
                seen = True
                self._hold(_in_words(left))
                await asyncio.sleep(min(POLL_S, max(0.0, self._limit_s - waited_s)))
            if seen:
                _log.info("nothing of the attempt before is on a GPU any more, after %.1f s", self._clock() - began)
        except Exception:
            _log.exception("who is on the GPUs cannot be told")
        finally:
            self._waiting = None
            self._hold("")

    def _hold(self, because: str) -> None:
        if because != self.held:
            self.held = because
            self._wake()

    async def _left(self) -> list[_Left]:
        """Who of theirs is there; nobody, where nobody can say."""
        assert self._gpus is not None
        if (self._asked is not None and not self._asked.done()) or not self._gpus.can_be_asked:
            return []
        known = {one: number for one, number in self._known.items() if number in self._over}
        self._asked = aside("who is on the GPUs", self._ask, known)
        await asyncio.wait([self._asked], timeout=ANSWER_S)
        if not self._asked.done():
            _log.warning("NVML has not said within %g s who is on its GPUs: nobody waits for it", ANSWER_S)
            return []
        return [one for one in self._asked.result() if one.process not in self._given_up]

    def _ask(self, known: Mapping[Process, int]) -> list[_Left]:
        """In a thread."""
        assert self._gpus is not None
        left = []
        for pid, places in self._gpus.computing().items():
            owner = self._owner(pid, known)
            if owner is not None:
                left.append(_Left(*owner, places))
        return left

    def _owner(self, pid: int, known: Mapping[Process, int]) -> tuple[Process, int] | None:
        """`known` are those of attempts that are over."""
        if (found := self._find(pid)) is None:
            return next(((one, number) for one, number in known.items() if one.pid == pid), None)
        number = _attempt_of(found, known)
        return (found.itself, number) if number is not None else None

    def _give_up(self, left: Sequence[_Left], waited_s: float) -> None:
        text = (
            f"{_in_words(left)} {waited_s:.0f} s after its ranks had ended (agent.gpu_wait_s); the next attempt starts "
            "beside it: look for it with nvidia-smi, and end it"
        )
        _log.warning("%s", text)
        now = self._clock()
        key = ",".join(f"{one.process.pid}.{one.process.start_ticks}" for one in left)
        place = left[0].places[0]
        sign = Sign(key=f"gpus:{key}", kind="gpu_occupied", device=place, evidence=text, time=now)
        self._signs = [(one, time) for one, time in self._signs if now - time <= KEEP_S] + [(sign, now)]
        self._given_up.update(one.process for one in left)


class _Left(NamedTuple):
    process: Process
    attempt: int
    places: tuple[str, ...]


def _attempt_of(found: Found, known: Mapping[Process, int]) -> int | None:
    """The attempt that a process belongs to: by itself, by those above it, or by its session."""
    for one in (found.itself, *found.above, *([found.leader] if found.leader is not None else [])):
        if one in known:
            return known[one]
    if found.leader is not None:
        return None
    # its number is not given anew while the session is there
    return next((number for one, number in known.items() if one.pid == found.session), None)


def _in_words(left: Sequence[_Left]) -> str:
    named = "; ".join(
        f"process {one.process.pid} of attempt {one.attempt} on {', '.join(one.places)}" for one in left[:_MOST_NAMED]
    )
    more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
    return f"{named}{more} {'is' if len(left) == 1 else 'are'} still there"


def find_process(pid: int) -> Found | None:
    """What /proc says of a process; None: it is not there."""
    if (own := _stat(pid)) is None:
        return None
    above: list[Process] = []
    parent = own[2]
    while parent > 1 and len(above) < _MOST_ANCESTORS and (seen := _stat(parent)) is not None:
        above.append(seen[0])
        parent = seen[2]
    leader = _stat(own[1])
    return Found(own[0], own[1], leader[0] if leader is not None else None, tuple(above))


def _stat(pid: int) -> tuple[Process, int, int] | None:
    """Itself, its session and its parent; the name in the file may hold blanks and parentheses."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return Process(pid, int(fields[19])), int(fields[3]), int(fields[1])
