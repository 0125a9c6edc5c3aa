"""Who performs what the rules decide? The one task that turns reports into records and records into orders.

Everything that happens to a job goes through `Conductor`: a report changes the picture, the rules of
`decide.conduct` say which records follow, the store makes them durable, and then each node is told what should be. An
exception in here is a bug; it ends the controller process, which is started again and rebuilt from the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from evertrain.controller import news, views
from evertrain.controller.captures import Captures
from evertrain.controller.code_store import CodeStore
from evertrain.controller.communication import Communication
from evertrain.controller.copies import Copies
from evertrain.controller.shared_store import SharedStore
from evertrain.controller.store import EventStore
from evertrain.controller.windows import Windows
from evertrain.decide import (
    captures,
    changes,
    draining,
    examining,
    inspection,
    joining,
    planned,
    reaching,
    replaying,
    rollback,
    standbys,
    verdicts,
)
from evertrain.decide.applying import apply, fold
from evertrain.decide.conduct import decide
from evertrain.decide.desired import desired
from evertrain.decide.picture import NodePicture, Picture
from evertrain.decide.progress import steps
from evertrain.decide.state import JobState
from evertrain.model import version
from evertrain.model.capture_records import CaptureAsked, HangLocated
from evertrain.model.change_records import Audited, VersionKept
from evertrain.model.collective_records import CauseFound, CollectivesOdd, CollectivesWell
from evertrain.model.diagnosis import Symptom
from evertrain.model.records import (
    AllowAsked,
    AnyRecord,
    DrainAsked,
    NodeJoined,
    RestartRequested,
    SignalRaised,
    StopRequested,
)
from evertrain.model.report import Desired, Report
from evertrain.model.spec import ControllerSpec
from evertrain.platforms import choice

_log = logging.getLogger(__name__)

Send = Callable[[Desired], None]

# deadlines are checked this often when nobody speaks
_TICK_S = 0.5

_SOON_S = 0.1
"""What all nodes report at about the same time, and nobody waits for, is looked at together."""

_CAPTURE_AFTER_S = 5.0
"""The user's files are captured when the first ranks are in their loop, or after so long."""

_SILENT_HEARTBEATS = 5
"""A connection that is there and brings nothing for so many heartbeats is as good as none: a link may be down."""


