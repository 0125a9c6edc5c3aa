"""Jobs in virtual time: what their ranks' rings would hold, by their program, the machine below it, and a fault.

Programs are 3-D training: pipeline stages send to each other, tensor-parallel pairs reduce, data-parallel ones gather
and reduce. Every rank has a clock of its own. The records are as on a node; what is made of them is the real code.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evertrain.detect.collectives import Alarm, Trigger
from evertrain.locate.parallel import line
from evertrain.locate.sampling import sample
from evertrain.model.collectives import Communicator, NodeTrace, Pulse
from evertrain.trace import layout
from evertrain.trace.summary import Look, Pulses, Records, rank_trace

NS = 1e9
SENT = 500_000
"""Bytes from a rank to a peer in 100 ms."""
FOREVER = math.inf


@dataclass(frozen=True)
class Do:
    """One instruction of a rank's program."""

    what: str
    """own, a collective's name, send, recv, irecv, wait, recv_any_source, step"""
    group: str = ""
    peer: int = -1
    seconds: float = 0.0
    size: int = 1 << 20
    tag: str = ""
    wait: bool = True
    """Whether a collective is waited for in Python: else its end is polled."""


@dataclass
class Operation:
    """As one rank sees it, in true time."""

    op: str
    comm: str
    seq: int
    peer: int
    size: int
    posted: float
    wait: float
    done: float = FOREVER
    seen: str = "wait"


@dataclass
class Fault:
    """What is changed, from `start` on (and until `stop`). Functions get the time and what it usually takes."""

    start: float = FOREVER
    stop: float = FOREVER
    ranks: tuple[int, ...] = ()
    own: Callable[[float, float, str], float] | None = None
    """Own time of the ranks (seconds, usual, tag of the instruction)."""
    transfer: Callable[[float], float] | None = None
    """Time of transfers in which one of the ranks takes part and which go over its link."""
    link: tuple[int, int] | None = None
    """Only transfers between these two."""
    host: dict[str, Any] = field(default_factory=dict)
    """Values of host records of the ranks,"""
    flow: dict[str, Any] = field(default_factory=dict)
    """... of flow records from the ranks,"""
    flow_to: dict[str, Any] = field(default_factory=dict)
    """... and of those to them."""

    def holds(self, time: float) -> bool:
        return self.start <= time < self.stop


