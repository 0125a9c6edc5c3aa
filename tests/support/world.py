"""A cluster without processes: nodes that do what they are ordered to, and break when a test says so.

It stands in for agents and keepers in tests of the pure core: `World.turn()` is one round of reports, decisions and
orders, in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from evertrain.decide import (
    captures,
    changes,
    examining,
    inspection,
    ladder,
    replaying,
    rollback,
    standbys,
    starting,
)  # fmt: skip
from evertrain.decide.applying import apply
from evertrain.decide.conduct import decide
from evertrain.decide.desired import desired
from evertrain.decide.joining import Wish, admit
from evertrain.decide.picture import NodePicture, Picture, Stored
from evertrain.decide.state import JobState
from evertrain.model.activity import Operation, RankActivity
from evertrain.model.capture_records import HangLocated
from evertrain.model.change_records import VersionKept
from evertrain.model.clocks import Clock
from evertrain.model.code import Code
from evertrain.model.config import Config
from evertrain.model.copies import Backup, Copy, Failed, Part
from evertrain.model.diagnosis import Inspected, InspectOrder
from evertrain.model.records import (
    AnyRecord,
    NodeJoined,
    PolicyAdopted,
    RunStarted,
    SignalRaised,
    StopRequested,
    StoreCommitted,
    TermStarted,
)
from evertrain.model.replays import Replayed
from evertrain.model.report import (
    AttemptReport,
    Check,
    Comparison,
    Desired,
    DesiredAttempt,
    Exit,
    Identity,
    NodeReport,
    PageReport,
    RankError,
    RankReport,
    SelfCheck,
    Starter,
)
from evertrain.model.sensing import Sign
from evertrain.model.spec import Command, ControllerSpec, Seats
from evertrain.model.stacks import CaptureOrder, Located

ALLREDUCE = Operation("0", "allreduce", 7)

LOST = Exit(
    status=1,
    time=0.0,
    error=RankError(
        type="RuntimeError",
        message="[gloo/transport/tcp/pair.cc] Connection closed by peer",
        traceback='File "torch/distributed/distributed_c10d.py", line 1',
    ),
)


@dataclass
class Process:
    rank: int
    pid: int
    state: str = "waiting"
    killed: bool = False
    exit: Exit | None = None
    step: int = -1
    resumed: float = 0.0
    passed: float = 0.0
    progress: float = 0.0
    tokens: float = 0.0
    phase: str = "train"
    still_since: float | None = None
    activity: dict[str, object] = field(default_factory=dict)

    def shift(self, by_s: float) -> None:
        """As a controller whose clock is ahead by so much corrects what the agent reports."""
        self.resumed, self.passed, self.progress = (
            time and time + by_s for time in (self.resumed, self.passed, self.progress)
        )
        if self.still_since is not None:
            self.still_since += by_s
        if self.exit is not None:
            self.exit = replace(self.exit, time=self.exit.time + by_s)


@dataclass
class Held:
    """One attempt on one node."""

    processes: dict[int, Process]
    started: bool = False
    resume: int | None = None
    reached: int | None = None
    store: bool = False

    @property
    def phase(self) -> str:
        if all(process.state == "ended" for process in self.processes.values()):
            return "ended"
        return "running" if self.started else "prepared"


@dataclass
class Node:
    name: str
    keeper: Identity
    attempts: dict[int, Held] = field(default_factory=dict)
    memory: list[Copy] = field(default_factory=list)
    disk: list[Copy] = field(default_factory=list)
    connected: bool = True
    heard: NodePicture | None = None
    away: bool = False
    """The keeper is gone and has not come back yet."""
    flushed: int | None = None
    last_attempt: int = 0
    env: dict[str, str] = field(default_factory=dict)
    code: str = ""
    code_trouble: str = ""
    """Why it cannot have any version that is ordered."""
    code_failed: str = ""
    code_is_late: bool = False
    compared: tuple[Comparison, ...] = ()
    memory_is_tight: bool = False
    order: Desired | None = None
    backups: tuple[Backup, ...] = ()
    failed: tuple[Failed, ...] = ()
    self_check: SelfCheck | None = None
    disk_is_dead: bool = False
    signs: tuple[Sign, ...] = ()
    """What its own sensors report."""
    address: str = "127.0.0.1"
    unreachable: tuple[str, ...] = ()
    gpus_held: str = ""
    captured: int = 0
    inspected: Inspected | None = None
    replayed: Replayed | None = None


class World:
    """A job on `nodes` nodes of `nproc` ranks; with `seats` on one, and the others `join` it."""

    def __init__(
        self,
        nodes: int = 2,
        nproc: int = 2,
        *,
        seats: Seats | None = None,
        config: Config | None = None,
        inspect: Callable[[str, InspectOrder], Inspected | None] | None = None,
        replay: Callable[[str, DesiredAttempt], dict[int, str | Exit]] | None = None,
        **run: object,
    ) -> None:
        self.now = 1000.0
        self.config = config or Config()
        self.pids = iter(range(100, 10**9))
        names = tuple(f"node-{index}" for index in range(1 if seats is not None else nodes))
        self.nodes = {name: Node(name, Identity(next(self.pids), 1)) for name in names}
        self.spec = ControllerSpec(
            job="job", run_id="job-1", run_dir="/run", log_root="/run/logs", database="", token_file="", listen_fd=0,
            url="", nodes=names, nproc_per_node=nproc, command=Command(kind="script", target="t.py"),
        )  # fmt: skip
        self.tokens_a_step = 0.0
        self.unkillable: set[int] = set()
        """Ranks that sleep in the kernel."""
        self.fetches_fail = False
        self.saves_failed: dict[int, int] = {}
        self.losses: dict[int, float] = {}
        self.located: Located | None = Located(kind="unknown")
        """What every capture shows; None: nobody answers."""
        self.standing: tuple[int, ...] = ()
        self.orders: list[CaptureOrder] = []
        """For looks at the processes, as agents got them."""
        self.replay = replay
        """What the ranks of a node give in a replay, or how they end; a rank that is left out does not end. Without it
        the script takes no part in any."""
        self.mesh = ""
        """As agents read it off the process groups."""
        self.inspect = inspect
        """What a test comes to on a node; None: it does not end. Without it nobody can be asked for tests."""
        self.stored: tuple[Stored, ...] | None = None
        """What a look into the shared store shows; None: there is none to look into."""
        self.log: list[AnyRecord] = []
        self.state = JobState()
        started = {
            "run_id": "job-1", "nodes": names, "standby": 0, "nproc_per_node": nproc, "fresh": False,
            "start": "zygote", "command": "t.py", "seats": seats, **run,
        }  # fmt: skip
        self.write(RunStarted(time=self.now, **started))  # type: ignore[arg-type]
        self.clock = Clock("boot-1", 0.0)
        self.write(TermStarted(time=self.now, term=1, clock=self.clock))
        sources = [rung for rung in inspection.sources(self.config) if inspect is not None or rung != "inspect"]
        policy = ladder.policy_of(self.config, sources)
        self.write(PolicyAdopted(time=self.now, hash=ladder.policy_hash(policy), policy=policy))

    @property
    def run(self) -> RunStarted:
        assert self.state.run is not None
        return self.state.run

    # -- what a test does ----------------------------------------------------------------------------------------------

    def join(self, host: str) -> None:
        """`evertrain run` is called on `host`: it gets a seat, and its agent connects."""
        wish = Wish(host=host, instance=str(next(self.pids)), nproc_per_node=self.run.nproc_per_node, version="1.0")
        joined = admit(self.state, self.picture(), wish, job="job", version="1.0", now=self.now)
        assert isinstance(joined, NodeJoined), joined
        self.write(joined)
        node = self.nodes.setdefault(joined.node, Node(joined.node, Identity(next(self.pids), 1)))
        node.connected = True

    def run_again(self) -> None:
        """The same command after the job has ended: nothing but the disks is left."""
        assert self.state.ended is not None
        for node in self.nodes.values():
            self.nodes[node.name] = Node(node.name, Identity(next(self.pids), 1), disk=node.disk, connected=False)
        for name in self.run.nodes:
            self.nodes[name].connected = True
        self.write(replace(self.run, time=self.now, run_id=f"job-{next(self.pids)}"))
        self.write(TermStarted(time=self.now, term=self.state.term + 1, clock=self.clock))

    def fail(self, rank: int, status: int = -9, *, error: RankError | None = None, later: float = 0.0) -> None:
        """The running process of `rank` ends; the others lose their connection 5 ms after it."""
        self.end(rank, Exit(status=status, time=self.now + later, error=error))
        for other in self.running():
            if other != rank:
                self.end(other, Exit(status=1, time=self.now + later + 0.005, error=LOST.error))

    def end(self, rank: int, exit: Exit) -> None:
        process = self.process(rank)
        if process is not None and process.state == "running":
            process.state, process.exit = "ended", exit

    def signal(self, kind: str, node: str) -> None:
        """A sensor says something about a node."""
        self.write(SignalRaised(time=self.now, node=node, signal=kind, evidence=f"{kind} on {node} at {self.now:.0f}"))

    def sense(self, node: str, kind: str, key: str, *, time: float | None = None) -> None:
        """A sensor of the node itself reports something, until the test takes it back."""
        at = self.now if time is None else time
        sign = Sign(key=key, kind=kind, evidence=f"{kind} on {node}, seen at {at:.0f}", time=at)
        self.nodes[node].signs = (*self.nodes[node].signs, sign)

    def lose(self, name: str) -> None:
        """The machine is gone: nothing is heard of it, and the others lose their connections to its ranks."""
        self.nodes[name].connected = False
        self.lose_keeper(name)
        for rank in self.running():
            self.end(rank, Exit(status=1, time=self.now + 0.005, error=LOST.error))

    def lose_keeper(self, name: str) -> None:
        """Keeper and ranks of a node at once."""
        node = self.nodes[name]
        node.attempts.clear()
        node.away = True

    def back_up(self, step: int) -> None:
        """Every node keeps what the ranks of all others have of this step."""
        assert self.state.active is not None
        placement = self.state.placement()
        for node in self.nodes.values():
            heads = {rank: (Part(f"r{rank}", 1),) for rank, placed in placement.items() if placed != node.name}
            kept = Backup(
                attempt=self.state.active.number, step=step, world_size=len(placement), heads=heads,
                parts=tuple(part for parts in heads.values() for part in parts),
            )  # fmt: skip
            node.backups = (*node.backups, kept)

    def store(self, step: int) -> None:
        """The newest attempt's `step` gets into the shared store."""
        attempt, size, folder = self.state.attempts[-1].number, len(self.state.placement()), f"step-{step}"
        named = {"folder": folder, "attempt": attempt, "step": step, "world_size": size}
        self.write(StoreCommitted(time=self.now, url="s3://b", bytes=1, seconds=1.0, **named))  # type: ignore[arg-type]
        self.stored = (*(self.stored or ()), Stored(life=self.state.life, **named))  # type: ignore[arg-type]

    def wipe(self, name: str) -> None:
        """Keeper, ranks, memory and disk of a node; it comes back empty."""
        self.lose_keeper(name)
        node = self.nodes[name]
        node.memory, node.disk, node.backups = [], [], ()
        self.bring_back(name)

    def bring_back(self, name: str) -> None:
        node = self.nodes[name]
        if node.away:
            node.away = False
            node.keeper = Identity(next(self.pids), 1)

    def hang(self, rank: int, **activity: object) -> None:
        """From now on `rank` is outside every collective and as `activity` says; all others wait for it."""
        for other in self.running():
            process = self.process(other)
            assert process is not None
            process.still_since = self.now
            process.activity = dict(activity) if other == rank else {"inside": ALLREDUCE, "last": ALLREDUCE}

    def wake(self) -> None:
        """Whatever stood still moves again."""
        for rank in self.running():
            process = self.process(rank)
            assert process is not None
            process.still_since = None

    def activity(self, process: Process) -> RankActivity:
        assert process.still_since is not None and self.state.active is not None
        idle = {"inside": None, "last": None, "cpu_fraction": 0.0, "io_bytes_per_s": 0.0, "faults_per_s": 0.0}
        fields = {"started": True, "step_s": 0.1, **idle, **process.activity}
        node = self.state.active.started.placement[process.rank]
        return RankActivity(rank=process.rank, node=node, still_s=self.now - process.still_since, **fields)  # type: ignore[arg-type]

    def train(self, steps: int = 1) -> None:
        """Every running rank does some steps and saves each."""
        for _ in range(steps):
            self.now += 0.1
            for node in self.nodes.values():
                for number, held in node.attempts.items():
                    for process in held.processes.values():
                        if process.state == "running" and number > 0:
                            self._step(node, number, held, process)

    def stop(self, signal: int = 15) -> None:
        self.write(StopRequested(time=self.now, signal=signal, because="asked to"))

    def take_over(self, *, jump_s: float = 0.0) -> None:
        """The controller dies; another one, maybe on a machine whose clock is `jump_s` ahead, goes on from the log."""
        if jump_s:
            self.now += jump_s
            self.clock = Clock(f"boot at {self.now}", 0.0)
            for node in self.nodes.values():
                for held in node.attempts.values():
                    for process in held.processes.values():
                        process.shift(jump_s)
        for node in self.nodes.values():
            node.heard = None
        again = JobState()
        for record in self.log:
            again = apply(again, record)
        assert again == self.state
        self.write(TermStarted(time=self.now, term=self.state.term + 1, clock=self.clock))

    def capture(self, content: str = "own", *args: str) -> None:
        """The user's files are captured."""
        code = Code(digest=content, files=1, bytes=1)
        version = changes.kept_own(self.state, code, "", args, "/src", self.now)
        self.write(VersionKept(time=self.now, version=version, is_own=True))

    def change(self, content: str | None, name: str = "", *, within_s: float = 0.0, **wish: object) -> str:
        """The user has ranks run other code; `content` stands for all of it. The name of the change."""
        name = name or f"change-{len(self.state.changes) + 1}"
        code = None if content is None else Code(digest=content, files=1, bytes=1)
        fields = {"act": "update", **wish}
        wanted = changes.Wish(change=name, code=code, within_s=within_s, **fields)  # type: ignore[arg-type]
        records = changes.ask(self.state, wanted, self.now)
        assert not isinstance(records, changes.Refusal), records
        for record in records:
            self.write(record)
        return name

    # -- the machinery -------------------------------------------------------------------------------------------------

    def turn(self, seconds: float = 0.05) -> None:
        """Reports up, decisions, orders down, orders done."""
        self.now += seconds
        for _ in range(200):
            records = decide(self.state, self.picture(), self.config, self.now) or self._captured()
            if not records:
                break
            for record in records:
                self.write(record)
        else:
            raise AssertionError("the rules never come to rest")
        replays = replaying.parts(self.state, self.picture())
        for node in self.nodes.values():
            if node.connected:
                fetches = starting.fetches(self.state, self.picture(), self.config).get(node.name, ())
                check = standbys.check_number(self.state, self.picture(), node.name, self.config, self.now)
                reach = standbys.reach(self.state, self.picture(), node.name)
                node.order = desired(
                    self.state, self.picture(), self.spec, self.config, node.name,
                    fetches=fetches, check=check, reach=reach,
                    capture=captures.order(self.state, self.now),
                    inspect=inspection.order(self.state, node.name) or examining.order(self.state, node.name),
                    replay=replays.get(node.name),
                )  # fmt: skip
            if node.order is not None and not node.away:
                self._perform(node, node.order)

    def _captured(self) -> list[AnyRecord]:
        """Agents look at their processes when they are told to, and the controller says what that has shown."""
        order = captures.order(self.state, self.now)
        if order is None or self.located is None:
            return []
        if order not in self.orders:
            self.orders.append(order)
        connected = [node for node in self.nodes.values() if node.connected]
        if all(node.captured >= order.number for node in connected):
            return []
        for node in connected:
            node.captured = order.number
        asked = self.state.captures[-1].asked
        if asked.reason == "user" or (asked.series and asked.round < captures.ROUNDS):
            return []
        located = replace(self.located, captures=(*self.located.captures, order.number))
        attempt, number = order.attempt, order.number
        return [HangLocated(time=self.now, attempt=attempt, capture=number, located=located, standing=self.standing)]

    def turns(self, count: int = 8, seconds: float = 0.05) -> None:
        for _ in range(count):
            self.turn(seconds)

    def write(self, record: AnyRecord) -> None:
        self.log.append(record)
        self.state = apply(self.state, record)

    def picture(self) -> Picture:
        for node in self.nodes.values():
            before = node.heard
            if before is None and not node.connected:
                continue  # this controller has not heard it yet
            changed = before is None or before.connected != node.connected
            # of who is not heard the last report stands
            report = before.report if before is not None and not node.connected else self.report(node)
            node.heard = NodePicture(report, node.connected, self.now if before is None or changed else before.since)
        return Picture({name: node.heard for name, node in self.nodes.items() if node.heard is not None}, self.stored)

    def report(self, node: Node) -> NodeReport:
        settled = not any(
            process.state == "running"
            for number, held in node.attempts.items()
            for process in held.processes.values()
            if number > 0
        )
        return NodeReport(
            node=node.name,
            keeper=None if node.away else node.keeper,
            starter=Starter(state="ready"),
            attempts=() if node.away else tuple(self._attempt(number, held) for number, held in node.attempts.items()),
            pages=tuple(
                self._page(number, process)
                for number, held in node.attempts.items()
                if held.started and number > 0
                for process in held.processes.values()
            ),
            activities=tuple(
                self.activity(process)
                for held in node.attempts.values()
                for process in held.processes.values()
                if process.state == "running" and process.still_since is not None
            ),
            copies=(*node.memory, *node.disk),
            copies_after_attempt=node.last_attempt if settled else -1,
            env=node.env,
            code=node.code,
            code_failed=node.code_failed,
            code_problem=f"{node.name}: {node.code_trouble}" if node.code_failed else "",
            comparisons=node.compared,
            flushed_step=node.flushed,
            transfer_port=7000,
            backups=node.backups,
            failed_fetches=node.failed,
            memory_is_tight=node.memory_is_tight,
            self_check=node.self_check,
            signs=node.signs,
            address=node.address,
            unreachable=node.unreachable,
            gpus_held=node.gpus_held,
            captured=node.captured,
            inspected=node.inspected,
            replayed=node.replayed,
            mesh=self.mesh,
        )

    def running(self) -> dict[int, int]:
        """Attempt of each running rank."""
        return {
            rank: number
            for node in self.nodes.values()
            for number, held in node.attempts.items()
            for rank, process in held.processes.items()
            if process.state == "running" and number > 0
        }

    def process(self, rank: int) -> Process | None:
        active = self.state.active
        if active is None:
            return None
        held = self.nodes[active.started.placement[rank]].attempts.get(active.number)
        return held.processes.get(rank) if held is not None else None

    def _attempt(self, number: int, held: Held) -> AttemptReport:
        ranks = tuple(
            RankReport(rank=p.rank, pid=p.pid, state=p.state, killed=p.killed, exit=p.exit)  # type: ignore[arg-type]
            for p in held.processes.values()
        )
        port = 29000 + number if held.store else None
        return AttemptReport(attempt=number, phase=held.phase, ranks=ranks, store_port=port)  # type: ignore[arg-type]

    def _page(self, number: int, process: Process) -> PageReport:
        return PageReport(
            rank=process.rank, attempt=number, pid=process.pid, step=process.step if process.step >= 0 else None,
            progress_time=process.progress, resumed_time=process.resumed, passed_time=process.passed,
            passed_step=process.step if process.passed else None, phase=process.phase,
            tokens=process.tokens, saves_failed=self.saves_failed.get(process.rank, 0),
            loss=self.losses.get(process.rank), takes_replays=self.replay is not None,
        )  # fmt: skip

    def _step(self, node: Node, number: int, held: Held, process: Process) -> None:
        process.step += 1
        process.progress = self.now
        process.tokens += self.tokens_a_step
        if not process.passed and process.step > (-1 if held.reached is None else held.reached):
            process.passed = self.now
        stays = rollback.pinned(self.state)
        kept = [
            copy
            for copy in node.memory
            if copy.rank != process.rank or copy.step > process.step - 3 or copy.save == stays
        ]
        kept = [copy for copy in kept if (copy.rank, copy.step) != (process.rank, process.step)]
        node.memory = [*kept, self._copy(process.rank, process.step, number)]

    def _copy(self, rank: int, step: int, attempt: int) -> Copy:
        world_size = len(self.state.placement())
        return Copy(rank=rank, step=step, attempt=attempt, world_size=world_size, tier="memory")

    def _held(self, ranks: tuple[int, ...], *, store: bool) -> Held:
        return Held({rank: Process(rank, next(self.pids)) for rank in ranks}, store=store)

    def _perform(self, node: Node, order: Desired) -> None:
        wanted = {attempt.attempt: attempt for attempt in order.attempts}
        for number in [number for number in node.attempts if number not in wanted]:
            del node.attempts[number]
        if node.last_attempt != order.last_attempt:
            node.failed = ()
        node.last_attempt = order.last_attempt
        if order.check and (node.self_check is None or node.self_check.number != order.check):
            disk = Check(name="disk", passed=not node.disk_is_dead, detail="read-only" if node.disk_is_dead else "")
            node.self_check = SelfCheck(number=order.check, checks=(disk,))
        wanted_test = order.inspect
        if wanted_test is None or not wanted_test.program:
            node.inspected = None
        elif self.inspect is not None:
            assert not any(held.phase == "running" for held in node.attempts.values()), "only stopped nodes are tested"
            if node.inspected is None or node.inspected.number != wanted_test.number:
                node.inspected = self.inspect(node.name, wanted_test)
        for fetch in order.fetches:
            if self.fetches_fail:
                named = {"rank": fetch.rank, "attempt": fetch.attempt, "step": fetch.step}
                node.failed = (*node.failed, Failed(**named, because="its parts are damaged"))  # type: ignore[arg-type]
            else:
                node.memory.append(self._copy(fetch.rank, fetch.step, fetch.attempt))
        code = order.code.digest if order.code is not None else ""
        node.code_failed = code if code and node.code_trouble else ""
        has_it = not node.code_failed and not (code and node.code_is_late)
        if has_it and (node.env, node.code) != (order.env, code):
            # the keeper starts anew what waits
            node.env, node.code = order.env, code
            for number in [number for number, held in node.attempts.items() if not held.started]:
                node.attempts[number] = self._held(order.ranks, store=node.attempts[number].store)
        for number, attempt in wanted.items():
            held = node.attempts.get(number)
            if attempt.phase == "prepare" and held is None:
                node.attempts[number] = self._held(attempt.ranks, store=attempt.store)
            elif attempt.phase == "prepare" and held is not None and tuple(held.processes) != attempt.ranks:
                del node.attempts[number]  # it holds the wrong ones, and is prepared anew
            elif attempt.phase == "go" and held is not None and not held.started:
                assert attempt.go is not None
                assert node.code == self.state.attempts[-1].started.code, "what waits here is of another version"
                assert tuple(held.processes) == attempt.ranks, "a keeper refuses to start ranks that it does not hold"
                held.started, held.resume, held.reached = True, attempt.go.resume, attempt.go.reached
                for process in held.processes.values():
                    process.state, process.resumed = "running", self.now
                    process.step = -1 if attempt.go.resume is None else attempt.go.resume
                if number < 0:
                    self._replay(node, attempt, held)
            elif attempt.phase == "end" and held is not None:
                for process in held.processes.values():
                    if process.rank in self.unkillable:
                        process.state = "stuck"
                    elif process.state != "ended":
                        process.state, process.killed = "ended", True
                        process.exit = Exit(status=-attempt.signal, time=self.now)
        if not any(number < 0 for number in wanted):
            node.replayed = None
        if order.flush_step is not None:
            fresh = [copy for copy in node.memory if copy.step == order.flush_step]
            node.disk = [replace(copy, tier="disk") for copy in fresh]
            node.flushed = order.flush_step

    def _replay(self, node: Node, attempt: DesiredAttempt, held: Held) -> None:
        assert self.replay is not None and attempt.go is not None and attempt.go.replay is not None
        assert not self.running(), "only stopped nodes replay"
        assert (attempt.go.resume, attempt.go.faults) == (None, ())
        given = self.replay(node.name, attempt)
        for rank, came in given.items():
            if isinstance(came, Exit):
                held.processes[rank].state, held.processes[rank].exit = "ended", came
        digests = {rank: came for rank, came in given.items() if isinstance(came, str)}
        node.replayed = Replayed(round=-attempt.attempt, digests=digests)


def training(**options: Any) -> World:
    """A job that has done some steps."""
    world = World(**options)
    world.turns()
    world.train(5)
    world.turn()
    return world
