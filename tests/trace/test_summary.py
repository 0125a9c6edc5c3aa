"""What do the records of one rank come to?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from evertrain.trace import layout
from evertrain.trace.summary import Look, Pulses, Records, empty, rank_trace
from support.collectives import NS, Do, Job

COMM = 0xABC
SECOND = 1_000_000_000


def rows(*found: dict[str, Any]) -> Any:
    """Operations; times in seconds."""
    made = np.zeros(len(found), layout.dtype("operation"))
    for at, one in enumerate(found):
        for name, value in {"comm": COMM, "kind": "done", "op": "all_reduce", "seen": "wait", **one}.items():
            if name in ("t_posted", "t_wait", "t_done"):
                value = int(value * NS)
            elif name == "kind":
                value = layout.KINDS[value]
            elif name == "op":
                made["flags"][at] |= layout.POINT_TO_POINT if value.startswith(("send", "recv")) else 0
                value = layout.OPS.index(value)
            elif name == "seen":
                value = layout.SEEN[value]
            made[name][at] = made[name][at] | value if name == "flags" else value
    return made


def records(done: Any = None, table: Any = None) -> Records:
    return empty()._replace(**{name: one for name, one in (("done", done), ("table", table)) if one is not None})


def look(at: float, now_s: float = 5.0, before_s: float = 10.0, most: int = 256) -> Look:
    return Look(int(at * NS), now_s, before_s, most)


def test_own_time_is_what_no_wait_covers() -> None:
    found = rank_trace(
        0, "n", records(rows(
            {"seq": 1, "t_posted": 1.0, "t_wait": 1.0, "t_done": 1.1},
            {"seq": 2, "t_posted": 1.5, "t_wait": 1.5, "t_done": 1.7},
            # posted early, waited for late
            {"seq": 3, "t_posted": 1.6, "t_wait": 2.0, "t_done": 2.1},
        )), look(3.0),
    )  # fmt: skip
    assert (found.now.ended, found.now.seconds) == (2, pytest.approx(1.0))
    assert found.now.own_s == pytest.approx(0.4 + 0.3)
    assert found.now.operations.own_s == pytest.approx((0.4, 0.3))
    assert found.now.operations.took_s == pytest.approx((0.2, 0.5)), "of collectives since they were posted"
    assert found.own_s == pytest.approx(0.9) and found.still_s == pytest.approx(0.9)
    assert found.blocked is None


def test_waits_inside_cpp_count_from_the_posting_on() -> None:
    found = rank_trace(
        0, "n", records(rows(
            {"seq": 1, "t_posted": 1.0, "t_done": 1.1, "seen": "poll"},
            {"seq": 2, "t_posted": 1.5, "t_done": 1.9, "seen": "poll"},
        )), look(3.0),
    )  # fmt: skip
    assert found.now.own_s == pytest.approx(0.4)


def test_transfers_take_as_long_as_they_are_waited_for() -> None:
    found = rank_trace(
        3, "n", records(rows(
            {"seq": 1, "op": "recv", "peer": 2, "t_posted": 0.2, "t_wait": 1.0, "t_done": 1.1},
            {"seq": 2, "op": "recv", "peer": 2, "t_posted": 0.2, "t_wait": 2.0, "t_done": 2.2},
        )), look(3.0),
    )  # fmt: skip
    assert found.now.operations.took_s == pytest.approx((0.2,))
    assert [(one.source, one.target, one.posted, one.ended) for one in found.progress] == [(2, 3, 2, 2)]
    assert found.kinds[0].peer == 2


def test_what_is_only_posted_is_no_wait() -> None:
    prefetched = rows({"kind": "state", "op": "recv", "peer": 2, "seq": 4, "t_posted": 1.0})
    found = rank_trace(0, "n", records(table=prefetched), look(3.0))
    assert found.blocked is None and [one.seq for one in found.in_flight] == [4]
    pulse = Pulses(0, 1).take(records(table=prefetched), 2 * SECOND, 3 * SECOND)
    assert not pulse.in_flight
    declared = rows({"kind": "state", "seq": 4, "t_posted": 1.0, "flags": layout.POSTED_ONLY})
    assert rank_trace(0, "n", records(table=declared), look(3.0)).blocked is None
    assert not Pulses(0, 1).take(records(table=declared), 2 * SECOND, 3 * SECOND).in_flight


def test_what_a_rank_says_it_is_blocked_in() -> None:
    table = rows(
        {"kind": "blocked", "op": "send", "peer": 5, "seq": 9, "t_posted": 1.0, "t_wait": 1.5},
        {"kind": "state", "op": "send", "peer": 5, "seq": 9, "t_posted": 1.0, "t_wait": 1.5},
    )
    found = rank_trace(0, "n", records(table=table), look(3.0))
    assert found.blocked is not None and found.blocked.is_sure
    assert (found.blocked.op, found.blocked.seq, found.blocked.peer) == ("send", 9, 5)
    assert found.blocked.seconds == pytest.approx(1.5) and found.own_s == 0.0
    assert [(one.posted, one.ended) for one in found.progress] == [(9, 0)]


def test_an_idle_rank_is_taken_to_wait_for_the_oldest_that_it_has_posted() -> None:
    table = rows({"kind": "state", "seq": 9, "t_posted": 2.0}, {"kind": "state", "seq": 8, "t_posted": 1.0})
    host = np.zeros(4, layout.dtype("host"))
    host["t"], host["dt_us"], host["state"] = [int(one * NS) for one in (2.6, 2.7, 2.8, 2.9)], 100_000, ord("S")
    idle = rank_trace(0, "n", records(table=table)._replace(host=host), look(3.0))
    assert idle.blocked is not None and idle.blocked.seq == 8 and not idle.blocked.is_sure
    host["cpu_us"] = 90_000
    busy = rank_trace(0, "n", records(table=table)._replace(host=host), look(3.0))
    assert busy.blocked is None


def test_both_periods_lie_side_by_side() -> None:
    done = [{"seq": at, "t_posted": at - 0.3, "t_wait": at - 0.3, "t_done": float(at)} for at in range(1, 31)]
    found = rank_trace(0, "n", records(rows(*done)), look(30.5, now_s=5.0, before_s=10.0))
    assert (found.now.ended, found.now.seconds) == (5, pytest.approx(5.0))
    assert (found.before.ended, found.before.seconds) == (10, pytest.approx(10.0))
    assert found.before.operations.ago_s[-1] == pytest.approx(5.5)
    assert found.now.own_s == pytest.approx(5 * 0.7)


def test_of_many_operations_all_ranks_tell_of_the_same() -> None:
    job = Job(noise=0.1).run(22.0)
    numbers: dict[tuple[str, str], set[int]] = {}
    for rank in (0, 2):  # one data-parallel group
        trace = rank_trace(rank, "n", job.records(rank, 21.0), Look(job.ns(rank, 21.0), 18.0, 2.0, most=120))
        told = trace.now.operations
        assert 30 <= len(told.seq) <= 130 < trace.now.ended
        for kind, seq in zip(told.kind, told.seq, strict=True):
            if (one := trace.kinds[kind]).op == "all_gather_into_tensor":
                numbers.setdefault((f"{rank}", one.comm), set()).add(seq)
    (mine, theirs) = numbers.values()
    # one more or less at the edges
    assert len(mine ^ theirs) <= 1 and len(mine & theirs) >= 3


def test_time_between_steps_is_told_apart() -> None:
    def program(job: Job, rank: int, step: int) -> list[Do]:
        del job, rank, step
        return [
            Do("own", seconds=0.3, tag="load"), Do("all_reduce", "dp"), Do("own", seconds=0.1), Do("all_reduce", "dp"),
        ]  # fmt: skip

    job = Job({"dp": 2}, program=program, noise=0.01).run(12.0)
    steps = [job.ns(0, one) for one in job.step_times[0]]
    found = rank_trace(0, "n", job.records(0, 11.0), Look(job.ns(0, 11.0), 8.0, 2.0), step_times=steps)
    assert found.now.between_s / found.now.own_s == pytest.approx(0.75, abs=0.05)


def test_a_rank_that_has_posted_nothing_since_its_step() -> None:
    done = rows({"seq": 1, "t_posted": 1.0, "t_wait": 1.0, "t_done": 1.1})
    found = rank_trace(0, "n", records(done), look(3.0), step_times=[int(1.2 * NS)])
    assert found.is_between
    assert not rank_trace(0, "n", records(done), look(3.0)).is_between, "steps were not seen"


def test_processes_and_connections() -> None:
    host = np.zeros(50, layout.dtype("host"))
    host["t"], host["dt_us"], host["carrier"] = [int((20 + one / 10) * NS) for one in range(1, 51)], 100_000, 1
    host["state"] = [ord("T") if 20 <= one < 50 else ord("S") for one in range(50)]
    # of many threads it is not asked each time
    host["delay_us"] = [layout.UNSEEN if one % 2 else 1_124_000 if one >= 20 else 2_000 for one in range(50)]
    host["cpu_us"] = [layout.UNSEEN if one % 5 else 100_000 for one in range(50)]
    flow = np.zeros(100, layout.dtype("flow"))
    flow["t"], flow["dt_us"], flow["peer"] = np.repeat(host["t"], 2), 100_000, 4
    flow["inode"] = [11, 12] * 50
    flow["sent"], flow["acked"], flow["busy_us"], flow["notsent"] = 1000, 900, [60_000, 10_000] * 50, [7000, 1000] * 50
    flow["backoff"], flow["rqueue"] = [0] * 99 + [3], 5
    found = rank_trace(0, "n", empty()._replace(host=host, flow=flow), look(25.0, now_s=3.0, before_s=2.0))
    now, before = found.now.host, found.before.host
    assert now is not None and before is not None
    assert (now.samples, now.stopped, before.samples, before.stopped) == (30, 30, 20, 0)
    assert now.delay_s / now.seconds == pytest.approx(5.62) and found.state == "stopped"
    assert now.cpu_s / now.seconds == pytest.approx(0.2)
    (sends,) = found.now.flows
    assert (sends.peer, sends.sent, sends.acked, sends.backoff, sends.rqueue) == (4, 60_000, 54_000, 3, 10)
    assert sends.busy == pytest.approx(0.6) and sends.notsent == pytest.approx(8000, abs=2)
    assert found.before.flows[0].backoff == 0


def test_a_pulse_counts_intervals_over_its_edges() -> None:
    pulses = Pulses(0, 1)
    ends = [0.4, 0.8, 1.2, 1.6, 2.9]
    done = rows(
        *({"seq": at, "t_posted": one - 0.1, "t_wait": one - 0.1, "t_done": one} for at, one in enumerate(ends))
    )
    made = [pulses.take(records(done), at * SECOND, (at + 1) * SECOND) for at in range(4)]
    assert [[(one.ended, one.interval_s) for one in pulse.streams] for pulse in made] == [
        [(1, pytest.approx(0.4))], [(2, pytest.approx(0.4))], [(1, pytest.approx(1.3))], [],
    ]  # fmt: skip
    assert [one.still_s for one in made] == [pytest.approx(one) for one in (0.2, 0.4, 0.1, 1.1)]
    assert [one.longest_s for one in made] == [pytest.approx(one) for one in (0.4, 0.4, 1.3, 0.0)]
    assert [one.waited_s for one in made] == [pytest.approx(one) for one in (0.1, 0.1, 0.1, 0.0)]
    assert [one.number for one in made] == [1000, 2000, 3000, 4000]


def test_nothing_at_all() -> None:
    found = rank_trace(0, "n", empty(), look(3.0))
    assert found.now.ended == 0 and found.still_s is None and found.blocked is None
    pulse = Pulses(0, 1).take(empty(), 0, SECOND)
    assert pulse.still_s is None and not pulse.in_flight and not pulse.streams