class Job:
    """8 ranks unless told otherwise; `run` plays so many seconds."""

    def __init__(
        self,
        mesh: Mapping[str, int] | None = None,
        *,
        seed: int = 1,
        fault: Fault | None = None,
        noise: float = 0.05,
        skew_s: float = 0.0,
        program: Callable[[Job, int, int], list[Do]] | None = None,
        groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
        polled: bool = False,
    ) -> None:
        self.mesh = dict(mesh or {"pp": 2, "dp": 2, "tp": 2})
        self.size = math.prod(self.mesh.values())
        self.random = random.Random(seed)
        self.fault = fault or Fault()
        self.noise = noise
        self.polled = polled
        self.program = program or training
        self.offsets = [1e6 + self.random.uniform(-skew_s, skew_s) for _ in range(self.size)]
        self.groups: dict[tuple[str, int], str] = {}
        self.members: dict[str, tuple[int, ...]] = {}
        named = groups or {dim: sorted({line(self.mesh, rank, dim) for rank in range(self.size)}) for dim in self.mesh}
        for dim, lines in named.items():
            for ranks in lines:
                comm = f"{layout.communicator_id(1, f'{dim}{ranks[0]}', ranks):016x}"
                self.members[comm] = tuple(ranks)
                for rank in ranks:
                    self.groups[dim, rank] = comm
        self.names = {comm: dim for (dim, _), comm in self.groups.items()}
        self.operations: list[list[Operation]] = [[] for _ in range(self.size)]
        self.step_times: list[list[float]] = [[] for _ in range(self.size)]

    # --- playing

    def run(self, seconds: float) -> Job:
        """Each rank goes through its program; whoever waits for others goes on when all have come."""
        self.seconds = seconds
        clocks = [0.0] * self.size
        programs: list[Iterator[Do]] = [self._endless(rank) for rank in range(self.size)]
        counters: list[dict[tuple[str, int, int], int]] = [defaultdict(int) for _ in range(self.size)]
        waiting: dict[tuple[str, int, int, int], list[tuple[int, Operation]]] = defaultdict(list)
        posted: list[dict[int, tuple[tuple[str, int, int, int], Operation]]] = [{} for _ in range(self.size)]
        ready = deque(range(self.size))
        asleep: dict[int, Operation] = {}
        anybody: dict[str, deque[tuple[int, Operation]]] = defaultdict(deque)

        def complete(key: tuple[str, int, int, int]) -> None:
            comm, _, source, target = key
            there = waiting[key]
            needed = (source, target) if target >= 0 else self.members[comm]
            if {rank for rank, _ in there} != set(needed):
                return
            come = max(op.posted for _, op in there)
            ends = come + self._transfer(come, there[0][1], needed)
            for rank, op in there:
                op.done = max(ends, op.wait) if op.wait else ends
                if rank in asleep and asleep[rank] is op and op.done < FOREVER:
                    del asleep[rank]
                    clocks[rank] = op.done
                    ready.append(rank)
            del waiting[key]

        while ready:
            rank = ready.popleft()
            while clocks[rank] < seconds:
                one = next(programs[rank])
                now = clocks[rank]
                if one.what == "own":
                    clocks[rank] += self._own(rank, now, one)
                    continue
                if one.what == "step":
                    self.step_times[rank].append(now)
                    continue
                if one.what == "wait":
                    key, op = posted[rank].pop(one.peer)
                    op.wait = now
                    if op.done < FOREVER:
                        op.done = clocks[rank] = max(op.done, now)
                        continue
                    asleep[rank] = op
                    complete(key)
                    break
                comm = self.groups[one.group, rank]
                source, target = -1, -1
                if one.what == "send":
                    source, target = rank, one.peer
                elif one.what in ("recv", "irecv"):
                    source, target = one.peer, rank
                op_name = "recv" if one.what == "irecv" else one.what
                if one.what == "recv_any_source":
                    counters[rank][comm, -2, rank] += 1
                    op = Operation(op_name, comm, counters[rank][comm, -2, rank], -2, one.size, now, now)
                    self.operations[rank].append(op)
                    anybody[f"{comm}-{rank}"].append((rank, op))
                    asleep[rank] = op
                    break
                counters[rank][comm, source, target] += 1
                seq = counters[rank][comm, source, target]
                is_async = one.what == "irecv" or (not one.wait and target < 0)
                seen = "poll" if (self.polled or not one.wait) and target < 0 else "wait"
                op = Operation(op_name, comm, seq, one.peer, one.size, now, 0.0 if is_async or seen == "poll" else now)
                op.seen = seen
                self.operations[rank].append(op)
                key = (comm, seq, source, target)
                waiting[key].append((rank, op))
                if is_async:
                    posted[rank][one.peer] = (key, op)
                    if target < 0 or self._is_there(waiting[key], source, target):
                        complete(key)
                    continue
                asleep[rank] = op
                complete(key)
                break
        return self

    def _is_there(self, there: list[tuple[int, Operation]], source: int, target: int) -> bool:
        return {rank for rank, _ in there} == {source, target}

    def _endless(self, rank: int) -> Iterator[Do]:
        step = 0
        while True:
            yield from self.program(self, rank, step)
            yield Do("step")
            step += 1

    def _own(self, rank: int, now: float, one: Do) -> float:
        usual = one.seconds * math.exp(self.random.gauss(0, self.noise))
        fault = self.fault
        if fault.own is not None and rank in fault.ranks and fault.holds(now + usual):
            return fault.own(now, usual, one.tag)
        return usual

    def _transfer(self, now: float, one: Operation, members: Sequence[int]) -> float:
        usual = (0.0005 + one.size / 4e8) * math.exp(self.random.gauss(0, self.noise))
        fault = self.fault
        if fault.transfer is None or not fault.holds(now):
            return usual
        if fault.link is not None:
            return fault.transfer(usual) if set(fault.link) <= set(members) else usual
        return fault.transfer(usual) if set(fault.ranks) & set(members) else usual

    # --- what the rings hold

    def records(self, rank: int, at: float) -> Records:
        """Of one rank at a moment, by the clock of its node."""
        done = [one for one in self.operations[rank] if one.done <= at]
        still = [one for one in self.operations[rank] if one.posted <= at < one.done]
        blocked = [one for one in still if one.wait and one.wait <= at]
        table = np.concatenate((self._rows(rank, blocked, "blocked", at), self._rows(rank, still, "state", at)))
        return Records(self._rows(rank, done, "done", at), table, self._host(rank, at), self._flow(rank, at))

    def ns(self, rank: int, time: float) -> int:
        return int((time + self.offsets[rank]) * NS)

    def _rows(self, rank: int, found: Sequence[Operation], kind: str, at: float) -> Any:
        rows = np.zeros(len(found), layout.dtype("operation"))
        rows["kind"], rows["rank"] = layout.KINDS[kind], rank
        columns = [
            (
                one.peer, layout.OPS.index(one.op), int(one.comm, 16), one.seq, one.size,
                layout.POINT_TO_POINT if one.op.startswith(("send", "recv")) else 0,
                self.ns(rank, one.posted), self.ns(rank, one.wait) if one.wait and one.wait <= at else 0,
                self.ns(rank, one.done) if kind == "done" else 0, layout.SEEN[one.seen] if kind == "done" else 0,
            )
            for one in found
        ]  # fmt: skip
        names = ("peer", "op", "comm", "seq", "bytes", "flags", "t_posted", "t_wait", "t_done", "seen")
        for name, column in zip(names, zip(*columns, strict=True), strict=False):
            rows[name] = np.array(column, rows.dtype[name])
        return rows

    def _ticks(self, at: float, back: float = 40.0) -> Any:
        return np.arange(max(0.1, at - back), at, 0.1)

    def _host(self, rank: int, at: float) -> Any:
        ticks = self._ticks(at)
        rows = np.zeros(len(ticks), layout.dtype("host"))
        rows["kind"], rows["rank"], rows["state"], rows["carrier"] = layout.KINDS["host"], rank, ord("S"), 1
        rows["t"] = [self.ns(rank, tick) for tick in ticks]
        rows["dt_us"], rows["cpu_us"], rows["delay_us"] = 100_000, 5_000, 2_000
        rows["wire_bytes"] = int(1.05 * 2 * SENT * len(self._peers(rank)))
        if rank in self.fault.ranks:
            self._change(rows, ticks, self.fault.host)
        return rows

    def _peers(self, rank: int) -> list[int]:
        mine = [comm for (_, one), comm in self.groups.items() if one == rank]
        return sorted({other for comm in mine for other in self.members[comm]} - {rank})

    def _flow(self, rank: int, at: float) -> Any:
        ticks = self._ticks(at)
        found = []
        for peer in self._peers(rank):
            rows = np.zeros(len(ticks), layout.dtype("flow"))
            rows["kind"], rows["rank"], rows["peer"], rows["inode"] = layout.KINDS["flow"], rank, peer, 100 + peer
            rows["t"] = [self.ns(rank, tick) for tick in ticks]
            rows["dt_us"], rows["sent"], rows["acked"] = 100_000, SENT, SENT
            rows["busy_us"], rows["notsent"] = 15_000, 4_000
            mine = rank in self.fault.ranks and (self.fault.link is None or peer in self.fault.link)
            theirs = peer in self.fault.ranks and (self.fault.link is None or rank in self.fault.link)
            if mine:
                self._change(rows, ticks, self.fault.flow)
            if theirs:
                self._change(rows, ticks, self.fault.flow_to)
            found.append(rows)
        rows = np.concatenate(found) if found else np.zeros(0, layout.dtype("flow"))
        return rows[np.argsort(rows["t"], kind="stable")]

    def _change(self, rows: Any, ticks: Any, values: Mapping[str, Any]) -> None:
        for at, tick in enumerate(ticks):
            if self.fault.holds(float(tick)):
                for name, value in values.items():
                    rows[name][at] = value(at) if callable(value) else value

    # --- what agents make of them

    def communicators(self) -> tuple[Communicator, ...]:
        return tuple(Communicator(comm, comm[:4], self.names[comm], ranks) for comm, ranks in self.members.items())

    def look(
        self, at: float, *, now_s: float = 3.0, before_s: float = 12.0, blind: Mapping[int, str] | None = None
    ) -> list[NodeTrace]:
        """Of each node; a node has one rank."""
        found = []
        for rank in range(self.size):
            steps = [self.ns(rank, one) for one in self.step_times[rank] if one <= at]
            trace = rank_trace(
                rank, f"node-{rank}", self.records(rank, at), Look(self.ns(rank, at), now_s, before_s), step_times=steps
            )
            found.append(
                NodeTrace(
                    number=1, attempt=1, node=f"node-{rank}", time=at + self.offsets[rank], ranks=(trace,),
                    communicators=self.communicators() if rank == 0 else (),
                )
            )  # fmt: skip
        return found

    def pulses(self, ranks: Sequence[int], until: float, since: float = 0.0) -> Iterator[tuple[float, list[Pulse]]]:
        """Second by second."""
        made = {rank: Pulses(rank, 1) for rank in ranks}
        whole = {rank: self._quick(rank) for rank in ranks}
        second = int(since)
        while second + 1 <= until:
            second += 1
            found = []
            for rank in ranks:
                start, end = self.ns(rank, second - 1), self.ns(rank, second)
                records = self._second(whole[rank], start, end)
                found.append(made[rank].take(records, start, end))
            yield float(second), found

    def _quick(self, rank: int) -> Any:
        done = [one for one in self.operations[rank] if one.done < FOREVER]
        late = [one for one in self.operations[rank] if one.done == FOREVER]
        return self._rows(rank, done, "done", FOREVER), self._rows(rank, late, "blocked", FOREVER)

    def _second(self, whole: Any, start: int, end: int) -> Records:
        done, never = whole
        ended = done[(done["t_done"] > start) & (done["t_done"] <= end)]
        is_open = (done["t_posted"] <= end) & (done["t_done"] > end) & (done["t_wait"] > 0) & (done["t_wait"] <= end)
        table = np.concatenate((done[is_open], never[never["t_posted"] <= end])).astype(layout.dtype("operation"))
        table["kind"] = layout.KINDS["blocked"]
        none = np.zeros(0, layout.dtype("host"))
        return Records(ended, table, none, np.zeros(0, layout.dtype("flow")))

    def first_alarm(self, until: float, *, watched: Sequence[int] | None = None) -> tuple[float, Alarm] | None:
        trigger = Trigger()
        ranks = watched if watched is not None else sample(self.size, self.mesh, 0, range(self.size))
        for now, pulses in self.pulses(ranks, until):
            if (alarm := trigger.take(pulses, now)) is not None:
                return now, alarm
        return None


