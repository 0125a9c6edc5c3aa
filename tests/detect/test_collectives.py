"""Is communication stuck or slow?"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from evertrain.detect.collectives import QUIET_S, ROW, SLOW, Alarm, Trigger
from evertrain.model.collectives import Pulse, Stream
from support.collective_faults import START, asleep, compute, link_down, narrow, sigstop
from support.collectives import Fault, Job

RANKS = (0, 1, 4, 5)
STREAMS = (("tp", "all_reduce", 18, 0.033), ("dp", "all_gather", 20, 0.26), ("pp", "send", 17, 0.13))


class Watch:
    """A trigger, and seconds that it is given."""

    def __init__(self, ranks: Sequence[int] = RANKS, seed: int = 0) -> None:
        self.trigger = Trigger()
        self.ranks = ranks
        self.now = 0.0
        self.alarms: list[Alarm] = []
        self._random = random.Random(seed)

    def second(
        self, times: float = 1.0, *, still_s: float | None = None, noise: float = 0.05, declared: bool = False,
        slow: Sequence[str] | None = None, in_flight: bool = True,
    ) -> None:  # fmt: skip
        """Of all ranks; `times` as slow as usual, or `still_s` without an end."""
        self.now += 1.0
        pulses = []
        for rank in self.ranks:
            streams = []
            for comm, op, bucket, usual_s in () if still_s is not None else STREAMS:
                longer = times if slow is None or comm in slow else 1.0
                interval_s = usual_s * longer * max(0.2, self._random.gauss(1.0, noise))
                streams.append(Stream(comm, op, bucket, max(1, round(1 / interval_s)), interval_s))
            pulses.append(
                Pulse(
                    rank=rank, attempt=1, number=int(self.now), streams=tuple(streams),
                    longest_s=0.09 * times if still_s is None else 0.0, in_flight=in_flight,
                    still_s=still_s if still_s is not None else 0.02,
                )
            )  # fmt: skip
        if (alarm := self.trigger.take(pulses, self.now, declared=declared)) is not None:
            self.alarms.append(alarm)

    def healthy(self, seconds: int = 20) -> Watch:
        for _ in range(seconds):
            self.second()
        return self


def test_hours_of_a_noisy_machine_bring_no_alarm() -> None:
    """A neighbour takes part of the machine for minutes, garbage is collected, and now and then something hiccups."""
    watch = Watch(seed=3)
    chance = random.Random(7)
    load = 1.0
    for second in range(3 * 3600):
        if second % 300 == 0:
            load = chance.choice((1.0, 1.0, 1.1, 1.25))
        if chance.random() < 0.002:
            watch.second(still_s=chance.uniform(0.5, 1.8))
        elif chance.random() < 0.01:
            watch.second(load * chance.uniform(1.5, 3.0))
        else:
            watch.second(load, noise=0.12)
    assert watch.alarms == []


def halted(waited_s: float, longest_s: float) -> Pulse:
    """What came to a halt between two looks, and goes on."""
    return Pulse(rank=0, attempt=1, number=1_000, longest_s=longest_s, waited_s=waited_s, still_s=0.3)


def test_a_long_wait_that_has_just_ended_is_an_alarm() -> None:
    watch = Watch().healthy()
    alarm = watch.trigger.take([halted(2.8, 2.9)], watch.now + 1)
    assert alarm is not None and alarm.symptom == "slow" and alarm.for_s == pytest.approx(3.1)
    assert "waited for 2.8 s" in alarm.evidence


def test_a_long_time_without_operations_that_nobody_waited_for_is_none() -> None:
    watch = Watch().healthy()
    assert watch.trigger.take([halted(0.1, 20.0)], watch.now + 1) is None


def test_three_slow_seconds_in_a_row() -> None:
    watch = Watch().healthy()
    for _ in range(10):
        watch.second(2.0)
        watch.second(2.0)
        watch.second(1.0)
    assert watch.alarms == []
    for _ in range(ROW):
        watch.second(2.0)
    (alarm,) = watch.alarms
    assert (alarm.symptom, alarm.episode) == ("slow", 1)
    assert "every" in alarm.evidence and alarm.rank in RANKS


def test_less_than_half_as_slow_again_is_not_slow() -> None:
    watch = Watch().healthy()
    for _ in range(60):
        watch.second(SLOW - 0.15, noise=0.03)
    assert watch.alarms == []


def test_one_stream_of_many_that_comes_more_rarely_is_a_change_of_program() -> None:
    watch = Watch().healthy()
    for _ in range(20):
        watch.second(3.0, slow=["dp"])
    assert watch.alarms == []


def test_what_becomes_slower_little_by_little_is_not_taken_for_usual() -> None:
    watch = Watch().healthy(60)
    for second in range(1200):
        watch.second(1.0 + second / 1000)
    assert [one.symptom for one in watch.alarms] == ["slow"]


def test_what_becomes_faster_is_the_new_measure() -> None:
    watch = Watch().healthy(60)
    for _ in range(80):
        watch.second(0.5)
    assert watch.alarms == []
    for _ in range(ROW):
        watch.second(0.85)
    assert [one.symptom for one in watch.alarms] == ["slow"]


def test_stuck_is_not_called_slow_first() -> None:
    watch = Watch().healthy()
    watch.second(1.4)
    for still_s in (0.9, 1.9, 2.9):
        watch.second(still_s=still_s)
    (alarm,) = watch.alarms
    assert alarm.symptom == "stuck" and alarm.for_s == 2.9


def test_nothing_is_slow_while_any_rank_stands_still() -> None:
    watch = Watch().healthy()
    for _ in range(6):
        watch.now += 1.0
        slow = [Stream(*one[:3], 2, 2 * one[3]) for one in STREAMS]
        pulses = [
            Pulse(rank=0, attempt=1, number=int(watch.now), streams=tuple(slow), still_s=0.1, in_flight=True),
            Pulse(rank=1, attempt=1, number=int(watch.now), still_s=1.2, in_flight=True),
        ]
        assert watch.trigger.take(pulses, watch.now) is None


def test_a_rank_that_waits_for_nothing_is_not_stuck() -> None:
    """It may evaluate, or save: others may wait for it, and say so."""
    watch = Watch().healthy()
    for still_s in range(1, 30):
        watch.second(still_s=float(still_s), in_flight=False)
    assert watch.alarms == []


def test_what_was_slow_and_is_stuck_is_one_episode() -> None:
    watch = Watch().healthy()
    for _ in range(4):
        watch.second(2.0)
    for still_s in (1.0, 2.0, 3.0):
        watch.second(still_s=still_s)
    assert [(one.symptom, one.episode) for one in watch.alarms] == [("slow", 1), ("stuck", 1)]
    # links that come back need some seconds of their own
    for _ in range(4):
        watch.second(2.0)
    watch.second(1.0)
    watch.second(still_s=2.5)
    assert len(watch.alarms) == 2
    watch.healthy(int(QUIET_S) + 2)
    assert watch.trigger.symptom is None
    for still_s in (1.0, 2.0, 3.0):
        watch.second(still_s=still_s)
    assert [one.episode for one in watch.alarms] == [1, 1, 2]


def test_a_slow_episode_lasts_as_long_as_it_is_slow() -> None:
    watch = Watch().healthy()
    for _ in range(300):
        watch.second(2.0)
    assert len(watch.alarms) == 1 and watch.trigger.symptom == "slow"


def test_declared_phases_are_left_out_with_what_they_lengthen() -> None:
    watch = Watch().healthy()
    for still_s in range(1, 20):
        watch.second(still_s=float(still_s), declared=True)
    watch.second(40.0)
    watch.healthy(10)
    assert watch.alarms == []
    for still_s in (1.0, 2.0, 3.0):
        watch.second(still_s=still_s)
    assert [one.symptom for one in watch.alarms] == ["stuck"]


def test_nothing_is_said_before_it_is_known_what_is_usual() -> None:
    watch = Watch()
    for still_s in range(60):
        watch.second(still_s=float(still_s))
    assert watch.alarms == []


def test_the_same_second_counts_once() -> None:
    watch = Watch().healthy()
    watch.second(2.0)
    slow = tuple(Stream(*one[:3], 2, 2 * one[3]) for one in STREAMS)
    for _ in range(10):
        pulse = Pulse(rank=0, attempt=1, number=int(watch.now), streams=slow, still_s=0.1, in_flight=True)
        assert watch.trigger.take([pulse], watch.now) is None


def test_steps_that_take_longer_than_a_second() -> None:
    """Many seconds have no end at all; the intervals are right all the same."""

    def second(trigger: Trigger, number: int, step_s: float) -> Alarm | None:
        ends = [one * step_s for one in range(1, int(number / step_s) + 1) if number - 1 < one * step_s <= number]
        streams = tuple(Stream("dp", "all_reduce", 20, 1, step_s) for _ in ends[:1])
        still_s = number - int(number / step_s) * step_s
        pulse = Pulse(
            rank=0, attempt=1, number=number, streams=streams, longest_s=step_s if ends else 0.0, still_s=still_s,
            in_flight=True,
        )  # fmt: skip
        return trigger.take([pulse], float(number))

    trigger = Trigger()
    assert [one for one in range(1, 200) if second(trigger, one, 3.7)] == []
    found = [alarm for one in range(200, 260) if (alarm := second(trigger, one, 7.4))]
    assert [one.symptom for one in found][:1] == ["slow"]


def test_a_rank_whose_turn_it_is_brings_its_past_along() -> None:
    watch = Watch(ranks=(0,)).healthy()
    watch.trigger.forget(())
    past = [
        Pulse(rank=9, attempt=1, number=number, still_s=0.02, longest_s=0.09, in_flight=True,
              streams=tuple(Stream("other", op, bucket, 3, usual_s) for _, op, bucket, usual_s in STREAMS))
        for number in range(30)
    ]  # fmt: skip
    assert watch.trigger.take(past, watch.now) is None
    slow = [
        Pulse(rank=9, attempt=1, number=30 + at, still_s=0.02, in_flight=True,
              streams=tuple(Stream("other", op, bucket, 3, 2 * usual_s) for _, op, bucket, usual_s in STREAMS))
        for at in range(ROW)
    ]  # fmt: skip
    alarm = watch.trigger.take(slow, watch.now + 3)
    assert alarm is not None and alarm.rank == 9


# --- whole jobs


def test_a_healthy_job_brings_no_alarm() -> None:
    assert Job(noise=0.2).run(60.0).first_alarm(60.0) is None


@pytest.mark.parametrize("rank", [2, 3, 6, 7])
def test_a_fault_on_a_rank_that_is_not_watched_is_noticed(rank: int) -> None:
    watched = (0, 1, 4, 5)
    for fault, symptom in ((sigstop(rank), "stuck"), (compute(rank), "slow")):
        job = Job(fault=fault).run(START + 8.0)
        at, alarm = job.first_alarm(START + 8.0, watched=watched) or (0.0, None)
        assert alarm is not None and alarm.rank in watched and alarm.symptom == symptom
        assert at - START <= 5.0


@pytest.mark.parametrize("fault", [sigstop, asleep, link_down], ids=lambda one: one.__name__)
def test_jobs_that_get_stuck_are_never_called_slow(fault: object) -> None:
    for rank in range(0, 8, 3):
        job = Job(fault=fault(rank), seed=rank).run(START + 6.0)  # type: ignore[operator]
        at, alarm = job.first_alarm(START + 6.0) or (0.0, None)
        assert alarm is not None and alarm.symptom == "stuck" and at - START <= 4.0


def test_a_fault_that_passes_at_once_is_none() -> None:
    fault = Fault(start=START, stop=START + 0.5, ranks=(5,), own=lambda _now, usual, _tag: usual + 0.3)
    assert Job(fault=fault).run(START + 8.0).first_alarm(START + 8.0) is None


def test_bandwidth_shows_within_five_seconds() -> None:
    job = Job(fault=narrow(3)).run(START + 8.0)
    at, alarm = job.first_alarm(START + 8.0) or (0.0, None)
    assert alarm is not None and at - START <= 5.0
