"""Heads of flows point to whoever holds the others up, for InfiniBand and for sockets, in rings and in trees."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from evertrain.locate import nccl_heads
from evertrain.model.tracing import FlowState, Head, OperationState, Picture, ThreadState, Transport

COMM, ORDER = 7, 12
RANKS = 4


def send(rank: int, head: Head, peer: int | None = None, **more: Any) -> FlowState:
    to = (rank + 1) % RANKS if peer is None else peer
    counters = {"total": 24, "ready": 8, "transmitted": 8, "done": 6}
    return FlowState(
        rank=rank, peer=to, comm=COMM, side="send", op="all_reduce", order=ORDER, is_ring=True, head=head, stuck_s=3.0,
        **{**counters, **more},
    )  # fmt: skip


def receive(rank: int, head: Head, peer: int | None = None, **more: Any) -> FlowState:
    of = (rank - 1) % RANKS if peer is None else peer
    counters = {"total": 24, "ready": 14, "transmitted": 6, "received": 6, "consumed": 6}
    return FlowState(
        rank=rank, peer=of, comm=COMM, side="receive", op="all_reduce", order=ORDER, is_ring=True, head=head,
        stuck_s=3.0, **{**counters, **more},
    )  # fmt: skip


def starved(rank: int) -> list[FlowState]:
    """Nothing comes in, so nothing goes out."""
    return [send(rank, "send_gpu"), receive(rank, "recv_wait")]


def picture(*flows: FlowState, begun: dict[int, int | None] | None = None, **more: Any) -> Picture:
    operations = tuple(
        OperationState(rank=rank, comm=COMM, order=ORDER, op="all_reduce", channels=1, begun=count, ended=0)
        for rank, count in (begun or dict.fromkeys(range(RANKS), 1)).items()
    )
    return Picture(t_s=0.0, flows=flows, operations=operations, members={COMM: tuple(range(RANKS))}, **more)


def judged(one: Picture, transport: Transport = "ib") -> Any:
    """The same picture again and again: the job is stuck."""
    flows = tuple(replace(flow, transport=transport) for flow in one.flows)
    return nccl_heads.judge([replace(one, flows=flows, t_s=at / 10) for at in range(5)])


@pytest.mark.parametrize("transport", ["ib", "socket"])
def test_a_link_between_two_ranks(transport: Transport) -> None:
    flows = [send(1, "send_wait"), receive(1, "recv_wait"), *starved(2), *starved(3), *starved(0)]
    cause = judged(picture(*flows), transport)
    assert (cause.component, cause.ranks, cause.link) == ("network", (1, 2), (1, 2))
    assert cause.path[-1] == 1 and cause.confidence > 0.7


@pytest.mark.parametrize("transport", ["ib", "socket"])
def test_the_rank_that_two_dark_links_have_in_common(transport: Transport) -> None:
    flows = [
        send(0, "send_wait"), receive(0, "recv_wait"), send(1, "send_wait"), receive(1, "recv_wait"),
        *starved(2), *starved(3),
    ]  # fmt: skip
    cause = judged(picture(*flows), transport)
    assert (cause.component, cause.ranks, cause.link) == ("network", (1,), None)


def test_what_a_socket_calls_done_may_be_in_the_network() -> None:
    flows = [send(0, "none", transmitted=9, done=9), receive(0, "recv_wait"), *starved(1), *starved(2), *starved(3)]
    cause = judged(picture(*flows), "socket")
    assert (cause.component, cause.link) == ("network", (0, 1))
    on_ib = judged(picture(*flows), "ib")
    assert (on_ib.component, on_ib.ranks) == ("proxy", (1,)), "there it has arrived, and was not seen"


@pytest.mark.parametrize("transport", ["ib", "socket"])
def test_a_gpu_that_neither_takes_nor_gives(transport: Transport) -> None:
    flows = [
        send(1, "send_gpu"), receive(1, "recv_gpu", received=14, transmitted=14), *starved(2), *starved(3),
        send(0, "send_peer"), receive(0, "recv_wait"),
    ]  # fmt: skip
    cause = judged(picture(*flows), transport)
    assert (cause.component, cause.ranks) == ("gpu", (1,))


def test_the_first_chunk_of_a_ring_is_the_ranks_own() -> None:
    first = {"ready": 0, "transmitted": 0, "done": 0}
    flows = [send(1, "send_gpu", **first), receive(1, "recv_wait"), *starved(2), *starved(3), *starved(0)]
    assert judged(picture(*flows)).ranks == (1,)
    tree = picture(*(replace(flow, is_ring=False) for flow in flows))
    assert judged(tree).component == "none", "a tree's interior waits for what comes from below"


def test_the_way_from_the_network_to_the_gpu() -> None:
    flows = [send(1, "send_gpu"), receive(1, "recv_flush", received=8), *starved(2), *starved(3), *starved(0)]
    cause = judged(picture(*flows))
    assert (cause.component, cause.ranks) == ("pcie", (1,))


def test_a_rank_that_has_not_begun() -> None:
    flows = [flow for rank in (0, 2, 3) for flow in starved(rank)]
    cause = judged(picture(*flows, begun={0: 1, 1: 0, 2: 1, 3: 1}))
    assert (cause.component, cause.ranks) == ("host", (1,))
    absent = judged(picture(*flows, begun={0: 1, 2: 1, 3: 1}))
    assert (absent.component, absent.ranks) == ("host", (1,))


def test_inside_a_node_only_kernels_are_seen_and_say_who_is_late() -> None:
    cause = judged(picture(begun={0: 1, 1: 0, 2: 1, 3: 1}))
    assert (cause.component, cause.ranks) == ("host", (1,))
    assert judged(picture()).component == "none", "all begun, none ended: which hop stalls cannot be seen"


@pytest.mark.parametrize(("state", "word"), [("S", "ran 0%"), ("T", "stopped"), ("X", "gone")])
def test_a_proxy_that_does_not_run(state: str, word: str) -> None:
    flows = [send(0, "send_wait"), receive(0, "recv_wait"), *starved(1), *starved(2), *starved(3)]
    threads = tuple(ThreadState(rank=rank, ran=0.98) for rank in (0, 2, 3))
    asleep = ThreadState(rank=1, ran=0.0, state=state)
    cause = judged(picture(*flows, threads=(*threads, asleep)))
    assert (cause.component, cause.ranks) == ("proxy", (1,)) and word in " ".join(cause.evidence)
    starved_of_cpu = ThreadState(rank=1, ran=0.02, delayed=0.9)
    assert judged(picture(*flows, threads=(*threads, starved_of_cpu))).component == "network", "it wants to run"


def test_one_channel_of_several_is_a_path() -> None:
    fine = [replace(flow, channel=0, head="none") for rank in range(RANKS) for flow in starved(rank)]
    bad = [send(1, "send_wait"), receive(1, "recv_wait"), *starved(2), *starved(3), *starved(0)]
    cause = judged(picture(*fine, *(replace(flow, channel=3) for flow in bad)))
    assert (cause.link, cause.channels) == ((1, 2), (3,))


def test_a_tree_is_walked_along_children_and_parents() -> None:
    # 0 is the root, 1 and 2 its children, 3 a child of 1 whose network is dark
    flows = [
        send(3, "send_wait", 1), receive(1, "recv_wait", 3), send(1, "send_gpu", 0, transmitted=0),
        receive(0, "recv_wait", 1), receive(0, "recv_wait", 2, ready=8),
        send(2, "send_wait", 0, transmitted=14, done=14),
    ]  # fmt: skip
    cause = judged(picture(*(replace(flow, is_ring=False) for flow in flows)))
    assert (cause.component, cause.link) == ("network", (3, 1))


def test_a_circle_that_nobody_explains_names_nobody() -> None:
    cause = judged(picture(*(flow for rank in range(RANKS) for flow in starved(rank))))
    assert cause.component == "none" and not cause.ranks


def test_one_picture_is_not_enough() -> None:
    flows = [send(1, "send_wait"), receive(1, "recv_wait"), *starved(2), *starved(3), *starved(0)]
    assert nccl_heads.judge([picture(*flows)]).component == "none"
    assert nccl_heads.judge([]).component == "none"


def test_what_moves_from_place_to_place_names_nobody() -> None:
    shown = []
    for at in range(20):
        one = at % RANKS
        flows = [send(one, "send_wait"), receive(one, "recv_wait")]
        flows += [flow for rank in range(RANKS) if rank != one for flow in starved(rank)]
        shown.append(replace(picture(*flows), t_s=at / 10))
    assert nccl_heads.judge(shown).component == "none"