def training(job: Job, rank: int, step: int) -> list[Do]:
    """Some 260 ms: forward and backward of two micro-batches through the stages; data-parallel around them."""
    del step
    stages = line(job.mesh, rank, "pp") if "pp" in job.mesh else (rank,)
    at = stages.index(rank)
    before = stages[at - 1] if at > 0 else None
    after = stages[at + 1] if at + 1 < len(stages) else None
    found = [Do("own", seconds=0.01, tag="load"), Do("all_gather_into_tensor", "dp", size=1 << 19)]
    for direction in ("forward", "backward"):
        takes_from, gives_to = (before, after) if direction == "forward" else (after, before)
        for _ in range(2):
            if takes_from is not None:
                found.append(Do("recv", "pp", takes_from, size=1 << 17))
            found.append(Do("own", seconds=0.018, tag=direction))
            if "tp" in job.mesh:
                found.append(Do("all_reduce", "tp", size=1 << 17))
            found.append(Do("own", seconds=0.018, tag=direction))
            if "tp" in job.mesh:
                found.append(Do("all_reduce", "tp", size=1 << 17))
            if gives_to is not None:
                found.append(Do("send", "pp", gives_to, size=1 << 17))
    return [*found, Do("reduce_scatter_tensor", "dp", size=1 << 19), Do("own", seconds=0.01, tag="optimizer")]
