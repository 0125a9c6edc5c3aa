"""Who has begun it? Jobs in virtual time, each with one fault; the culprit is never told."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from evertrain.locate.collectives import judge
from evertrain.model.collectives import (
    Call,
    Communicator,
    Flow,
    Host,
    NodeTrace,
    Period,
    Progress,
    RankTrace,
    RootCause,
)
from support.collective_faults import CASES, START, Case, asleep, compute, narrow, prefetching
from support.collective_scale import large_job
from support.collectives import Fault, Job

LASTS = 12.0


def verdict(job: Job) -> RootCause:
    """When the trigger says so, as an agent would answer then."""
    job.run(START + LASTS)
    found = job.first_alarm(START + LASTS)
    assert found is not None, "nothing was noticed"
    at, alarm = found
    assert alarm.rank >= 0 and at > START, alarm
    return judge(job.look(at, now_s=alarm.for_s + 0.5), alarm.symptom)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("rank", "skew_s"), [(1, 0.0), (6, 2.0)])
def test_the_rank_that_has_it_is_named_alone_and_with_its_component(case: Case, rank: int, skew_s: float) -> None:
    found = verdict(Job(fault=case.fault(rank), seed=rank, skew_s=skew_s))
    injected = tuple(sorted({rank, *((rank + one) % 8 for one in case.others)}))
    assert (found.ranks, found.component in case.component) == (injected, True), found
    assert found.nodes == tuple(f"node-{one}" for one in injected)
    assert found.confidence >= 0.5 and found.evidence and found.path
    assert found.path[-1].rank == injected[-1]


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: case.name)
def test_clocks_of_nodes_that_differ_by_seconds_change_nothing(case: Case) -> None:
    together, apart = (verdict(Job(fault=case.fault(3), seed=5, skew_s=skew)) for skew in (0.0, 2.0))
    assert apart == together and together.ranks


@pytest.mark.parametrize(
    "mesh", [{"pp": 4, "dp": 2, "tp": 2}, {"dp": 4, "tp": 2}, {"pp": 3, "dp": 3}, {"dp": 4}], ids=str
)
@pytest.mark.parametrize("name", ["compute x 3", "sigstop", "40 Mbit", "loss"])
def test_jobs_of_other_shapes(mesh: dict[str, int], name: str) -> None:
    case = next(one for one in CASES if one.name == name)
    found = verdict(Job(mesh, fault=case.fault(2)))
    assert (found.ranks, found.component in case.component) == ((2,), True), found


def test_the_first_moment_is_told_by_the_culprits_own_clock() -> None:
    job = Job(fault=asleep(4), skew_s=2.0)
    job.run(START + LASTS)
    at, alarm = job.first_alarm(START + LASTS) or (0.0, None)
    assert alarm is not None
    found = judge(job.look(at), alarm.symptom)
    assert found.first_s == pytest.approx(at - START, abs=0.3)


def test_a_slow_rank_began_when_its_first_long_operation_did() -> None:
    job = Job(fault=compute(4), noise=0.02).run(START + LASTS)
    found = judge(job.look(START + 4.0, now_s=4.5), "slow")
    assert found.ranks == (4,) and found.first_s == pytest.approx(4.0, abs=0.4)


def test_waits_inside_cpp_that_nobody_tells_of() -> None:
    for fault, component in ((compute(5), "compute"), (narrow(5), "sender"), (asleep(5), "outside")):
        found = verdict(Job(fault=fault, polled=True))
        assert (found.ranks, found.component) == ((5,), component), found


def test_receives_that_are_posted_ahead_are_no_waits() -> None:
    """The rank that stands still has a receive in flight all the time."""
    found = verdict(Job(fault=asleep(5), program=prefetching))
    assert (found.ranks, found.component) == ((5,), "outside"), found
    slow = verdict(Job(fault=compute(5), program=prefetching))
    assert (slow.ranks, slow.component) == ((5,), "compute"), slow


def test_a_rank_that_takes_from_anybody_waits_for_those_who_do_not_wait_for_it() -> None:
    ranks = [
        _rank(0, blocked=Call(comm="w", op="recv_any_source", seq=9, peer=-2, seconds=3.0), progress=[("w", 4, 4)]),
        _rank(1, blocked=Call(comm="w", op="all_reduce", seq=5, seconds=3.0), progress=[("w", 5, 4)]),
        _rank(2, own_s=3.1, progress=[("w", 4, 4)]),
        _rank(3, blocked=Call(comm="w", op="all_reduce", seq=5, seconds=3.0), progress=[("w", 5, 4)]),
    ]
    found = judge([_node(ranks, [Communicator("w", "0", "world", (0, 1, 2, 3))])], "stuck")
    assert (found.ranks, found.component) == ((2,), "outside"), found


def test_sends_wait_for_their_receiver() -> None:
    """A send of a few bytes is an edge as well: its rank is no culprit."""
    ranks = [
        _rank(0, blocked=Call(comm="p", op="send", seq=7, peer=1, seconds=3.0), progress=[("p", 7, 6, 0, 1)]),
        _rank(1, blocked=Call(comm="p", op="send", seq=7, peer=2, seconds=3.0),
              progress=[("p", 6, 6, 0, 1), ("p", 7, 6, 1, 2)]),
        _rank(2, own_s=3.2, progress=[("p", 6, 6, 1, 2)]),
    ]  # fmt: skip
    found = judge([_node(ranks, [Communicator("p", "1", "pp", (0, 1, 2))])], "stuck")
    assert (found.ranks, found.component) == ((2,), "outside")
    assert [one.rank for one in found.path] == [0, 1, 2]


def test_several_ranks_outside_are_all_suspects() -> None:
    both = [_inside(rank, "dp", 5) for rank in range(6)] + [_rank(6, own_s=3.0), _rank(7, own_s=3.1)]
    found = judge([_node(both, [Communicator("dp", "0", "dp", tuple(range(8)))])], "stuck")
    assert found.ranks == (6, 7) and found.confidence < 0.7
    one_longer = [*both[:7], _rank(7, own_s=9.0)]
    found = judge([_node(one_longer, [Communicator("dp", "0", "dp", tuple(range(8)))])], "stuck")
    assert found.ranks == (7,)


def test_groups_that_wait_for_each_other_in_a_circle_accuse_nobody() -> None:
    ranks = [
        _rank(0, blocked=Call(comm="a", op="all_reduce", seq=3, seconds=3.0), progress=[("a", 3, 2), ("b", 2, 2)]),
        _rank(1, blocked=Call(comm="b", op="all_reduce", seq=3, seconds=3.0), progress=[("a", 2, 2), ("b", 3, 2)]),
    ]
    comms = [Communicator("a", "1", "tp", (0, 1)), Communicator("b", "2", "dp", (0, 1))]
    found = judge([_node(ranks, comms)], "stuck")
    assert found.component == "none" and not found.ranks
    assert "circle" in found.evidence[0] and "tp" in " ".join(found.evidence)


def test_a_guess_never_makes_a_circle() -> None:
    """A rank sleeps outside with a collective in flight that others have not come to: it was taken for waiting."""
    ranks = [
        _rank(0, blocked=Call(comm="a", op="all_reduce", seq=3, seconds=3.0, is_sure=False), own_s=0.0,
              progress=[("a", 3, 2), ("b", 2, 2)]),
        _rank(1, blocked=Call(comm="b", op="all_reduce", seq=3, seconds=3.0), progress=[("a", 2, 2), ("b", 3, 2)]),
    ]  # fmt: skip
    comms = [Communicator("a", "1", "tp", (0, 1)), Communicator("b", "2", "dp", (0, 1))]
    found = judge([_node(ranks, comms)], "stuck")
    assert (found.ranks, found.component) == ((0,), "outside"), found


def test_different_operations_under_one_number_are_the_programs_fault() -> None:
    ranks = [_inside(rank, "dp", 5) for rank in range(3)]
    ranks.append(_rank(3, blocked=Call(comm="dp", op="broadcast", seq=5, seconds=3.0), progress=[("dp", 5, 4)]))
    found = judge([_node(ranks, [Communicator("dp", "0", "dp", (0, 1, 2, 3))])], "stuck")
    assert found.component == "none" and "different operations" in found.evidence[0]


def test_what_was_not_seen_neither_accuses_nor_is_accused() -> None:
    ranks = [_inside(rank, "dp", 5) for rank in range(3)]
    node = _node(ranks, [Communicator("dp", "0", "dp", (0, 1, 2, 3))])
    found = judge([node], "stuck", expected={rank: f"node-{rank}" for rank in range(4)})
    assert found.component == "none" and not found.ranks
    assert "rank 3" in found.evidence[0] and found.blind == ("nothing came of rank 3",)


def test_several_meetings_that_do_not_move_are_told_apart_by_their_connections() -> None:
    """Rank 3's link is down in the middle of an operation of all ranks: all of them have come."""
    backoff = {rank: (Flow(peer=3, backoff=3),) for rank in (2, 4)}
    ranks = [_inside(rank, "w", 5, flows=backoff.get(rank, ())) for rank in range(8)]
    found = judge([_node(ranks, [Communicator("w", "0", "world", tuple(range(8)))])], "stuck")
    assert (found.ranks, found.component, found.link) == ((3,), "network", None)


