"""What do the records of one rank come to? A second for the trigger, or all that the search for a root cause needs.

The records of a rank lie on its node and stay there; what leaves it is this. All times are by the node's monotonic
clock, and only durations are told.

A rank is blocked from the moment it waits for an operation until that ends. C++ (DDP, FSDP2, functional collectives)
waits without saying so: there a collective whose end was only polled counts as waited for since it was posted. That
makes a rank's own time too short, but by the same for all; who comes late has posted late.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from evertrain.model.collectives import (
    ANYBODY,
    NOBODY,
    Call,
    Ended,
    Flow,
    Host,
    Kind,
    Period,
    ProcessState,
    Progress,
    Pulse,
    RankTrace,
    Stream,
)
from evertrain.trace import layout

Rows = npt.NDArray[Any]

_NS = 1e9
_POLLED = (layout.SEEN["poll"], layout.SEEN["callback"])
_SEND, _RECV, _RECV_ANY = (layout.OPS.index(name) for name in ("send", "recv", "recv_any_source"))
_STATES: dict[str, ProcessState] = {
    "T": "stopped", "t": "stopped", "D": "uninterruptible", "Z": "ended", "X": "ended",
}  # fmt: skip
_LATELY_S = 1.05
"""Of a process with many threads it is seen twice a second what it has used."""
_IDLE_CORES = 0.1


class Records(NamedTuple):
    """Of one rank, as `layout.dtype` has them, oldest first."""

    done: Rows
    table: Rows
    """Places in use: what it is blocked in, and what is in flight."""
    host: Rows
    flow: Rows


def empty() -> Records:
    operations = np.zeros(0, layout.dtype("operation"))
    return Records(operations, operations, np.zeros(0, layout.dtype("host")), np.zeros(0, layout.dtype("flow")))


# -- a second ----------------------------------------------------------------------------------------------------------


class Pulses:
    """Of one rank, second by second."""

    def __init__(self, rank: int, attempt: int) -> None:
        self._rank, self._attempt = rank, attempt
        self._last: dict[tuple[int, int, int], int] = {}
        self._last_any = 0

    def take(self, records: Records, start_ns: int, end_ns: int, phase: str = "") -> Pulse:
        """The second (or whatever it has become) between these; each operation that has ended is counted once."""
        done = _ended(records.done)
        done = done[(done["t_done"] > max(start_ns, self._last_any)) & (done["t_done"] <= end_ns)]
        done = done[np.argsort(done["t_done"], kind="stable")]
        ends: dict[tuple[int, int, int], list[int]] = {}
        columns = (done[name].tolist() for name in ("comm", "op", "bytes", "t_done"))
        longest = waited = 0
        for comm, op, size, t_done, began in zip(*columns, _blocked(done)[0].tolist(), strict=True):
            ends.setdefault((comm, op, size.bit_length()), []).append(t_done)
            if self._last_any:
                longest = max(longest, t_done - self._last_any)
                waited = max(waited, t_done - max(began, self._last_any))
            self._last_any = t_done
        streams = []
        for key, times in ends.items():
            before = self._last.get(key)
            count = len(times) if before is not None else len(times) - 1
            first = before if before is not None else times[0]
            self._last[key] = times[-1]
            if count:
                interval_s = (times[-1] - first) / count / _NS
                streams.append(Stream(_comm(key[0]), layout.OPS[key[1]], key[2], count, interval_s))
        return Pulse(
            rank=self._rank,
            attempt=self._attempt,
            number=end_ns // 1_000_000,
            streams=tuple(streams),
            longest_s=longest / _NS,
            waited_s=waited / _NS,
            still_s=(end_ns - self._last_any) / _NS if self._last_any else None,
            in_flight=_waits(records.table),
            phase=phase,
        )


# -- a look ------------------------------------------------------------------------------------------------------------


class Look(NamedTuple):
    """When, and how far back."""

    at_ns: int
    now_s: float
    before_s: float
    most: int = 256
    """Operations of a period that are told one by one."""


def rank_trace(rank: int, node: str, records: Records, look: Look, *, step_times: Sequence[int] = ()) -> RankTrace:
    """`step_times`: when its last steps were over."""
    done = _ended(records.done)
    done = done[done["t_done"] <= look.at_ns]
    starts, ends = _blocked(done)
    order = np.argsort(starts, kind="stable")
    done, starts, ends = done[order], starts[order], ends[order]
    until = np.maximum.accumulate(ends) if len(ends) else ends
    # what was blocked until then, and the time that the rank had for itself after it
    own = np.maximum(starts - np.concatenate((starts[:1], until[:-1])), 0) if len(ends) else starts
    order = np.argsort(done["t_done"], kind="stable")
    done, starts, own = done[order], starts[order], own[order]
    between = _between(starts, own, step_times)
    split = look.at_ns - int(look.now_s * _NS)
    first = split - int(look.before_s * _NS)
    kinds = _Kinds(rank)
    t_done = done["t_done"].astype(np.int64)
    at, cut = (int(np.searchsorted(t_done, one, side="right")) for one in (first, split))
    period = _Periods(done, starts, own, between, kinds, look)
    host, flow = records.host, records.flow
    now = period.cut(max(cut, 1), len(done), _host(host, split, look.at_ns), _flows(flow, split, look.at_ns))
    before = period.cut(max(at, 1), cut, _host(host, first, split), _flows(flow, first, split))
    blocked = _blocked_in(records, look.at_ns)
    last_end = int(until[-1]) if len(until) else 0
    posted = _posted(done, records.table)
    return RankTrace(
        rank=rank,
        node=node,
        state=_state(host),
        blocked=blocked,
        own_s=(look.at_ns - last_end) / _NS if blocked is None and last_end else 0.0,
        still_s=(look.at_ns - int(t_done[-1])) / _NS if len(t_done) else None,
        is_between=bool(step_times) and posted <= step_times[-1],
        in_flight=tuple(
            _call(one, look.at_ns, since="t_posted") for one in records.table[_kind(records.table, "state")]
        ),
        progress=_progress(rank, done, records.table),
        kinds=kinds.kinds(),
        now=now,
        before=before,
    )


class _Kinds:
    """Numbers the kinds of operations of a rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._numbers: dict[tuple[int, int, int, int], int] = {}

    def number(self, comm: int, op: int, size: int, peer: int) -> int:
        return self._numbers.setdefault((comm, op, size.bit_length(), peer), len(self._numbers))

    def kinds(self) -> tuple[Kind, ...]:
        return tuple(
            Kind(_comm(comm), layout.OPS[op], bucket, peer if peer != layout.ANYBODY else ANYBODY)
            for comm, op, bucket, peer in self._numbers
        )


