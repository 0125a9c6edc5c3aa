"""Healthy training of every kind raises no alarm; what is broken does, and soon."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.detect.metrics import MetricRules
from evertrain.model.config import MetricConfig
from evertrain.model.metrics import MetricEvent, Step
from support.effort import examples

NAN = float("nan")
Numbers = Callable[[int], float | None]


def steps(
    number: int,
    *,
    loss: Numbers = lambda _: None,
    grad_norm: Numbers = lambda _: None,
    seconds: Callable[[int], float] = lambda _: 1.0,
    declared: Callable[[int], float] = lambda _: 0.0,
    tokens: Callable[[int], float] | None = None,
    first: int = 1,
) -> Iterator[Step]:
    """`declared`: seconds of an evaluation before the step, beside its own."""
    now = total = done = 0.0
    for at in range(first, first + number):
        now += seconds(at) + declared(at)
        total += declared(at)
        done += tokens(at) if tokens is not None else 0.0
        yield Step(
            step=at, count=at - first + 1, time=now, declared_s=total, loss=loss(at), grad_norm=grad_norm(at),
            tokens=done if tokens is not None else None,
        )  # fmt: skip


def told(reported: Iterable[Step], rules: MetricRules | None = None) -> list[MetricEvent]:
    judge = rules or MetricRules(MetricConfig())
    return [event for step in reported for event in judge.step(step)]


def alarms(reported: Iterable[Step], rules: MetricRules | None = None) -> list[tuple[str, int]]:
    return [(event.kind, event.step) for event in told(reported, rules) if not event.is_warning and not event.is_over]


def noisy(seed: int, sigma: float) -> Callable[[], float]:
    rng = random.Random(seed)
    return lambda: math.exp(rng.gauss(0.0, sigma))


# -- what is healthy -------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 1 << 32),
    sigma=st.floats(0.0, 0.5),
    start=st.floats(1e-3, 1e4),
    end=st.floats(1e-9, 1.0),
    speed=st.floats(1e-4, 0.5),
)
@settings(max_examples=examples(30), deadline=None)
def test_noisy_losses_that_fall(seed: int, sigma: float, start: float, end: float, speed: float) -> None:
    noise = noisy(seed, sigma)
    assert (
        alarms(
            steps(
                600,
                loss=lambda at: (start * math.exp(-speed * at) + end) * noise(),
                grad_norm=lambda at: (1.0 + start * math.exp(-speed * at)) * noise(),
            )
        )
        == []
    )


@given(seed=st.integers(0, 1 << 32), scale=st.floats(1e-12, 1e-3))
@settings(max_examples=examples(20), deadline=None)
def test_a_loss_near_zero_is_noise_over_magnitudes(seed: int, scale: float) -> None:
    rng = random.Random(seed)
    fallen = steps(
        800, loss=lambda at: 2.0 * math.exp(-at / 20) + scale * 10 ** rng.uniform(-2, 1), first=1
    )  # three orders of magnitude, as of a model that has learned its data by heart
    assert told(fallen) == []
    assert alarms(steps(800, loss=lambda _: 1e-6 * abs(rng.gauss(0, 1)))) == []


def test_zeros_and_what_is_next_to_them() -> None:
    assert told(steps(300, loss=lambda at: 0.0 if at % 3 else 1e-7, grad_norm=lambda _: 0.0)) == []
    assert alarms(steps(300, loss=lambda at: 1.0 if at < 100 else 0.0 if at < 200 else 1e-6)) == []


@given(seed=st.integers(0, 1 << 32), spread=st.floats(0.1, 60.0))
@settings(max_examples=examples(20), deadline=None)
def test_negative_losses(seed: int, spread: float) -> None:
    rng = random.Random(seed)
    # from +300 through zero to -700
    assert alarms(steps(1000, loss=lambda at: 300.0 - at + rng.gauss(0, spread))) == []


@given(seed=st.integers(0, 1 << 32), period=st.integers(60, 300))
@settings(max_examples=examples(30), deadline=None)
def test_learning_rates_that_start_again(seed: int, period: int) -> None:
    noise = noisy(seed, 0.05)

    def loss(at: int) -> float:
        since = at % period
        return (1.0 + 2.5 * math.exp(-since / 10) * (at >= period)) * noise()

    def grad_norm(at: int) -> float:
        return (40.0 if at % period < 2 and at >= period else 0.5) * noise()

    assert alarms(steps(900, loss=loss, grad_norm=grad_norm)) == []


def test_a_spike_that_recovers_is_a_warning_only() -> None:
    found = told(steps(200, loss=lambda at: 50.0 if at in (100, 101) else 2.0))
    assert [(event.kind, event.step, event.is_warning) for event in found] == [("loss_jump", 100, True)]
    many = told(steps(900, grad_norm=lambda at: 30.0 if at % 25 < 2 else 1.0))
    assert all(event.is_warning for event in many)


def test_clipped_and_skipped_gradient_norms() -> None:
    noise = noisy(3, 0.3)
    clipped = told(steps(400, grad_norm=lambda at: 0.0 if at % 7 == 0 else min(1.0, noise())))
    assert clipped == []


def test_loss_scaling_skips_steps() -> None:
    norms = [math.inf] * 8 + [1.0 if at % 100 else math.inf for at in range(1, 500)]
    found = told(steps(len(norms), grad_norm=lambda at: norms[at - 1], loss=lambda _: 2.0))
    assert found and all(event.is_warning for event in found)


def test_a_loss_every_ten_steps() -> None:
    noise = noisy(5, 0.2)
    assert told(steps(2000, loss=lambda at: (2.0 + 9 * math.exp(-at / 50)) * noise() if at % 10 == 0 else None)) == []


def test_micro_batches_are_no_steps() -> None:
    rules = MetricRules(MetricConfig())
    assert alarms(steps(100, loss=lambda _: 1.0), rules) == []
    high = [Step(step=101, count=101, time=101 + part / 4, loss=90.0) for part in range(4)]
    assert alarms(high, rules) == []


def test_another_stage_of_training_is_judged_by_itself() -> None:
    rules = MetricRules(MetricConfig())
    assert alarms(steps(100, loss=lambda _: 0.1), rules) == []
    later = (Step(step=at, count=at, time=float(at), stage=1, loss=7.0) for at in range(101, 300))
    assert told(later, rules) == []


def test_steps_that_are_named_again() -> None:
    assert told(steps(100, loss=lambda at: 10 / at)) == []
    assert told(steps(100, loss=lambda at: 10 / at, first=60)) == [], "another attempt"
    rules = MetricRules(MetricConfig())
    epochs = (Step(step=at % 50, count=at, time=float(at), loss=2.0) for at in range(1, 400))
    assert told(epochs, rules) == []


# -- speed that is healthy -------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 1 << 32), sigma=st.floats(0.0, 0.4), step_s=st.floats(0.002, 30.0))
@settings(max_examples=examples(30), deadline=None)
def test_step_times_vary(seed: int, sigma: float, step_s: float) -> None:
    noise = noisy(seed, sigma)
    assert told(steps(1500, seconds=lambda _: step_s * noise())) == []


@pytest.mark.parametrize("declared", [True, False])
def test_evaluation_every_hundred_steps(declared: bool) -> None:
    noise = noisy(1, 0.05)

    def seconds(at: int) -> float:  # the step after it takes three times as long
        return noise() * (3.0 if at % 100 == 1 else 1.0) + (30.0 if at % 100 == 0 and not declared else 0.0)

    assert told(steps(2000, seconds=seconds, declared=lambda at: 30.0 if declared and at % 100 == 0 else 0.0)) == []


def test_a_save_of_changing_length_at_every_step() -> None:
    rng = random.Random(1)
    saves = [rng.uniform(0, 5) * (at > 200) for at in range(501)]
    assert told(steps(500, declared=lambda at: saves[at])) == []


def test_compilation_at_the_start() -> None:
    assert told(steps(300, seconds=lambda at: {1: 120.0, 2: 40.0, 5: 10.0}.get(at, 1.0))) == []
    loader = steps(300, seconds=lambda at: 0.2 if at < 9 else 1.0)  # full queues at first
    assert told(loader) == []


@given(seed=st.integers(0, 1 << 32), by_tokens=st.booleans(), noise=st.floats(0.0, 0.1))
@settings(max_examples=examples(20), deadline=None)
def test_packed_sequences(seed: int, by_tokens: bool, noise: float) -> None:
    rng = random.Random(seed)
    sizes = [rng.uniform(1000, 3000) for _ in range(1001)]
    jitter = noisy(seed, noise)
    seconds = [(size / 2000 if by_tokens else 1.0) * jitter() for size in sizes]
    assert told(steps(1000, seconds=lambda at: seconds[at], tokens=lambda at: sizes[at])) == []


def test_longer_sequences_and_larger_batches_later_on() -> None:
    sizes = {at: 1000.0 if at < 300 else 4000.0 for at in range(1, 701)}
    assert told(steps(700, seconds=lambda at: sizes[at] / 1000, tokens=lambda at: sizes[at])) == []
    assert told(steps(700, seconds=lambda _: 1.0, tokens=lambda at: 5000.0 - sizes[at])) == []


def test_a_hiccup_of_some_seconds() -> None:
    fast = steps(3000, seconds=lambda at: 0.06 if 1000 <= at < 1100 else 0.02)
    assert told(fast) == [], "six seconds on a machine that others use too"


# -- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("at", [1, 2, 100])
def test_a_loss_that_is_not_finite_at_once(value: float, at: int) -> None:
    rules = MetricRules(MetricConfig(), only_not_finite=True)
    for step in steps(at + 5, loss=lambda now: value if now >= at else 1.0):
        found = rules.step(step)
        assert [(event.kind, event.step) for event in found] == ([("loss_not_finite", at)] if step.step == at else [])
        assert all(event.confidence == 1.0 and not event.is_warning for event in found)


def test_a_second_one_is_told_again() -> None:
    found = alarms(steps(100, loss=lambda at: NAN if at in (30, 31, 60) else 1.0))
    assert found == [("loss_not_finite", 30), ("loss_not_finite", 60)]


def test_a_script_that_leaves_out_steps_without_a_loss_may_say_so() -> None:
    config = MetricConfig(loss_steps=3)
    rules = MetricRules(config)
    told_ = told(steps(100, loss=lambda at: NAN if at in (1, 30, 31, 60) else 1.0), rules)
    assert [(event.step, event.is_warning) for event in told_] == [(1, True), (30, True), (60, True)]
    rules = MetricRules(config)
    found = [event for event in told(steps(9, loss=lambda _: NAN), rules) if not event.is_warning]
    assert [(event.kind, event.step) for event in found] == [("loss_not_finite", 1)]


def test_a_gradient_norm_that_stays_not_finite() -> None:
    rules = MetricRules(MetricConfig())
    first, *_ = told(steps(60, grad_norm=lambda at: NAN if at >= 50 else 1.0), rules)
    assert (first.kind, first.step, first.is_warning) == ("grad_norm_not_finite", 50, True), "at once, as a warning"
    found = alarms(steps(60, grad_norm=lambda at: NAN if at >= 50 else 1.0))
    assert found == [("grad_norm_not_finite", 50)]
    assert alarms(steps(30, grad_norm=lambda _: NAN)) == [("grad_norm_not_finite", 1)]


@given(seed=st.integers(0, 1 << 32), level=st.floats(1e-6, 1e6), at=st.integers(30, 300))
@settings(max_examples=examples(30), deadline=None)
def test_ten_times_for_three_steps(seed: int, level: float, at: int) -> None:
    noise = noisy(seed, 0.1)

    def value(now: int) -> float:
        return level * noise() * (10.0 if now >= at else 1.0)

    rules = MetricRules(MetricConfig())
    found = told(steps(at + 2, loss=value, grad_norm=value), rules)
    assert [(event.kind, event.step, event.is_warning) for event in found] == [
        ("loss_jump", at, True), ("grad_norm_jump", at, True),
        ("loss_jump", at, False), ("grad_norm_jump", at, False),
    ]  # fmt: skip
    jump = found[-1]
    assert jump.baseline is not None and jump.value > 5 * jump.baseline and f"since step {at}" in jump.evidence


def test_a_jump_is_told_once_and_becomes_usual() -> None:
    found = alarms(steps(600, loss=lambda at: 1.0 if at < 100 else 20.0 if at < 400 else 300.0))
    assert found == [("loss_jump", 100), ("loss_jump", 400)]


def test_a_jump_of_a_loss_that_is_negative() -> None:
    assert alarms(steps(200, loss=lambda at: -100.0 if at < 150 else 5000.0)) == [("loss_jump", 150)]


def test_too_few_values_say_nothing() -> None:
    assert told(steps(40, loss=lambda at: 1.0 if at < 18 else 100.0)) == []


@pytest.mark.parametrize("factor", [1.3, 1 / 0.7, 3.0])
@pytest.mark.parametrize("step_s", [1.0, 8.0])
def test_slower_from_a_step_on(factor: float, step_s: float) -> None:
    noise = noisy(2, 0.03)
    rules = MetricRules(MetricConfig())

    def seconds(at: int) -> float:
        return step_s * noise() * (factor if 300 <= at < 800 else 1.0)

    found = [(step.step, event) for step in steps(1000, seconds=seconds) for event in rules.step(step)]
    assert [(event.kind, event.is_over) for _, event in found] == [("slow", False), ("slow", True)]
    assert 300 <= found[0][1].step <= found[0][0] <= 320 and 800 < found[1][0] <= 820
    assert found[0][1].baseline == pytest.approx(1 / step_s, rel=0.05)
    assert "% of" in found[0][1].evidence and "back at" in found[1][1].evidence


def test_slower_while_tokens_vary() -> None:
    rng = random.Random(4)
    sizes = [rng.uniform(1000, 3000) for _ in range(401)]
    found = told(
        steps(400, seconds=lambda at: sizes[at] / 2000 * (2.0 if at >= 300 else 1.0), tokens=lambda at: sizes[at])
    )
    assert [event.kind for event in found] == ["slow"] and found[0].step <= 330


def test_the_baseline_does_not_follow_a_drop_that_comes_slowly() -> None:
    found = alarms(steps(3000, seconds=lambda at: 1.0 + at / 4000))
    assert [kind for kind, _ in found] == ["slow"]


def test_the_baseline_follows_a_rise() -> None:
    found = alarms(steps(600, seconds=lambda at: 2.0 if at < 100 or at >= 400 else 1.0))
    assert [kind for kind, _ in found] == ["slow"] and 400 <= found[0][1] <= 410


# -- the machine -----------------------------------------------------------------------------------------------------


def training(rules: MetricRules, rate: float, seconds: int = 60) -> float:
    """A minute with a step a second, and the ports' counters beside it; the counter at the end."""
    for step in steps(seconds):
        assert rules.step(step) == [] and rules.traffic(step.time, rate * step.time) == []
    return rate * seconds