def test_one_connection_alone_names_the_pair() -> None:
    ranks = [_inside(rank, "w", 5, flows=(Flow(peer=3, backoff=4),) if rank == 2 else ()) for rank in range(8)]
    found = judge([_node(ranks, [Communicator("w", "0", "world", tuple(range(8)))])], "stuck")
    assert (found.ranks, found.component, found.link) == ((2, 3), "network", (2, 3))


def test_all_ranks_that_take_longer_by_themselves_are_no_ones_fault() -> None:
    job = Job(fault=Fault(start=START, ranks=tuple(range(8)), own=lambda _now, usual, _tag: usual * 2))
    found = verdict(job)
    assert found.component == "none" and not found.ranks


def test_what_tcp_sends_again_on_a_machine_with_too_much_to_do_accuses_nobody() -> None:
    """All have twice as much to do on the processors that they share; acknowledgements come late."""
    job = Job(fault=Fault(start=START, ranks=tuple(range(8)), own=lambda _now, usual, _tag: usual * 2))
    job.run(START + 6.0)
    late = {"sent": 100_000, "acked": 92_000, "resent": 3}
    looks = [
        replace(look, ranks=tuple(_sending(one, late) if one.rank in (2, 7) else one for one in look.ranks))
        for look in job.look(START + 5.0, now_s=5.0)
    ]
    found = judge(looks, "slow")
    assert (found.component, found.ranks) == ("none", ()), found
    assert "all take longer by themselves" in found.evidence[0]


