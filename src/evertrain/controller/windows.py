"""What have the trace rings of all nodes held in the last seconds? Asked for, collected until a deadline, handed on.

Nothing of it is in the event log: whoever asked asks again if the controller was started anew. When an incident opens,
the controller asks by itself and keeps what comes on disk.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

from evertrain.agent.aside import aside
from evertrain.controller import window_files
from evertrain.controller.captures import Refusal
from evertrain.controller.clocks import TIE_S
from evertrain.decide.picture import Picture
from evertrain.decide.state import JobState
from evertrain.model.spec import ControllerSpec
from evertrain.model.windows import JobWindow, NodePart, WindowOrder

_log = logging.getLogger(__name__)

COLLECT_S = 5.0
MOST_SECONDS = 3600.0
MOST_BYTES = 64 << 20
"""Of one node, packed;"""
MOST_BYTES_ALL = 512 << 20
"""... and of all."""
INCIDENT_S = 20.0
"""So much is kept of what came before an incident."""
_MOST_OPEN = 4
_KEPT_DONE = 4
"""Windows that are over and may be fetched yet."""


class _Open:
    def __init__(
        self,
        order: WindowOrder,
        nodes: frozenset[str],
        asked_time: float,
        incident: int | None,
        collect_s: float,
    ) -> None:
        self.order, self.nodes, self.asked_time, self.incident = order, nodes, asked_time, incident
        self.parts: dict[str, NodePart] = {}
        began = time.monotonic()
        self.deadline, self._last_s = began + collect_s, began + max(collect_s, COLLECT_S)

    @property
    def is_late(self) -> bool:
        """Most have answered and the others are late, or all are."""
        now = time.monotonic()
        return now >= (self.deadline if 2 * len(self.parts) >= len(self.nodes) else self._last_s)


class Windows:
    """Those of one job."""

    def __init__(self, spec: ControllerSpec, wake: Callable[[], None]) -> None:
        self._spec, self._wake = spec, wake
        self._run_dir = Path(spec.run_dir)
        self._open: dict[int, _Open] = {}
        self._done: dict[int, JobWindow] = {}
        self._offsets: dict[str, float] = {}
        self._incidents: set[int] | None = None
        """Those that something was asked for; None: what there was before us is nobody's news."""
        self._keeping: set[asyncio.Task[None]] = set()

    def note_offset(self, node: str, offset_s: float) -> None:
        """What is to be added to a node's clock for ours."""
        self._offsets[node] = offset_s

    def ask(
        self, state: JobState, now: float, *, seconds: float, brief: bool = False, incident: int | None = None,
        attempt: int | None = None, now_s: float = 0.0, most: int = 256, writers: tuple[str, ...] = (),
        collect_s: float | None = None,
    ) -> int | None:  # fmt: skip
        """The number of what will come; None: there is nobody to ask, or too much has been asked for. `now_s`, `most`
        and `writers` are the order's; after `collect_s` nobody is waited for any more, if most have answered."""
        wanted = attempt if attempt is not None else state.attempt.number if state.attempt is not None else None
        found = next((one for one in state.attempts if one.number == wanted), None)
        if found is None:
            return None
        for number, one in self._open.items():
            asked = (one.order.attempt, one.order.seconds, one.order.brief, one.order.now_s, one.order.writers)
            if asked == (wanted, seconds, brief, now_s, writers) and not incident:
                return number
        if len(self._open) >= _MOST_OPEN and incident is None and not now_s:
            return None
        number = max([int(time.time() * 1000), *(known + 1 for known in (*self._open, *self._done))])
        order = WindowOrder(
            number=number, attempt=found.number, seconds=min(seconds, MOST_SECONDS), brief=brief, now_s=now_s,
            most=most, writers=writers,
        )  # fmt: skip
        collect_s = COLLECT_S if collect_s is None else collect_s
        self._open[number] = _Open(order, frozenset(found.started.placement.values()), now, incident, collect_s)
        asyncio.get_running_loop().call_later(collect_s, self._wake)
        self._wake()
        return number

    def orders(self, node: str) -> tuple[WindowOrder, ...]:
        """What this node is to send now."""
        return tuple(one.order for one in self._open.values() if node in one.nodes - one.parts.keys())

    def look(self, state: JobState, picture: Picture, now: float) -> None:
        """Ask for what an incident needs; end what is whole or late."""
        self._follow_incidents(state, now)
        for number, one in list(self._open.items()):
            waits = [node for node in one.nodes - one.parts.keys() if picture.connected(node)]
            if waits and not one.is_late:
                continue
            del self._open[number]
            self._done[number] = window = self._whole(one)
            for old in sorted(self._done)[:-_KEPT_DONE]:
                del self._done[old]
            if one.incident is not None and window.parts:
                task = asyncio.create_task(self._keep(one.incident, window))
                self._keeping.add(task)
                task.add_done_callback(self._keeping.discard)

    def waits_for(self, number: int) -> tuple[str, ...] | None:
        """Nodes that have not sent it yet; None: it is over, or unknown."""
        one = self._open.get(number)
        return tuple(sorted(one.nodes - one.parts.keys())) if one is not None else None

    def result(self, number: int) -> JobWindow | None:
        return self._done.get(number)

    def take(self, number: int, node: str, packed: bytes) -> Refusal | None:
        """Take a node's part, or say why not. The same again changes nothing."""
        one = self._open.get(number)
        if one is None:
            return Refusal(410, f"window {number} is over, or was never asked for")
        if node not in one.nodes:
            return Refusal(403, f"{node} has no ranks of attempt {one.order.attempt}")
        if sum(len(part.packed) for part in one.parts.values()) + len(packed) > MOST_BYTES_ALL:
            return Refusal(413, "all nodes together send more than a window may hold; ask for fewer seconds")
        offset_s = self._offsets.get(node, 0.0)
        one.parts[node] = NodePart(node=node, offset_s=offset_s, bound_s=TIE_S, packed=packed)
        self._wake()
        return None

    def _whole(self, one: _Open) -> JobWindow:
        return JobWindow(
            job=self._spec.job,
            number=one.order.number,
            attempt=one.order.attempt,
            seconds=one.order.seconds,
            time=one.asked_time,
            parts=tuple(part for _, part in sorted(one.parts.items())),
            missing=tuple(sorted(one.nodes - one.parts.keys())),
        )

    def _follow_incidents(self, state: JobState, now: float) -> None:
        trace = self._spec.config.trace
        known = self._incidents
        self._incidents = set(state.incidents)
        if known is None or not trace.enabled or not trace.keep_mib:
            return
        for number in sorted(self._incidents - known):
            attempt = state.incidents[number].opened.attempt
            self.ask(state, now, seconds=INCIDENT_S, incident=number, attempt=attempt)

    async def _keep(self, incident: int, window: JobWindow) -> None:
        most = self._spec.config.trace.keep_mib << 20
        try:
            await aside("windows", window_files.write, self._run_dir, incident, window, most)
        except OSError as error:
            _log.error("the trace of incident %d is not kept: %s", incident, error.strerror or error)
