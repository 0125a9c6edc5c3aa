"""Who performs what the rules decide? The one task that turns reports into records and records into orders.

Everything that happens to a job goes through `Conductor`: a report changes the picture, the rules of
`decide.conduct` say which records follow, the store makes them durable, and then each node is told what should be. An
exception in here is a bug; it ends the controller process, which is started again and rebuilt from the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from evertrain.controller import views
from evertrain.controller.store import EventStore
from evertrain.decide import planned
from evertrain.decide.conduct import decide, steps
from evertrain.decide.desired import desired
from evertrain.decide.picture import NodePicture, Picture
from evertrain.decide.state import JobState, apply
from evertrain.model.records import AnyRecord, RestartRequested, SignalRaised, StopRequested
from evertrain.model.report import Desired, NodeReport, Report
from evertrain.model.spec import ControllerSpec

_log = logging.getLogger(__name__)

Send = Callable[[Desired], None]

# deadlines are checked this often when nobody speaks
_TICK_S = 0.5


class Conductor:
    """One job's state, picture and orders."""

    def __init__(self, spec: ControllerSpec, state: JobState, store: EventStore) -> None:
        self._spec = spec
        self._state = state
        self._store = store
        self._nodes: dict[str, NodePicture] = {}
        self._sends: dict[str, Send] = {}
        self._sent: dict[str, Desired] = {}
        self._inbox: list[AnyRecord] = []
        self._looks: list[str] = []
        """Restarts for which the agents were asked what copies they hold; so many looks have been asked for."""
        self._wake = asyncio.Event()
        self.ended = asyncio.Event()
        # deadlines must not come early because somebody set the clock
        self._started_time = time.time() - time.monotonic()

    def _now(self) -> float:
        return self._started_time + time.monotonic()

    @property
    def state(self) -> JobState:
        return self._state

    @property
    def picture(self) -> Picture:
        return Picture(self._nodes)

    def connect(self, node: str, send: Send) -> None:
        """An agent has a connection now; the newest one wins."""
        self._sends[node] = send
        self._sent.pop(node, None)
        self._wake.set()

    def disconnect(self, node: str, send: Send) -> None:
        """The connection is gone. Nothing follows from that alone: we may be the blind one."""
        if self._sends.get(node) is not send:
            return
        del self._sends[node]
        seen = self._nodes.get(node)
        if seen is not None:
            self._nodes[node] = NodePicture(seen.report, connected=False, since=self._now())
        self._wake.set()

    def hear(self, report: Report) -> None:
        """Take a node's newest report."""
        node = report.report.node
        before = self._nodes.get(node)
        since = before.since if before is not None and before.connected else self._now()
        self._nodes[node] = NodePicture(report.report, connected=True, since=since)
        if before is None or not before.connected or _matters(before.report, report.report):
            self._wake.set()

    def request_stop(self, signal: int, because: str) -> None:
        self._inbox.append(StopRequested(time=self._now(), signal=signal, because=because))
        self._wake.set()

    def request_restart(self, asked: RestartRequested) -> planned.Refusal | None:
        """Take the request to restart the attempt that runs now, or say why not. The same one twice is one."""
        known = (*self._inbox, *(restart.asked for restart in self._state.restarts))
        others = [one for one in known if isinstance(one, RestartRequested)]
        if any(one.restart == asked.restart for one in others):
            return None
        if any(isinstance(one, RestartRequested) for one in self._inbox):
            return planned.Refusal("it is being restarted already")
        if (asked.from_step is not None or asked.verify is not None) and not self._has_looked(asked.restart):
            return planned.Refusal("its agents have not said yet which steps there are", soon=True)
        attempt = self._state.active
        step = steps(attempt, self.picture)[0] if attempt is not None else None
        if (refusal := planned.refusal(self._state, self.picture, asked, step)) is not None:
            return refusal
        assert attempt is not None
        self._inbox.append(replace(asked, time=self._now(), attempt=attempt.number))
        self._wake.set()
        return None

    def _has_looked(self, restart: str) -> bool:
        """Whether every agent has read its copies since this restart was first asked for; they are told to."""
        if restart not in self._looks:
            self._looks.append(restart)
            self._wake.set()
        look = self._looks.index(restart) + 1
        reports = [self.picture.report(node) for node in self._state.active_nodes()]
        return all(report is not None and report.copies_look >= look for report in reports)

    def raise_signal(self, node: str, signal: str, evidence: str) -> None:
        self._inbox.append(SignalRaised(time=self._now(), node=node, signal=signal, evidence=evidence))
        self._wake.set()

    async def run(self) -> None:
        """Conduct until the job has ended and every reachable node has been told."""
        while True:
            await self._settle()
            if self._state.ended is not None:
                self.ended.set()
            self._tell()
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _settle(self) -> None:
        """Write and apply records until none follows."""
        asked = list(self._inbox)
        if self._state.ended is None and asked:
            await self._commit(asked)
        # not before: who asks for the same thing meanwhile must find it here
        del self._inbox[: len(asked)]
        while records := decide(self._state, self.picture, self._spec.config, self._now()):
            await self._commit(records)

    async def _commit(self, records: list[AnyRecord]) -> None:
        await self._store.append(records)
        for record in records:
            self._state = apply(self._state, record)
            _log.info("%s", record)

    def _tell(self) -> None:
        """Send each node what should be, when it has changed or the node has just connected."""
        for node, send in list(self._sends.items()):
            order = desired(self._state, self.picture, self._spec, self._spec.config, node)
            order = replace(order, copies_look=len(self._looks))
            if self._sent.get(node) != order:
                self._sent[node] = order
                send(order)

    def status(self) -> dict[str, Any]:
        return views.status(self._state, self.picture, job=self._spec.job, now=self._now())


_MATTERING = ("attempts", "keeper", "copies_after_attempt", "flushed_step", "starter", "env", "comparisons")


def _matters(before: NodeReport, after: NodeReport) -> bool:
    """Whether anything changed that a rule could look at; a mere step forward can wait for the next tick."""
    if any(getattr(before, name) != getattr(after, name) for name in _MATTERING):
        return True
    marks = [(page.rank, page.attempt, page.resumed_time, page.passed_time) for page in after.pages]
    return marks != [(page.rank, page.attempt, page.resumed_time, page.passed_time) for page in before.pages]
