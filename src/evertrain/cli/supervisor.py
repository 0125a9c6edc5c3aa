"""Who watches over a running job? `Supervisor`, the heart of `evertrain run`.

It starts again whatever of the job has died, says what happens, takes Ctrl-C, does the drills of whole nodes, and knows
when all is over: the controller has written the result. Deciding is not its business.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import shutil
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from evertrain.cli import client, drills, look, narrate, places, processes
from evertrain.cli.children import Child
from evertrain.cli.output import Output
from evertrain.cli.places import Places
from evertrain.cli.plan import Plan
from evertrain.cli.poll import Poller, Seen
from evertrain.model.errors import TroubleError

TICK_S = 0.1
ORPHANS_EVERY_S = 0.5
ORPHAN_PATIENCE_S = 2.0
STOP_MARGIN_S = 15.0
"""Beyond its grace the job must have ended after a request to stop; then it is ended by force."""
TELL_S = 3.0
"""So long a first node on another machine is tried to be told of a stop."""
FAREWELL_S = 10.0
"""The job has ended: so long may its processes take to leave."""
HOPELESS_DEATHS = 6
"""Quick deaths in a row of one process before the job ever ran: it will not."""
SILENT_S, SILENT_AT_STOP_S = 20.0, 5.0
"""A controller that serves and has not answered for so long hangs; where the job is to end there is less time."""
PR_SET_CHILD_SUBREAPER = 36

Json = dict[str, Any]


class Supervisor:
    def __init__(self, plan: Plan, here: Places, children: list[Child], output: Output, poller: Poller) -> None:
        self._plan = plan
        self.here = here
        self._children = {child.role.name: child for child in children}
        self._output = output
        self._poller = poller
        self._seen: Seen | None = None
        self._signals: list[int] = []
        self._stops: list[int] = []
        self._stop_sent = False
        self._stop_time = 0.0
        self._stop_deadline: float | None = None
        self._next_orphans = 0.0
        self._orphans: dict[int, float] = {}
        self._drills = drills.waiting(plan.faults)
        # nodes keep their numbers when others take their places
        self._numbered = plan.nodes.names if len(plan.nodes.names) == plan.nodes.all else ()
        self._complained: set[str] = set()
        self._over = False
        self._controller_left = False
        self._is_cut_off = False
        self.hopeless: Child | None = None
        self.is_gone = False
        """A drill has taken this whole machine away for good; nothing here will hear how the job ends."""

    @property
    def seen(self) -> Seen | None:
        """The last look at the job while it ran."""
        return self._seen

    @property
    def stopped_by(self) -> int | None:
        """The signal that asked for the end, if one did."""
        return self._stops[0] if self._stops else None

    def listen_to_signals(self) -> None:
        """From now on the signals that stop a job are noted; before anything is started, so that children begin with
        the default handlers as under torchrun."""
        for number in self._plan.stop_signals:
            # what the user had ignored (nohup) stays ignored
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            signal.signal(number, self._note_signal)

    def start(self) -> None:
        self._output.start()
        try:
            for child in self._children.values():
                child.start()
        except OSError as error:
            raise TroubleError(f"the job's processes cannot be started: {error}") from error
        self._note_owner()
        self._poller.start()
        # orphans of a keeper that dies come to us and not to init, so that nothing is left behind
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def watch(self) -> Json | None:
        """Until the job is over; its result, or None where it had to be given up."""
        with selectors.DefaultSelector() as selector:
            wake, waker = os.pipe()
            os.set_blocking(waker, False)
            os.set_blocking(wake, False)
            signal.set_wakeup_fd(waker)
            selector.register(wake, selectors.EVENT_READ)
            try:
                while True:
                    result = self._turn()
                    if result is not None or self.hopeless is not None or self.is_gone or self._overdue():
                        return result
                    self._wait(selector, wake)
            finally:
                signal.set_wakeup_fd(-1)
                os.close(wake)
                os.close(waker)

    def end(self) -> None:
        """Everything that still runs is given a moment to leave, and then ended; the run folder is removed."""
        deadline = time.monotonic() + (FAREWELL_S if self._over else 0.0)
        for child in self._children.values():
            if not child.wait(deadline - time.monotonic()):
                child.kill()
                child.wait(5.0)
        deadline = time.monotonic() + 5.0
        while self._kill_orphans() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._poller.stop()
        self._output.finish()
        shutil.rmtree(self.here.run_folder, ignore_errors=True)
        shutil.rmtree(self.here.processes, ignore_errors=True)

    # --- one turn of the loop

    def _turn(self) -> Json | None:
        self._obey_signals()
        # a result that is there before a process is seen dead: then it left as it should
        result = self._result()
        self._over = result is not None
        self._end_hung_controller()
        self._keep_alive()
        if time.monotonic() >= self._next_orphans:
            self._next_orphans = time.monotonic() + ORPHANS_EVERY_S
            self._kill_orphans()
        self._look_at_job()
        return result

    def _wait(self, selector: selectors.BaseSelector, wake: int) -> None:
        """Until something happens to a child, a signal comes, or a tick has passed."""
        watched = set(selector.get_map()) - {wake}
        wanted = {child.pidfd for child in self._children.values() if child.pidfd is not None}
        for pidfd in watched - wanted:
            selector.unregister(pidfd)
        for pidfd in wanted - watched:
            selector.register(pidfd, selectors.EVENT_READ)
        selector.select(TICK_S)
        try:
            os.read(wake, 4096)
        except BlockingIOError:
            pass

    def _result(self) -> Json | None:
        for file in (self.here.result, self.here.own_result):
            try:
                result: Json = json.loads(file.read_bytes())
                return result
            except (OSError, ValueError):
                continue
        # it has left without a result where there is no room at all
        left, self._controller_left = self._controller_left, False
        return look.result_from_log(self.here.database) if left else None

    def _overdue(self) -> bool:
        return self._stop_deadline is not None and time.monotonic() > self._stop_deadline

    # --- children

    def _keep_alive(self) -> None:
        started = False
        for child in self._children.values():
            status = child.look()
            self._controller_left |= status == 0 and child.role.name == "controller"
            if status is not None and not self._over and not self._stops and not child.is_away:
                self._tell_death(child, status)
            if not self._over:
                started |= child.start_if_due()
        if started:
            self._note_owner()

    def _end_hung_controller(self) -> None:
        """A successor is rebuilt from the log within a second; one that hangs would leave the next fault unanswered."""
        silent_s, controller = self._poller.silent_s, self._children.get("controller")
        if controller is None:
            return self._tell_silence(silent_s)
        if self._over or silent_s < (SILENT_AT_STOP_S if self._stops else SILENT_S):
            return None
        # one that is still being started has not written its pid yet
        if controller.pid is not None and controller.pid == client.serving_pid(self.here.run_dir):
            self._output.say(f"the controller has not answered for {silent_s:.0f} s and is ended")
            self._poller.silent_s = 0.0
            controller.kill()
        return None

    def _tell_silence(self, silent_s: float) -> None:
        """The first node is another machine: nothing can be done about it from here but to say so."""
        if silent_s >= SILENT_S and not self._is_cut_off:
            self._is_cut_off = True
            self._output.say(f"the first node has not answered for {silent_s:.0f} s; training goes on while it can")
        elif silent_s == 0.0 and self._is_cut_off:
            self._is_cut_off = False
            self._output.say("the first node answers again")

    def _tell_death(self, child: Child, status: int) -> None:
        name, often = child.role.name, child.failures
        ran = self._seen is not None and self._seen.status["attempt"] > 0
        if often >= HOPELESS_DEATHS and not ran:
            self.hopeless = child
        elif often < HOPELESS_DEATHS and (status or often > 1):
            self._output.say(f"{name} ended ({in_words(status)}); it is started again")
        elif often >= HOPELESS_DEATHS:
            self._complain(f"{name} ends again and again ({in_words(status)}); see {child.role.log}")

    def _complain(self, line: str) -> None:
        """Say it once."""
        if line not in self._complained:
            self._complained.add(line)
            self._output.say(line)

    def _note_owner(self) -> None:
        """Write down whose run folder this is, for `clean`: nothing may be removed while one of these lives."""
        me = processes.identify(os.getpid())
        assert me is not None
        alive = {name: child.pid for name, child in self._children.items() if child.pid is not None}
        known = {name: processes.identify(pid) for name, pid in alive.items()}
        owner = {
            **me._asdict(),
            "boot_id": processes.boot_id(),
            "run_dir": str(self.here.run_dir),
            "member": self.here.member,
            "processes": {name: process._asdict() for name, process in known.items() if process is not None},
        }
        try:
            places.write_json(self.here.run_folder / "owner.json", owner)
            places.write_json(self.here.processes / "run.json", me._asdict())
        except OSError as error:
            self._complain(f"cannot write down which processes belong to this job: {error}")

    def _kill_orphans(self, patience_s: float = ORPHAN_PATIENCE_S) -> bool:
        """End children that are not ours: what ranks of a dead keeper had started. Whether there were any.

        Some of them (multiprocessing's resource tracker) are cleaning up behind their rank, so each gets a moment.
        """
        known = {child.pid for child in self._children.values()}
        now = time.monotonic()
        self._orphans = {pid: self._orphans.get(pid, now) for pid in processes.children() if pid not in known}
        for pid, since in self._orphans.items():
            try:
                if now - since >= patience_s:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except OSError:
                continue
        return bool(self._orphans)

    # --- the job

    def _look_at_job(self) -> None:
        newest = self._poller.newest
        if newest is None or newest is self._seen:
            return
        # a thousand nodes under one `srun` must not say everything a thousand times
        for line in narrate.lines(self._seen, newest) if not self.here.member else ():
            self._output.say(line)
        self._seen = newest
        if not self._numbered and newest.status["attempt"]:
            self._numbered = tuple(node["id"] for node in newest.status["nodes"])
        for drill in list(self._drills):
            if drill.due(newest.status["step"]):
                self._drills.remove(drill)
                # those of other machines are theirs to do
                if (node := drill.name(self._numbered)) in self._plan.nodes.names:
                    self._perform(drill, node)

    def _perform(self, drill: drills.Drill, node: str) -> None:
        if not drills.first_time(drill, self.here.fired()):
            return
        self._output.say(f"drill: {drill.text}")
        if drill.kind in drills.REPORTED:
            body = {"kind": drills.REPORTED[drill.kind], "node": node, "evidence": f"drill {drill.text}"}
            try:
                self._poller.client(timeout_s=2.0).post("/v1/signals", body)
            except client.Unreachable as error:
                self._output.say(f"the drill could not be done: {error}")
            return
        # the agent first: from a machine that is gone nobody reports that its ranks are
        agent, keeper = self._children[f"agent-{node}"], self._children[f"keeper-{node}"]
        for child in (agent, keeper):
            child.take_away(drill.away_s if drill.kind == "node-loss" else 0.0)
        keeper.wait(5.0)
        self._kill_orphans(patience_s=0.0)
        if drill.kind == "wipe":
            for folder in (self.here.node_dir(node), self.here.disk_dir(node)):
                remove_tree(folder)
        self.is_gone |= agent.is_gone and node == self.here.member

    # --- the end that the user asks for

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _obey_signals(self) -> None:
        while self._signals:
            self._stops.append(self._signals.pop(0))
            grace_s = self._plan.config.grace_s
            if len(self._stops) == 1:
                self._stop_time = time.monotonic()
                name = signal.Signals(self._stops[0]).name
                self._output.say(f"{name}: stopping within {grace_s:g} s; once more ends the ranks at once")
                self._stop_deadline = time.monotonic() + grace_s + STOP_MARGIN_S
            elif len(self._stops) == 2:
                self._output.say("ending the ranks; once more gives up what is not on disk")
                self._kill_ranks()
            else:
                self._stop_deadline = time.monotonic()
        if self._stops and not self._stop_sent:
            self._stop_sent = self._ask_to_stop(self._stops[0]) or self._leave_alone()

    def _ask_to_stop(self, number: int) -> bool:
        name = signal.Signals(number).name
        try:
            # short: a controller that hangs must not keep us from the rest; the next turn asks again
            asked = self._poller.client(timeout_s=1.0)
            where = f" on {self.here.member}" if self.here.member else ""
            asked.post("/v1/stop", {"signal": number, "reason": f"stopped by {name}{where}"})
            asked.close()
        except client.Unreachable:
            return False
        return True

    def _leave_alone(self) -> bool:
        """The first node cannot be told: have the agent bring to disk what this node holds, and go."""
        if not self.here.member or time.monotonic() - self._stop_time < TELL_S:
            return False
        self._children[f"agent-{self.here.member}"].kill(signal.SIGUSR1)
        return True

    def _kill_ranks(self) -> None:
        """The keeper reports the ranks dead, the controller goes on with the checkpoint."""
        keepers = {child.pid for name, child in self._children.items() if name.startswith("keeper-")}
        for worker in self._seen.status["workers"] if self._seen is not None else ():
            if worker["pid"] and processes.parent(worker["pid"]) in keepers:
                try:
                    os.kill(worker["pid"], signal.SIGKILL)
                except OSError:
                    continue


def in_words(status: int) -> str:
    """An exit status as a person says it."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def remove_tree(folder: Path) -> None:
    """All of it, also when a process that is just ending adds a file meanwhile."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.02)
