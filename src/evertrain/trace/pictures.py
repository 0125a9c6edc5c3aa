"""What was in flight at each moment? Pictures for `locate.nccl_heads`, from the records of all ranks.

`of_nccl` reads what the profiler plugin has written, `of_tcp` what agents have seen of connections: the same pictures,
so that the same rules find who holds a collective up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
from msgspec import Struct

from evertrain.model.tracing import FlowState, Head, OperationState, Picture, Side, ThreadState, Transport
from evertrain.trace import layout
from evertrain.trace.reading import Records

STEP_S = 0.1
_REPEATED_S = 1.3
"""A state that does not change is written once a second; one that is older than this is of something that is gone."""
_THREAD_S = 0.35
_HEADS = {number: name for name, number in layout.HEADS.items()}
_SIDES = {number: name for name, number in layout.SIDES.items()}
_OPS = dict(enumerate(layout.OPS))
_STATE, _DONE = layout.KINDS["state"], layout.KINDS["done"]


class RankRecords(Struct, frozen=True):
    """One rank's, of some seconds."""

    rank: int
    records: Records
    ahead_ns: int = 0
    """What its node's clock shows too much."""


def members_of(ranks: Iterable[RankRecords]) -> dict[int, dict[int, int]]:
    """Of each communicator, by its hash: global ranks by their numbers in it."""
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for one in ranks:
        for record in one.records.communicators:
            found[int(record["comm"])][int(record["of_rank"])] = one.rank
    return dict(found)


def of_nccl(
    ranks: Iterable[RankRecords],
    *,
    members: Mapping[int, Mapping[int, int]] | None = None,
    transports: Mapping[int, Transport] | None = None,
    otherwise: Transport = "ib",
) -> Iterator[Picture]:
    """A picture each tenth of a second. `members`, where the communicators began before these records; `transports`
    by communicator, as NCCL's log has them."""
    known = list(ranks)
    numbers = {**members_of(known), **{comm: dict(of) for comm, of in (members or {}).items()}}
    everyone = {comm: tuple(sorted(of.values())) for comm, of in numbers.items()}
    yield from _pictures(
        known, everyone, lambda rank, record: _nccl_state(rank, record, numbers, transports or {}, otherwise)
    )


def of_tcp(ranks: Iterable[RankRecords], members: Mapping[int, tuple[int, ...]]) -> Iterator[Picture]:
    """The same of connections; `members` are the global ranks of each communicator."""
    yield from _pictures(list(ranks), dict(members), _tcp_operation, tcp=True)


def _pictures(
    ranks: list[RankRecords], members: dict[int, tuple[int, ...]], state_of: Any, *, tcp: bool = False
) -> Iterator[Picture]:
    """Records in the order of time; what is open is shown at each step."""
    events = sorted(
        ((int(record["t"]) - one.ahead_ns, one.rank, record) for one in ranks for record in _events(one.records, tcp)),
        key=lambda event: event[0],
    )
    if not events:
        return
    open_states: dict[tuple[Any, ...], tuple[int, FlowState | OperationState]] = {}
    threads: dict[tuple[int, int], tuple[int, ThreadState]] = {}
    step_ns = int(STEP_S * 1e9)
    # all ranks write at the same moments; a picture is taken between two of them
    due_ns = events[0][0] + step_ns // 2
    for t_ns, rank, record in [*events, (events[-1][0] + step_ns, -1, None)]:
        while t_ns >= due_ns:
            yield _picture(due_ns, open_states, threads, members)
            due_ns += step_ns
        if record is None:
            continue
        kind = int(record["kind"])
        if kind == layout.KINDS["host"]:
            if (thread := _thread(rank, record, tcp)) is not None:
                threads[rank, int(record["seq"])] = t_ns, thread
            else:
                threads.pop((rank, int(record["seq"])), None)
        elif kind == layout.KINDS["flow"]:
            for state in _tcp_flows(rank, record):
                open_states[rank, "tcp", state.comm, state.peer, state.side] = t_ns, state
        else:
            place = (rank, *(int(record[name]) for name in ("comm", "order", "channel", "peer", "flow")))
            if kind == _DONE or (state := state_of(rank, record)) is None:
                open_states.pop(place, None)
            else:
                open_states[place] = t_ns, state


def _events(records: Records, tcp: bool) -> Iterator[Any]:
    yield from records.operations[np.isin(records.operations["kind"], (_STATE, _DONE))]
    yield from records.hosts
    if tcp:
        yield from records.flows


