"""What does an agent do all day? It brings its node to what the controller ordered, and reports what is.

It may die and come back at any time: nothing that matters is in its memory. The keeper holds the processes, the
controller the intent, shared memory the pages and checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from evertrain.agent import commands, departure, environment, replays
from evertrain.agent.capturing import Capturing
from evertrain.agent.clearing import Clearing
from evertrain.agent.controller_link import ControllerLink
from evertrain.agent.diagnosing import Diagnosing
from evertrain.agent.keeper_link import KeeperLink
from evertrain.agent.machine import Machine
from evertrain.agent.metrics import Metrics
from evertrain.agent.nccl_trace import NcclTrace
from evertrain.agent.node import NodeView
from evertrain.agent.pulsing import Pulsing
from evertrain.agent.safekeeping import Safekeeping
from evertrain.agent.selfcheck import SelfChecks
from evertrain.agent.sensing import Sensing, sensors_of
from evertrain.agent.tracing import Tracing
from evertrain.agent.uploads import Uploads
from evertrain.agent.versions import Versions
from evertrain.agent.windowing import Windowing
from evertrain.checkpoint import disk
from evertrain.detect.peers import Peers
from evertrain.detect.trackers import TrackerRules
from evertrain.model.clocks import shifted
from evertrain.model.report import Desired, DesiredAttempt, Go, Report
from evertrain.model.spec import AgentSpec
from evertrain.observe.sensors.peers import PeersSensor
from evertrain.observe.sensors.trackers import TrackersSensor
from evertrain.worker import page

_log = logging.getLogger(__name__)


class Agent:
    """One node's agent."""

    def __init__(self, spec: AgentSpec, token: str) -> None:
        self._spec = spec
        self._view = NodeView(spec)
        # taken once, so that our reports agree with each other whatever happens to the wall clock
        self._zero = time.time() - time.monotonic()
        self._keeper = KeeperLink(f"{spec.node_dir}/keeper.sock", self._wake_up)
        self._controller = ControllerLink(spec.controller_url, token, spec.job, self._obey)
        self._safekeeping = Safekeeping(
            spec,
            token,
            on_change=self._wake_up,
            on_copies=self._view.reread_copies,
            is_quiet=lambda rank: not self._view.is_communicating(rank),
        )
        self._uploads = Uploads(spec, self._wake_up)
        self._versions = Versions(spec, token, self._wake_up)
        self._capturing = Capturing(spec, token, self._view, lambda: self._keeper.state, self._zero, self._wake_up)
        self._diagnosing = Diagnosing(
            spec.node,
            spec.python,
            Path(spec.node_dir) / "tests",
            Path(spec.log_root) / f"tests-{spec.node}.log",
            lambda: self._keeper.state,
            self._wake_up,
        )
        self._self_checks = SelfChecks(spec, lambda: self._keeper.state, self._wake_up)
        self._metrics = Metrics(self._view.page_path, spec.metrics)
        self._peers = PeersSensor(Peers().judge)
        self._trackers = TrackersSensor(spec.metrics, TrackerRules(spec.metrics))
        sensors = sensors_of(spec)
        self._sensing = Sensing(spec, [*sensors, self._peers, self._trackers], self._wake_up)
        self._machine = Machine(sensors, self._metrics)
        self._clearing = Clearing(self._machine.gpus, self._wake_up)
        self._tracing = Tracing(spec, self._view.page_path, lambda: self._keeper.state)
        self._nccl = NcclTrace(spec, self._tracing.rings)
        self._pulsing = Pulsing(self._tracing.rings, self._view.page_path, self._wake_up)
        self._windowing = Windowing(spec, token, self._tracing.rings, self._view.page_path, self._zero)
        self._order: Desired | None = None
        self._changed = False
        self._look_again = asyncio.Event()
        self._flush: asyncio.Task[None] | None = None
        self._avoided_zygote = False
        self._leaving: asyncio.Task[None] | None = None
        self.over = asyncio.Event()

    async def run(self) -> None:
        """Serve until the job is over here."""
        self._tracing.start()
        self._nccl.start()
        links = [
            asyncio.create_task(self._keeper.run()),
            asyncio.create_task(self._controller.run(self._report)),
            asyncio.create_task(self._safekeeping.run()),
            asyncio.create_task(self._sensing.run()),
            asyncio.create_task(self._pulsing.run()),
            asyncio.create_task(self._serve()),
        ]
        over = asyncio.create_task(self.over.wait())
        done, _ = await asyncio.wait([*links, over], return_when=asyncio.FIRST_COMPLETED)
        for task in (*links, over):
            task.cancel()
        self._tracing.stop()
        await self._diagnosing.close()
        # each closes what it holds before the event loop ends: a peer may be waiting for it
        await asyncio.wait([*links, over])
        for task in done:
            task.result()  # a bug ends the agent; it is started again and adopts what runs

    def _wake_up(self) -> None:
        self._changed = True
        self._look_again.set()

    def _obey(self, order: Desired) -> None:
        self._order = order
        self._wake_up()

    def _report(self) -> Report:
        # what says that an attempt is over says as well whether the next one may start
        self._clearing.look(self._keeper.state, self._order)
        report = self._view.report(self._keeper.state, self._order)
        return Report(
            job=self._spec.job,
            run_id=self._spec.run_id,
            term=self._controller.term,
            time=self._zero + time.monotonic(),
            report=shifted(
                replace(
                    report,
                    **self._safekeeping.report(),
                    upload=self._uploads.report,
                    self_check=self._self_checks.report,
                    code_failed=self._versions.failed,
                    code_problem=self._versions.problem,
                    sensors=self._sensing.sensors,
                    signs=(*self._sensing.signs, *self._metrics.signs(), *self._clearing.signs),
                    unreachable=self._peers.unreachable,
                    gpus_held=self._clearing.held,
                    captured=self._capturing.captured,
                    inspected=self._diagnosing.inspected,
                    blind=(*report.blind, *self._tracing.blind, *self._nccl.blind),
                    traced=self._tracing.traced,
                    nccl=self._nccl.said(self._view.running_attempt),
                    pulses=self._pulsing.pulses,
                ),
                self._zero,
            ),
        )

    async def _serve(self) -> None:
        """Act on every change at once; look at the pages ten times a second; say something every second."""
        sent: Report | None = None
        sent_time = 0.0
        while True:
            changed, self._changed = self._changed, False
            if changed and self._leaving is None:
                self._act()
            self._view.look(self._keeper.state)
            self._look_at_metrics()
            self._safekeeping.look()
            self._notice_loneliness()
            if self._view.env_changed and not self._avoided_zygote:
                self._avoid_zygote()
            order = self._order
            due = time.monotonic() - sent_time >= (order.heartbeat_s if order is not None else 1.0)
            eager = order is not None and (order.eager or self._view.stands_still)
            if changed or due or eager:
                report = self._report()
                if changed or due or sent is None or report.report != sent.report:
                    await self._controller.send(report)
                    sent, sent_time = report, time.monotonic()
            await self._rest(order.read_pages_s if order is not None else 0.1)

    def _look_at_metrics(self) -> None:
        """What training reports of itself; numbers that are none are told at once."""
        before, now = len(self._metrics.signs()), time.monotonic()
        self._trackers.attempt = self._view.running_attempt
        self._metrics.look(self._view.views, self._view.running_attempt, now)
        self._machine.look(now)
        self._changed = self._changed or len(self._metrics.signs()) > before

    async def _rest(self, seconds: float) -> None:
        """Until something changes, or it is time to look at the pages again."""
        timer = asyncio.get_running_loop().call_later(seconds, self._look_again.set)
        await self._look_again.wait()
        self._look_again.clear()
        timer.cancel()

    def _act(self) -> None:
        order, state = self._order, self._keeper.state
        if order is None:
            return
        if order.shutdown:
            self._uploads.obey(None, ())
            self._diagnosing.obey(order)
            self._versions.obey(None)
            self._leave(departure.by_order(order, self._spec, self._keeper, self._view.slots_dir))
            return
        self._safekeeping.obey(order)
        if order.flush_step is not None and order.flush_step != self._view.flushed_step and self._flush is None:
            self._flush = asyncio.create_task(self._flush_to_disk(order, order.flush_step))
        self._uploads.obey(order.upload, order.ranks)
        self._self_checks.obey(order)
        self._capturing.obey(order)
        self._windowing.obey(order)
        self._pulsing.obey(order)
        self._diagnosing.obey(order)
        self._versions.obey(order.code)
        self._peers.obey(order.peers)
        for attempt in order.attempts:
            if attempt.phase == "prepare":
                self._tracing.prepare(attempt.attempt, attempt.ranks, self._controller.term)
        if state is None:
            return
        try:
            early = self._early_lines(order.early, order.env) if order.early is not None else None
            code = self._versions.code
            for command in commands.commands(order, state, lambda one: self._go_lines(one, order.env), early, code):
                self._keeper.send(command)
        except OSError as error:
            # no page, no go: the next turn tries again, and the user reads why nothing starts
            self._trouble(f"telemetry pages or folders for logs cannot be made: {error}")

    def _leave(self, departing: Coroutine[Any, Any, None]) -> None:
        async def leave() -> None:
            async with self._safekeeping.disk_lock:
                await departing

        self._leaving = asyncio.create_task(leave())
        self._leaving.add_done_callback(lambda _: self.over.set())

    def leave_alone(self, because: str) -> None:
        """Leave the job without the controller, once."""
        if self._leaving is None:
            self._leave(departure.alone(because, self._spec, self._keeper, self._view.slots_dir))

    def _notice_loneliness(self) -> None:
        """A controller that is away is no reason to do anything while ranks make progress."""
        if self._controller.dismissed:
            self.leave_alone("the first node has started the job anew, or goes on without this one")
        limit_s, away_s = self._spec.lost_s, self._controller.away_s
        if limit_s is not None and min(away_s, self._view.idle_s) > limit_s:
            self.leave_alone(f"the first node has not been reached for {away_s:.0f} s, and training stands")

    def _go_lines(self, attempt: DesiredAttempt, added: dict[str, str]) -> dict[str, Any]:
        """Make the pages and say to each rank who it is."""
        go, spec = attempt.go, self._spec
        assert go is not None
        inherited = {**os.environ, **added}
        lines: dict[str, Any] = {}
        self._tracing.ring(attempt.attempt, [order.rank for order in go.ranks], self._controller.term)
        for order in go.ranks:
            page_path = self._view.page_path(attempt.attempt, order.rank)
            page_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # asked again before the keeper has answered: a rank may have the page mapped already
            if not page_path.exists():
                page.create(
                    str(page_path), job=spec.job, term=self._controller.term, attempt=attempt.attempt, rank=order.rank
                )
            folder = self._view.log_folder(attempt.attempt, order.rank)
            try:
                folder.mkdir(parents=True, exist_ok=True)
                # nodes may share this folder; each shows the output of its own ranks
                (folder / "node").write_text(spec.node)
            except OSError as error:
                self._trouble(f"what rank {order.rank} prints is not kept: {error}")
            lines[str(order.rank)] = {
                "env": {
                    **environment.of_rank(go, order, spec.job, str(folder / "error.json"), inherited),
                    **(replays.environment(inherited) if go.replay is not None else {}),
                    **self._nccl.environment(attempt.attempt, order.rank, self._controller.term, inherited),
                },
                "args": go.args,
                "stdout": str(folder / "stdout.log"),
                "stderr": str(folder / "stderr.log"),
                "session": {
                    "job": spec.job,
                    "run_id": spec.run_id,
                    "term": self._controller.term,
                    "attempt": attempt.attempt,
                    "node": spec.node,
                    "rank": order.rank,
                    "local_rank": order.local_rank,
                    "world_size": go.world_size,
                    "page": str(page_path),
                    "trace": self._tracing.rings.hook_path(attempt.attempt, order.rank),
                    "slots_dir": str(self._view.slots_dir),
                    "disk_dir": spec.disk_dir,
                    "resume": go.resume,
                    "resume_attempt": go.resume_attempt,
                    "resume_tier": order.resume_tier,
                    "resume_folder": go.resume_folder,
                    "store_since": go.store_since,
                    "reached": go.reached,
                    "restart": go.restart_count > 0 or go.resume is not None,
                    "faults": list(go.faults),
                    "fired_dir": spec.fired_dir,
                    "exception_path": str(self._view.exception_path(attempt.attempt, order.rank)),
                    "mesh": go.mesh,
                    "replay": replays.told(go.replay, page_path) if go.replay is not None else None,
                },
            }
        self._forget_old_pages(attempt.attempt)
        return lines

    def _early_lines(self, go: Go, added: dict[str, str]) -> dict[str, Any]:
        """Say to each rank what is known before it is one."""
        inherited = {**os.environ, **added}
        lines: dict[str, Any] = {}
        for order in go.ranks:
            folder = Path(self._spec.log_root) / "standby" / self._spec.node / str(order.local_rank)
            folder.mkdir(parents=True, exist_ok=True)
            lines[str(order.local_rank)] = {
                "env": environment.ahead_of_start(go, order, self._spec.job, inherited),
                "args": list(go.args) if go.args is not None else None,
                "stdout": str(folder / "stdout.log"),
                "stderr": str(folder / "stderr.log"),
            }
        return {"ranks": lines, "unknown": list(environment.UNKNOWN)}

    def _forget_old_pages(self, attempt: int) -> None:
        """Two attempts' pages are enough, and those of one round of a replay; the log knows the rest."""
        replays.forget(Path(self._spec.node_dir), attempt)
        if attempt < 0:
            return
        for old in (Path(self._spec.node_dir) / "pages").glob("a*-r*"):
            number = old.name[1:].partition("-")[0]
            if number.isdecimal() and int(number) < attempt - 1:
                old.unlink(missing_ok=True)

    def _avoid_zygote(self) -> None:
        self._avoided_zygote = True
        reason = "the script sets environment that torch reads at import"
        self._keeper.send({"do": "avoid_zygote", "term": self._controller.term, "reason": reason})

    def _trouble(self, line: str) -> None:
        """Say it once; the newest of all is the last one, also where it has come again."""
        if line in self._view.problems:
            self._view.problems.remove(line)
        else:
            _log.error("%s", line)
        self._view.problems.append(line)

    async def _flush_to_disk(self, order: Desired, step: int) -> None:
        """Bring one step of this node's ranks from memory to disk, beside everything else."""
        paths = self._view.in_memory(step, order)
        # nothing in memory: this node's copies of the step are on disk already
        async with self._safekeeping.disk_lock:
            problems = await asyncio.to_thread(disk.flush, paths, self._spec.disk_dir) if paths else ()
        for problem in problems:
            self._trouble(problem)
        if not problems:
            self._view.flushed_step = step
        self._view.reread_copies()
        self._flush = None
        self._wake_up()