class _Periods:
    """Cuts them out of a rank's operations, which are in the order of their ends."""

    def __init__(self, done: Rows, starts: Rows, own: Rows, between: Rows, kinds: _Kinds, look: Look) -> None:
        self._done, self._starts, self._own, self._between = done, starts, own, between
        self._kinds, self._look = kinds, look

    def cut(self, start: int, stop: int, host: Host | None, flows: tuple[Flow, ...]) -> Period:
        """From the end of the operation before `start` on; so a period needs one before it."""
        if start < 1 or stop <= start:
            return Period(host=host, flows=flows)
        t_done = self._done["t_done"]
        return Period(
            seconds=(int(t_done[stop - 1]) - int(t_done[start - 1])) / _NS,
            ended=stop - start,
            own_s=float(self._own[start:stop].sum()) / _NS,
            between_s=float(self._between[start:stop].sum()) / _NS,
            operations=self._told(start, stop),
            host=host,
            flows=flows,
        )

    def _told(self, start: int, stop: int) -> Ended:
        rows = np.arange(start, stop)
        divisor = 1
        while len(rows) > divisor * self._look.most:
            divisor *= 2
        if divisor > 1:
            # numbers are mixed first: a step may have as many operations of a group as the divisor, or a part of it
            mixed = (self._done["seq"][rows] * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)
            rows = rows[mixed % np.uint64(divisor) == 0]
        done, starts = self._done[rows], self._starts[rows]
        begun = np.where(_is_transfer(done), starts, done["t_posted"].astype(np.int64))
        t_done = done["t_done"].astype(np.int64)
        columns = (done[name].tolist() for name in ("comm", "op", "bytes", "peer"))
        return Ended(
            kind=tuple(self._kinds.number(*one) for one in zip(*columns, strict=True)),
            seq=tuple(done["seq"].tolist()),
            took_s=_seconds(t_done - begun),
            own_s=_seconds(self._own[rows]),
            ago_s=_seconds(self._look.at_ns - t_done),
        )