def _sending(trace: RankTrace, now: dict[str, int]) -> RankTrace:
    flows = tuple(replace(flow, **now) for flow in trace.now.flows[:1])
    assert flows
    return replace(trace, now=replace(trace.now, flows=flows))


def test_a_job_that_goes_as_before_has_no_culprit() -> None:
    job = Job(noise=0.2).run(20.0)
    for symptom in ("slow", "stuck"):
        found = judge(job.look(19.0), symptom)  # type: ignore[arg-type]
        assert found.component == "none" and not found.ranks


def test_a_suspended_job_is_nobodys_fault() -> None:
    ranks = [replace(_rank(rank, own_s=3.0), state="stopped") for rank in range(4)]
    found = judge([_node(ranks, [])], "stuck")
    assert found.component == "none" and "all 4 ranks are stopped" in found.evidence[0]


def test_a_rank_that_is_throttled_as_always_is_not_accused_of_what_another_does() -> None:
    always = Host(seconds=3.0, samples=30, throttled_s=2.0)
    ranks = [_inside(rank, "dp", 5) for rank in range(3)] + [_rank(3, own_s=3.0)]
    ranks[1] = replace(ranks[1], now=Period(host=always), before=Period(host=always))
    found = judge([_node(ranks, [Communicator("dp", "0", "dp", (0, 1, 2, 3))])], "stuck")
    assert (found.ranks, found.component) == ((3,), "outside")