class Conductor:
    """One job's state, picture and orders."""

    def __init__(self, spec: ControllerSpec, state: JobState, store: EventStore) -> None:
        self._spec = spec
        self._state = state
        self._store = store
        self._nodes: dict[str, NodePicture] = {}
        self._sends: dict[str, Send] = {}
        self._sent: dict[str, Desired] = {}
        self._heard: dict[str, float] = {}
        self._inbox: list[AnyRecord] = []
        self._applicants: list[tuple[joining.Wish, asyncio.Future[NodeJoined | joining.Refusal]]] = []
        self._shared = SharedStore(spec, self._wake_up)
        self.code = CodeStore(spec, self._wake_up)
        self.captures = Captures(spec, self._note, self._wake_up)
        self.windows = Windows(spec, self._wake_up)
        self.communication = Communication(spec, self.windows, self._note)
        self._platform = choice.of(spec)
        self._wanted: tuple[int, str] = (0, "")
        """Nodes that the platform was asked for, and why; a controller that takes over asks once more."""
        self._told = ""
        """What it said to that."""
        self._looks: list[str] = []
        """Restarts for which the agents were asked what copies they hold; so many looks have been asked for."""
        self._copies = Copies(spec)
        self._soon: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self.ended = asyncio.Event()

    def now(self) -> float:
        """By the clock of this term, which nobody can set."""
        assert self._state.clock is not None
        return self._state.clock.at(time.monotonic())

    @property
    def state(self) -> JobState:
        return self._state

    @property
    def picture(self) -> Picture:
        told = (self._platform.problem, self._told)
        return Picture(self._nodes, self._shared.stored, (*self._shared.problems, *filter(None, told)))

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
        if seen is not None and seen.connected:  # else its silence was noticed before, and has lasted since then
            self._nodes[node] = NodePicture(seen.report, connected=False, since=self.now())
        self._wake.set()

    def hear(self, report: Report) -> None:
        """Take a node's newest report; its times are by our clock."""
        node = report.report.node
        before = self._nodes.get(node)
        since = before.since if before is not None and before.connected else self.now()
        self._nodes[node] = NodePicture(report.report, connected=True, since=since)
        self._heard[node] = time.monotonic()
        self.communication.hear(self._state, report.report, self.now())
        if before is None or not before.connected or news.matters(before.report, report.report):
            self._wake.set()
        elif news.concerns_rounds(before.report, report.report) and self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(_SOON_S, self._wake.set)

    async def admit(self, wish: joining.Wish) -> NodeJoined | joining.Refusal:
        """Give a node its seat; written down before it is told."""
        answer: asyncio.Future[NodeJoined | joining.Refusal] = asyncio.get_running_loop().create_future()
        self._applicants.append((wish, answer))
        self._wake.set()
        return await answer

    def request_stop(self, signal: int, because: str) -> None:
        self._inbox.append(StopRequested(time=self.now(), signal=signal, because=because))
        self._wake.set()

    def request_restart(self, asked: RestartRequested, wish: changes.Wish | None = None) -> changes.Refusal | None:
        """Take the request to restart the attempt that runs now, or say why not. The same one twice is one.

        `wish`: what its ranks are to run from then on.
        """
        known = (*self._inbox, *(restart.asked for restart in self._state.restarts))
        others = [one for one in known if isinstance(one, RestartRequested)]
        if any(one.restart == asked.restart for one in others):
            return None
        if any(isinstance(one, RestartRequested) for one in self._inbox):
            return changes.Refusal("it is being restarted already")
        if (asked.from_step is not None or asked.verify is not None) and not self._has_looked(asked.restart):
            return changes.Refusal("its agents have not said yet which steps there are", soon=True)
        attempt = self._state.active
        step = steps(attempt, self.picture)[0] if attempt is not None else None
        if (refusal := planned.refusal(self._state, self.picture, asked, step)) is not None:
            return refusal
        assert attempt is not None
        change = changes.ask(self._noted(), wish, self.now()) if wish is not None else []
        if isinstance(change, changes.Refusal) and not change.is_same:
            return change
        self._inbox += [] if isinstance(change, changes.Refusal) else change
        self._inbox.append(replace(asked, time=self.now(), attempt=attempt.number))
        self._wake.set()
        return None

    def request_change(self, wish: changes.Wish) -> changes.Refusal | None:
        """Take the wish to have ranks run something else, or say why not. The same one twice is one."""
        state = self._noted()
        if wish.act == "rollback" and wish.version is None and wish.change not in state.changes:
            number = rollback.target(state)
            if number is None:
                return changes.Refusal("no other version has run in this run of the job", wrong_usage=True)
            wish = replace(wish, version=number)
        asked = changes.ask(state, wish, self.now())
        if isinstance(asked, changes.Refusal):
            return asked
        self._inbox += asked
        self._wake.set()
        return None

    def knows_change(self, name: str) -> bool:
        """Whether it has been asked for before, by itself or with a restart: whoever got no answer asks again."""
        state = self._noted()
        return name in state.changes or any(one.asked.restart == name for one in state.restarts)

    def audit(self, record: Audited) -> None:
        """Write down that somebody tried to change the code, well or not. The same archive, sent again, is one try."""
        is_upload = record.act == "upload" and record.outcome == "done"
        if is_upload and any(replace(one, time=record.time) == record for one in self._noted().audits):
            return
        self._inbox.append(replace(record, time=self.now()))
        self._wake.set()

    def _noted(self) -> JobState:
        """The state with what is on its way to the log."""
        return fold(self._inbox, self._state)

    def _has_looked(self, restart: str) -> bool:
        """Whether every agent has read its copies since this restart was first asked for; they are told to."""
        if restart not in self._looks:
            self._looks.append(restart)
            self._wake.set()
        look = self._looks.index(restart) + 1
        reports = [self.picture.report(node) for node in self._state.active_nodes()]
        return all(report is not None and report.copies_look >= look for report in reports)

    def request_capture(self, *, dumps: bool = False) -> int | None:
        """Have all processes looked at: the number of that capture; None: there are none. One on its way will do.

        `dumps`: and have the dumps of the flight recorders kept.
        """
        state, attempt = self._noted(), self._state.active
        if attempt is None or attempt.ending is not None or not attempt.alive():
            return None
        newest = state.captures[-1].asked if state.captures else None
        is_under_way = newest is not None and self._can_come(newest) and not self.captures.is_over(newest.capture)
        if newest is not None and is_under_way and (newest.dumps or not dumps):
            return newest.capture
        asked = captures.ask(state, attempt, "user", self.now(), dumps=dumps)
        self._inbox.append(asked)
        self._wake.set()
        return asked.capture

    def awaits_capture(self, number: int) -> bool | None:
        """Whether what was asked for may come yet; None: nobody has asked."""
        asked = next((one.asked for one in self._noted().captures if one.asked.capture == number), None)
        return self._can_come(asked) if asked is not None else None

    def _can_come(self, asked: CaptureAsked) -> bool:
        attempt = self._state.active
        return attempt is not None and asked.attempt == attempt.number and asked.time >= self._state.term_time

    def request_window(
        self, seconds: float, *, brief: bool, now_s: float = 0.0, writers: tuple[str, ...] = ()
    ) -> int | None:
        """Have trace rings of the newest attempt read: the number of what will come; None: that cannot be now."""
        return self.windows.ask(self._state, self.now(), seconds=seconds, brief=brief, now_s=now_s, writers=writers)

    def _note(self, record: HangLocated | CollectivesOdd | CauseFound | CollectivesWell) -> None:
        self._inbox.append(replace(record, time=self.now()))
        self._wake.set()

    def raise_signal(self, node: str, signal: str, evidence: str) -> None:
        self._inbox.append(SignalRaised(time=self.now(), node=node, signal=signal, evidence=evidence))
        self._wake.set()

    def ask(self, wish: AllowAsked | DrainAsked) -> str:
        """Take what the user wants of a node, or say why not. The same twice is one."""
        state = self._noted()
        if any(type(one) is type(wish) and one.node == wish.node for one in state.asked):
            return ""
        if isinstance(wish, DrainAsked):
            refusal = draining.refusal(state, self.picture, wish.node)
        else:
            refusal = draining.allow_refusal(state, wish.node)
        if not refusal:
            self._inbox.append(replace(wish, time=self.now()))
            self._wake.set()
        return refusal

    def examine(self, nodes: Sequence[str], symptom: Symptom, budget_s: float) -> int | str:
        """Have nodes tested: the number of the examination, or why there is none."""
        state = self._noted()
        records = examining.ask(state, self.picture, nodes, symptom, budget_s, self.now())
        if isinstance(records, str):
            return records
        self._inbox += records
        self._wake.set()
        return state.next_exam if records else state.next_exam - 1

    async def run(self) -> None:
        """Conduct until the job has ended and every reachable node has been told."""
        while True:
            self._note_silence()
            await self._seat()
            await self._settle()
            self.captures.look(self._state, self.picture)
            self.windows.look(self._state, self.picture, self.now())
            self.communication.look(self._state, self.picture, self.now())
            self._ask_platform()
            self._copies.advance(self._state, self.picture, self.now())
            if self._state.ended is not None:
                self.ended.set()
            self._tell()
            try:
                async with asyncio.timeout(_TICK_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if self._soon is not None:
                self._soon.cancel()
                self._soon = None

    def _note_silence(self) -> None:
        """What was heard last is no news any more when nothing has come since."""
        limit_s = _SILENT_HEARTBEATS * max(1.0, self._spec.config.agent.heartbeat_s)
        for node, seen in self._nodes.items():
            if seen.connected and time.monotonic() - self._heard[node] > limit_s:
                _log.warning("%s is connected and has said nothing for %g s", node, limit_s)
                silent_s = time.monotonic() - self._heard[node]
                self._nodes[node] = NodePicture(seen.report, connected=False, since=self.now() - silent_s)

    async def _seat(self) -> None:
        waiting, self._applicants = self._applicants, []
        for wish, answer in waiting:
            admitted = joining.admit(
                self._state, self.picture, wish, job=self._spec.job, version=version.own(), now=self.now()
            )
            if isinstance(admitted, NodeJoined) and self._state.joined.get(admitted.node) != admitted:
                await self._commit([admitted])
            if not answer.done():
                answer.set_result(admitted)

    async def _settle(self) -> None:
        """Write and apply records until none follows."""
        asked = list(self._inbox)
        if self._state.ended is None and asked:
            await self._commit(asked)
        # not before: who asks for the same thing meanwhile must find it here
        del self._inbox[: len(asked)]
        if records := self._shared.look(self._state, self.picture, self.now()):
            await self._commit(records)
        if records := self._own_code():
            await self._commit(records)
        while records := decide(self._state, self.picture, self._spec.config, self.now()):
            await self._commit(records)

    def _own_code(self) -> list[AnyRecord]:
        """What the files are that this run was called for; captured when ranks have read them, and need no help."""
        attempt = self._state.attempt
        if self._state.own is not None or attempt is None:
            return []
        if attempt.resumed is None and attempt.ended is None and self.now() - attempt.started.time < _CAPTURE_AFTER_S:
            return []
        self.code.begin()
        if self.code.captured is None:
            return []
        code, problem = self.code.captured
        given, source = self._spec.command.args, self._spec.code_root
        now = self.now()
        version = changes.kept_own(self._state, code, problem, given, source, now)
        return [VersionKept(time=now, version=version, is_own=True)]

    async def _commit(self, records: list[AnyRecord]) -> None:
        await self._store.append(records)
        for record in records:
            self._state = apply(self._state, record)
            _log.info("%s", record)

    def _ask_platform(self) -> None:
        wanted = verdicts.nodes_wanted(self._state)
        if wanted != self._wanted:
            self._wanted = wanted
            self._told = self._platform.request(*wanted) if wanted[0] else ""

    def _tell(self) -> None:
        """Send each node what should be, when it has changed or the node has just connected."""
        config, now, picture = self._spec.config, self.now(), self.picture
        fetches = self._copies.fetches(self._state, picture)
        running = self._state.active.by_node() if self._state.active is not None else {}
        placed, pinned = self._state.ranks_by_node(), rollback.pinned(self._state)
        prepared, tried = changes.prepared(self._state, picture), reaching.tried(self._state)
        watch = self.communication.orders(self._state)
        capture, replays = captures.order(self._state, now), replaying.parts(self._state, picture)
        for node, send in list(self._sends.items()):
            order = desired(
                self._state,
                picture,
                self._spec,
                config,
                node,
                backup_round=self._copies.order(node, has_ranks=node in placed, pinned=pinned),
                fetches=fetches.get(node, ()),
                check=standbys.check_number(self._state, picture, node, config, now),
                reach=standbys.reach(self._state, picture, node),
                placed=placed,
                running=running,
                prepared=prepared,
                tried=tried,
                capture=capture,
                inspect=inspection.order(self._state, node) or examining.order(self._state, node),
                replay=replays.get(node),
            )
            order = replace(
                order,
                copies_look=len(self._looks),
                upload=self._shared.order(node),
                windows=self.windows.orders(node),
                watch=watch.get(node),
            )
            if self._sent.get(node) != order:
                self._sent[node] = order
                send(order)

    def close(self) -> None:
        """The job is over: whatever the platform was asked for is no longer needed."""
        self._platform.close()

    def _wake_up(self) -> None:
        self._wake.set()

    def status(self) -> dict[str, Any]:
        return views.status(self._state, self.picture, job=self._spec.job, now=self.now())