def _picture(
    t_ns: int,
    open_states: dict[tuple[Any, ...], tuple[int, FlowState | OperationState]],
    threads: dict[tuple[int, int], tuple[int, ThreadState]],
    members: dict[int, tuple[int, ...]],
) -> Picture:
    for place in [place for place, (seen_ns, _) in open_states.items() if t_ns - seen_ns > _REPEATED_S * 1e9]:
        del open_states[place]
    states = [state for _, state in open_states.values()]
    return Picture(
        t_s=t_ns / 1e9,
        flows=tuple(one for one in states if isinstance(one, FlowState)),
        operations=tuple(one for one in states if isinstance(one, OperationState)),
        threads=tuple(one for seen_ns, one in threads.values() if t_ns - seen_ns <= _THREAD_S * 1e9),
        members=members,
    )


def _thread(rank: int, record: Any, tcp: bool) -> ThreadState | None:
    dt_us = max(1, int(record["dt_us"]))
    state = chr(int(record["state"]))
    # a process that waits for a socket sleeps; only NCCL's proxies spin
    if tcp and state != "T" and not record["frozen"]:
        return None
    return ThreadState(
        rank=rank, ran=float(record["cpu_us"]) / dt_us, delayed=float(record["delay_us"]) / dt_us, state=state
    )


def _number(record: Any, name: str) -> int | None:
    value = int(record[name])
    return None if value == layout.UNSEEN else value


def _nccl_state(
    rank: int,
    record: Any,
    numbers: Mapping[int, Mapping[int, int]],
    transports: Mapping[int, Transport],
    otherwise: Transport,
) -> FlowState | OperationState | None:
    side = _SIDES.get(int(record["flow"]))
    comm = int(record["comm"])
    if side is None or int(record["flags"]) & layout.FOREIGN:
        return None  # whose flow it is, only that process knows
    if side == "whole":
        return _operation(rank, record)
    peer = numbers.get(comm, {}).get(int(record["peer"]), layout.NOBODY)
    head = _HEADS.get(int(record["head" if side == "send" else "recv_head"]), "none")
    begins: Head = "send_gpu" if side == "send" else "recv_wait"
    return FlowState(
        rank=rank,
        peer=peer,
        comm=comm,
        channel=int(record["channel"]),
        side=cast(Side, side),
        transport=transports.get(comm, otherwise),
        op=_OPS.get(int(record["op"]), "other"),
        order=int(record["order"]),
        is_ring=bool(int(record["flags"]) & layout.RING),
        head=begins if head == "begun" else cast(Head, head),
        stuck_s=int(record["stuck_ms"]) / 1000,
        total=_number(record, "total"),
        ready=_number(record, "ready"),
        transmitted=_number(record, "transmitted"),
        done=_number(record, "done"),
        received=_number(record, "received"),
        consumed=_number(record, "consumed"),
    )


def _operation(rank: int, record: Any) -> OperationState:
    return OperationState(
        rank=rank,
        comm=int(record["comm"]),
        order=int(record["order"]),
        op=_OPS.get(int(record["op"]), "other"),
        seq=int(record["seq"]),
        channels=_number(record, "total"),
        begun=_number(record, "ready"),
        ended=_number(record, "done"),
        stuck_s=int(record["stuck_ms"]) / 1000,
    )


def _tcp_operation(rank: int, record: Any) -> OperationState:
    """A host that has posted it has begun it: there is no kernel."""
    return OperationState(
        rank=rank,
        comm=int(record["comm"]),
        order=int(record["seq"]),
        op=_OPS.get(int(record["op"]), "other"),
        seq=int(record["seq"]),
        channels=1,
        begun=1,
        ended=0,
        stuck_s=int(record["stuck_ms"]) / 1000,
    )


def _tcp_flows(rank: int, record: Any) -> Iterator[FlowState]:
    """Both sides of a connection: what has not got away, and what has come and was not read."""
    peer, comm = int(record["peer"]), int(record["comm"])
    if peer < 0:
        return
    waits = int(record["notsent"]) > 0 or int(record["unacked"]) > 0
    common: dict[str, Any] = {"rank": rank, "peer": peer, "comm": comm, "transport": "socket"}
    yield FlowState(**common, side="send", head="send_wait" if waits else "none")
    yield FlowState(**common, side="receive", head="recv_gpu" if int(record["rqueue"]) > 0 else "recv_wait")