def _between(starts: Rows, own: Rows, step_times: Sequence[int]) -> Rows:
    """Of the time that a rank had for itself, those stretches in which a step ended."""
    found = np.zeros_like(own)
    for time in step_times:
        around = np.flatnonzero((starts >= time) & (starts - own <= time) & (own > 0))
        if len(around):
            found[around[0]] = own[around[0]]
    return found


def _blocked(done: Rows) -> tuple[Rows, Rows]:
    """From when until when the rank was blocked in each operation."""
    t_done = done["t_done"].astype(np.int64)
    t_wait = done["t_wait"].astype(np.int64)
    t_posted = done["t_posted"].astype(np.int64)
    polled = np.isin(done["seen"], _POLLED) & ~_is_transfer(done)
    starts = np.where(t_wait > 0, t_wait, np.where(polled, t_posted, t_done))
    return np.minimum(starts, t_done), t_done


def _blocked_in(records: Records, at_ns: int) -> Call | None:
    table = records.table
    if len(said := table[_kind(table, "blocked")]):
        return _call(said[0], at_ns, since="t_wait")
    waiting = table[_kind(table, "state") & ~_is_transfer(table) & ((table["flags"] & layout.POSTED_ONLY) == 0)]
    if not len(waiting) or _cores(records.host) > _IDLE_CORES:
        return None
    oldest = waiting[np.argmin(waiting["t_posted"])]
    return _call(oldest, at_ns, since="t_posted", is_sure=False)


def _call(one: Any, at_ns: int, *, since: str, is_sure: bool = True) -> Call:
    begun = int(one[since]) or int(one["t_posted"])
    return Call(
        comm=_comm(int(one["comm"])),
        op=layout.OPS[int(one["op"])],
        seq=int(one["seq"]),
        peer=int(one["peer"]),
        seconds=max(0.0, (at_ns - begun) / _NS),
        is_sure=is_sure,
    )


def _progress(rank: int, done: Rows, table: Rows) -> tuple[Progress, ...]:
    """The newest numbers, by communicator, and of transfers by source and target."""
    found: dict[tuple[int, int, int], list[int]] = {}
    for rows, ended in ((done, True), (table[_kind(table, "state") | _kind(table, "blocked")], False)):
        columns = (rows[name].tolist() for name in ("comm", "seq", "op", "peer"))
        for comm, seq, op, peer in zip(*columns, strict=True):
            source, target = NOBODY, NOBODY
            if op == _SEND:
                source, target = rank, peer
            elif op in (_RECV, _RECV_ANY):
                source, target = peer, rank
            newest = found.setdefault((comm, source, target), [0, 0])
            newest[0] = max(newest[0], seq)
            if ended:
                newest[1] = max(newest[1], seq)
    return tuple(
        Progress(_comm(comm), posted, ended, source, target)
        for (comm, source, target), (posted, ended) in found.items()
    )


def _posted(done: Rows, table: Rows) -> int:
    """When the newest operation was posted."""
    return max((int(rows["t_posted"].max()) for rows in (done, table) if len(rows)), default=0)


# -- the process and its connections -----------------------------------------------------------------------------------


def _host(rows: Rows, start_ns: int, end_ns: int) -> Host | None:
    rows = _within(rows, start_ns, end_ns)
    if not len(rows):
        return None
    letters = [chr(one) for one in rows["state"].tolist()]

    def total(name: str) -> int:
        return int(rows[name][rows[name] != layout.UNSEEN].sum())

    return Host(
        seconds=total("dt_us") / 1e6,
        samples=len(rows),
        stopped=sum(_STATES.get(one) == "stopped" for one in letters),
        frozen=int((rows["frozen"] == 1).sum()),
        uninterruptible=sum(_STATES.get(one) == "uninterruptible" for one in letters),
        carrier_down=int((rows["carrier"] == 0).sum()),
        cpu_s=total("cpu_us") / 1e6,
        delay_s=total("delay_us") / 1e6,
        throttled_s=total("throttled_us") / 1e6,
        wire_bytes=total("wire_bytes"),
    )


