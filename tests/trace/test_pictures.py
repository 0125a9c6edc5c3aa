"""Connections make the same pictures as NCCL's flows, and the same rules read them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evertrain.locate import nccl_heads
from evertrain.trace import layout, pictures, reading

COMM, RANKS, SECONDS = 9, 4, 2


def record(kind: str, at_ns: int, rank: int, **fields: Any) -> Any:
    body = reading.OPERATION if kind == "state" else reading.FLOW if kind == "flow" else reading.HOST
    one = np.zeros(1, body)
    one["kind"], one["rank"], one["t"], one["comm"] = layout.KINDS[kind], rank, at_ns, COMM
    for name, value in fields.items():
        one[name] = value
    return one.view(reading.OPERATION)


def ring_of(rank: int, stopped: int | None, dark: tuple[int, int] | None) -> pictures.RankRecords:
    """A rank of a ring of connections, in an all_reduce that does not end."""
    after, before = (rank + 1) % RANKS, (rank - 1) % RANKS
    found = []
    for at in range(SECONDS * 10):
        now = at * 100_000_000 + rank
        found.append(record("state", now, rank, op=layout.OPS.index("all_reduce"), seq=5, stuck_ms=at * 100))
        unsent = 500_000 if stopped == after or dark == (rank, after) else 0
        found.append(record("flow", now, rank, peer=after, notsent=unsent, unacked=40 if unsent else 0))
        found.append(record("flow", now, rank, peer=before, rqueue=90_000 if stopped == rank else 0))
        state = ord("T") if stopped == rank else ord("S")
        found.append(record("host", now, rank, state=state, dt_us=100_000, comm=0, cpu_us=100))
    return pictures.RankRecords(rank, reading.split(np.concatenate(found)))


@pytest.mark.parametrize(
    ("stopped", "dark", "component", "ranks"),
    [(2, None, "proxy", (2,)), (None, (1, 2), "network", (1, 2)), (None, None, "none", ())],
)
def test_tcp_records_go_through_the_same_rules(
    stopped: int | None, dark: tuple[int, int] | None, component: str, ranks: tuple[int, ...]
) -> None:
    rings = [ring_of(rank, stopped, dark) for rank in range(RANKS)]
    shown = list(pictures.of_tcp(rings, {COMM: tuple(range(RANKS))}))
    assert SECONDS * 10 - 2 <= len(shown) <= SECONDS * 10 + 1
    cause = nccl_heads.judge(shown)
    assert (cause.component, cause.ranks) == (component, ranks), cause


def test_what_was_not_repeated_is_gone() -> None:
    states = [record("state", 0, 0, seq=1), record("state", 3_000_000_000, 0, seq=2)]
    rank = pictures.RankRecords(0, reading.split(np.concatenate(states)))
    counts = [len(one.operations) for one in pictures.of_tcp([rank], {})]
    assert counts[0] == 1 and 0 in counts and counts[-1] == 1