@pytest.mark.parametrize("symptom", ["slow", "stuck"])
def test_ten_thousand_ranks_in_less_than_three_seconds(symptom: str) -> None:
    looks = large_job(pp=10, dp=125, tp=8, culprit=4321, stuck=symptom == "stuck")
    assert sum(len(one.ranks) for one in looks) == 10_000
    before = time.process_time()
    found = judge(looks, symptom)  # type: ignore[arg-type]
    took = time.process_time() - before
    assert found.ranks == (4321,), found
    assert took < 3.0


# --- ranks by hand


def _rank(
    rank: int,
    *,
    blocked: Call | None = None,
    own_s: float = 0.0,
    progress: Sequence[tuple[object, ...]] = (),
    flows: tuple[Flow, ...] = (),
) -> RankTrace:
    return RankTrace(
        rank=rank,
        node=f"node-{rank}",
        blocked=blocked,
        own_s=own_s,
        still_s=3.0,
        progress=tuple(Progress(*one) for one in progress),  # type: ignore[arg-type]
        now=Period(flows=flows),
    )


def _inside(rank: int, comm: str, seq: int, flows: tuple[Flow, ...] = ()) -> RankTrace:
    call = Call(comm=comm, op="all_reduce", seq=seq, seconds=3.0)
    return _rank(rank, blocked=call, progress=[(comm, seq, seq - 1)], flows=flows)


def _node(ranks: Sequence[RankTrace], comms: Sequence[Communicator]) -> NodeTrace:
    return NodeTrace(number=1, attempt=1, node="node", time=0.0, ranks=tuple(ranks), communicators=tuple(comms))


@pytest.mark.parametrize("end", [2, 3])
def test_of_one_odd_connection_it_is_the_end_whose_others_lose_data_too(end: int) -> None:
    """Rank 2 to rank 3 times out; what the one end sends to others is lost as well, but less of it."""
    usual = {"sent": 1_000_000, "acked": 999_000, "resent": 1}
    other = {2: 1, 3: 4}

    def flows(rank: int, *, now: bool) -> tuple[Flow, ...]:
        found = [Flow(peer=3, backoff=3 if now else 0, **usual)] if rank == 2 else []
        if rank in other:
            lossy = {"sent": 1_000_000, "acked": 980_000 if now and rank == end else 999_000, "resent": 1}
            found.append(Flow(peer=other[rank], **lossy))
        return tuple(found)

    ranks = [_inside(rank, "w", 5) for rank in range(8)]
    ranks = [
        replace(one, now=Period(flows=flows(one.rank, now=True)), before=Period(flows=flows(one.rank, now=False)))
        for one in ranks
    ]
    found = judge([_node(ranks, [Communicator("w", "0", "world", tuple(range(8)))])], "stuck")
    assert (found.ranks, found.component, found.link, found.is_pair) == ((end,), "network", (2, 3), False)


def test_a_narrow_link_is_the_senders_though_all_have_become_slower_by_themselves() -> None:
    """A busy neighbour makes every rank compute for longer, too: the connection says more."""
    job = Job(
        fault=Fault(
            start=START, ranks=(3,), transfer=lambda usual: usual * 25, flow={"notsent": 750_000, "busy_us": 60_000}
        )
    )
    job.run(START + 6.0)
    looks = job.look(START + 5.0, now_s=5.0)
    slower = [
        replace(look, ranks=(replace(one, now=replace(one.now, own_s=one.now.own_s + 0.5 * one.now.seconds)),))
        for look in looks
        for one in look.ranks
    ]
    found = judge(slower, "slow")
    assert (found.ranks, found.component) == ((3,), "sender"), found