def test_no_traffic_and_no_step() -> None:
    rules = MetricRules(MetricConfig())
    total = training(rules, 1e9)
    found = [(at, event) for at in range(61, 120) for event in rules.traffic(at, total + 1000 * (at - 60))]
    assert [(at, event.kind, event.step) for at, event in found] == [(70, "no_traffic", 60)]


@pytest.mark.parametrize("rate", [0.0, 1e4])
def test_a_job_without_traffic_misses_none(rate: float) -> None:
    rules = MetricRules(MetricConfig())
    total = training(rules, rate)
    assert [event for at in range(61, 200) for event in rules.traffic(at, total)] == []


def test_no_traffic_in_an_evaluation_or_between_slow_steps() -> None:
    rules = MetricRules(MetricConfig())
    total = training(rules, 1e9)
    assert [event for at in range(61, 200) for event in rules.traffic(at, total, is_declared=True)] == []
    rules = MetricRules(MetricConfig())
    for step in steps(40, seconds=lambda _: 10.0):
        assert rules.step(step) == [] and rules.traffic(step.time, 1e10 * step.count) == []
        assert rules.traffic(step.time + 9, 1e10 * step.count) == []
    assert rules.traffic(400 + 45, 40e10) == [] and len(rules.traffic(400 + 51, 40e10)) == 1