def _state(rows: Rows) -> ProcessState:
    """As it was seen last."""
    if not len(rows):
        return ""
    if int(rows["frozen"][-1]) == 1:
        return "frozen"
    return _STATES.get(chr(int(rows["state"][-1])), "")


def _cores(rows: Rows) -> float:
    """That it has used lately."""
    if not len(rows):
        return 0.0
    rows = _within(rows, int(rows["t"][-1]) - int(_LATELY_S * _NS), int(rows["t"][-1]))
    used = rows["cpu_us"][rows["cpu_us"] != layout.UNSEEN]
    return float(used.sum()) / max(float(rows["dt_us"].sum()), 1.0)


def _flows(rows: Rows, start_ns: int, end_ns: int) -> tuple[Flow, ...]:
    rows = _within(rows, start_ns, end_ns)
    found = []
    for peer, inode in sorted(set(zip(rows["peer"].tolist(), rows["inode"].tolist(), strict=True))):
        one = rows[(rows["peer"] == peer) & (rows["inode"] == inode)]
        over = float(max(int(one["dt_us"].sum()), 1))
        found.append(
            Flow(
                peer=peer,
                inode=inode,
                seconds=over / 1e6,
                sent=int(one["sent"].sum()),
                acked=int(one["acked"].sum()),
                resent=int(one["resent"].sum()),
                notsent=int((one["notsent"].astype(np.float64) * one["dt_us"]).sum() / over),
                busy=min(1.0, float(one["busy_us"].sum()) / over),
                rwnd=min(1.0, float(one["rwnd_us"].sum()) / over),
                rqueue=int(one["rqueue"][-1]),
                backoff=int(one["backoff"].max()),
            )
        )
    return by_peer(found)


def by_peer(flows: Iterable[Flow]) -> tuple[Flow, ...]:
    """Several connections to one peer carry what they carry together, and are as busy as the busiest. Those to nobody
    that is known stay by themselves."""
    known: dict[int, Flow] = {}
    unknown = []
    for flow in flows:
        if flow.peer < 0:
            unknown.append(flow)
        else:
            known[flow.peer] = _together(known[flow.peer], flow) if flow.peer in known else flow
    return (*known.values(), *unknown)


def _together(one: Flow, other: Flow) -> Flow:
    return Flow(
        peer=one.peer,
        seconds=max(one.seconds, other.seconds),
        sent=one.sent + other.sent,
        acked=one.acked + other.acked,
        resent=one.resent + other.resent,
        notsent=one.notsent + other.notsent,
        busy=max(one.busy, other.busy),
        rwnd=max(one.rwnd, other.rwnd),
        rqueue=one.rqueue + other.rqueue,
        backoff=max(one.backoff, other.backoff),
    )


# -- small things ------------------------------------------------------------------------------------------------------


def _waits(table: Rows) -> bool:
    is_posted = (_is_transfer(table) & (table["t_wait"] == 0)) | ((table["flags"] & layout.POSTED_ONLY) != 0)
    return bool((_kind(table, "blocked") | (_kind(table, "state") & ~is_posted)).any())


def _ended(done: Rows) -> Rows:
    found: Rows = done[(done["t_done"] > 0) & ((done["flags"] & layout.POSTED_ONLY) == 0)]
    return found


def _is_transfer(rows: Rows) -> Rows:
    found: Rows = (rows["flags"] & layout.POINT_TO_POINT) != 0
    return found


def _kind(rows: Rows, name: str) -> Rows:
    found: Rows = rows["kind"] == layout.KINDS[name]
    return found


def _within(rows: Rows, start_ns: int, end_ns: int) -> Rows:
    found: Rows = rows[(rows["t"] > max(start_ns, 0)) & (rows["t"] <= max(end_ns, 0))]
    return found


def _seconds(nanoseconds: Rows) -> tuple[float, ...]:
    return tuple((np.maximum(nanoseconds, 0) / _NS).round(6).tolist())


def _comm(number: int) -> str:
    return f"{number:016x}"
