"""A look at a job of ten thousand ranks, of which one sleeps or takes three times as long by itself."""

from __future__ import annotations

from collections.abc import Sequence

from evertrain.model.collectives import (
    Call,
    Communicator,
    Ended,
    Flow,
    Host,
    Kind,
    NodeTrace,
    Period,
    Progress,
    RankTrace,
)

_ROWS = 64
_ENDED = 600
_OWN_S, _TOOK_S = 0.004, 0.001


def large_job(*, pp: int, dp: int, tp: int, culprit: int, stuck: bool) -> list[NodeTrace]:
    """pp x dp x tp ranks, eight on a node."""
    known: dict[tuple[str, int], Communicator] = {}

    def comm(dim: str, members: Sequence[int]) -> Communicator:
        return known.setdefault((dim, members[0]), Communicator(f"{dim}{members[0]}", dim, dim, tuple(members)))

    traces = []
    for rank in range(pp * dp * tp):
        stage, replica, part = rank // (dp * tp), rank // tp % dp, rank % tp
        tensor = comm("tp", [rank - part + one for one in range(tp)])
        data = comm("dp", [(stage * dp + one) * tp + part for one in range(dp)])
        pipeline = comm("pp", [(one * dp + replica) * tp + part for one in range(pp)])
        groups = (tensor, data, pipeline)
        # whom the culprit holds up in its own groups waits there, all others somewhere behind
        where = next((one for one in groups if culprit in one.members), None)
        where = where or (data if stage == culprit // (dp * tp) else pipeline)
        is_waiting = stuck and rank != culprit
        near = (data.members[(replica + 1) % dp], pipeline.members[(stage + 1) % pp])
        traces.append(
            RankTrace(
                rank=rank,
                node=f"node-{rank // 8}",
                blocked=Call(comm=where.id, op="all_reduce", seq=1000, seconds=2.5) if is_waiting else None,
                own_s=0.0 if is_waiting else 2.5,
                still_s=2.5 if stuck else 0.01,
                progress=tuple(Progress(one.id, 1000 if is_waiting and one is where else 999, 999) for one in groups),
                kinds=tuple(Kind(one.id, "all_reduce", 20) for one in groups),
                now=_period(near, 0.0 if stuck else 2 * _OWN_S, rank == culprit),
                before=_period(near, 0.0, rank == culprit),
            )
        )
    return [
        NodeTrace(
            number=1,
            attempt=1,
            node=f"node-{at // 8}",
            time=0.0,
            ranks=tuple(traces[at : at + 8]),
            communicators=tuple(known.values()) if at == 0 else (),
        )
        for at in range(0, len(traces), 8)
    ]


def _period(near: Sequence[int], longer_s: float, is_culprit: bool) -> Period:
    own_s = _OWN_S + (longer_s if is_culprit else 0.0)
    took_s = _TOOK_S + (0.0 if is_culprit else longer_s)
    rows = range(_ROWS)
    return Period(
        seconds=_ENDED * (_OWN_S + _TOOK_S + longer_s),
        ended=_ENDED,
        own_s=_ENDED * own_s,
        operations=Ended(
            kind=tuple(one % 3 for one in rows),
            seq=tuple(rows),
            took_s=(took_s,) * _ROWS,
            own_s=(own_s,) * _ROWS,
            ago_s=tuple(float(_ROWS - one) / 10 for one in rows),
        ),
        host=Host(seconds=6.0, samples=60, cpu_s=2.0, delay_s=0.05),
        flows=tuple(Flow(peer=one, seconds=6.0, sent=10**6, acked=10**6, busy=0.2) for one in near),
    )