def test_counters_that_begin_anew() -> None:
    rules = MetricRules(MetricConfig())
    training(rules, 1e9)
    assert [event for at in range(61, 100) for event in rules.traffic(at, 5.0)] == []


def tensor(rules: MetricRules, seconds: range, activity: float, **more: bool) -> list[MetricEvent]:
    return [event for at in seconds for event in rules.tensor(float(at), "GPU 1", activity, 1.0, **more)]


def test_tensor_cores_that_were_busy() -> None:
    rules = MetricRules(MetricConfig())
    assert tensor(rules, range(100), 0.4) == [] and tensor(rules, range(100, 159), 0.03) == []
    (event,) = tensor(rules, range(159, 300), 0.03)
    assert (event.kind, event.device) == ("tensor_idle", "GPU 1") and "GPU 1" in event.evidence
    assert tensor(rules, range(300, 310), 0.4) == [] and len(tensor(rules, range(310, 400), 0.03)) == 1


def test_tensor_cores_that_never_were_or_need_not_be() -> None:
    rules = MetricRules(MetricConfig())
    assert tensor(rules, range(500), 0.03) == []
    rules = MetricRules(MetricConfig())
    assert tensor(rules, range(100), 0.4) == [] and tensor(rules, range(100, 400), 0.0, is_declared=True) == []
    idle = [event for at in range(400, 600) for event in rules.tensor(float(at), "GPU 1", 0.0, 0.3)]
    assert idle == [], "the GPU waits for something"


def test_heat_is_news_only_while_training_is_slow() -> None:
    rules = MetricRules(MetricConfig())
    for step in steps(300):
        assert rules.step(step) == []
        assert rules.heat(step.time, "GPU 0", 95, 90) == [], "hot all its life"
    late: list[MetricEvent] = []
    for step in steps(30, first=301):
        now = 300 + step.time * 1.5
        late += rules.heat(now, "GPU 0", 70, 90) + rules.heat(now, "GPU 3", 88)
        late += rules.step(Step(step=step.step, count=step.step, time=now))
    assert [(event.kind, event.device) for event in late] == [("slow", ""), ("hot_and_slow", "GPU 3")]
    assert "GPU 3 at 88 C (limit 85 C)" in late[1].evidence


def test_slow_and_cool() -> None:
    rules = MetricRules(MetricConfig())
    found = [e for step in steps(300, seconds=lambda at: 1.0 + (at > 200)) for e in rules.step(step)]
    found += [event for at in range(400, 410) for event in rules.heat(float(at), "GPU 0", 84)]
    assert [event.kind for event in found] == ["slow"]
