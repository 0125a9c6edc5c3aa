"""One training step is one step of the optimizer that steps most rarely."""

from __future__ import annotations

from collections.abc import Iterable

from evertrain.worker.steps import Durations, StepCounter


def count(keys: Iterable[int], counter: StepCounter | None = None) -> int:
    counter = counter or StepCounter()
    return sum(counter.stepped(key) for key in keys)


def test_one_optimizer() -> None:
    assert count([1] * 7) == 7


def test_two_that_take_turns_count_once_a_turn() -> None:
    assert count([1, 2] * 50) == 50


def test_the_rarer_one_counts() -> None:
    """A GAN: five steps of the critic, one of the generator. Only the first turn cannot know it yet."""
    counter = StepCounter()
    first = count([1, 1, 1, 1, 1, 2], counter)
    assert first <= 6
    assert count([1, 1, 1, 1, 1, 2] * 20, counter) == 20


def test_the_rarer_one_counts_when_it_comes_first() -> None:
    counter = StepCounter()
    count([2, 1, 1, 1, 1, 1] * 2, counter)
    assert count([2, 1, 1, 1, 1, 1] * 20, counter) == 20


def test_one_optimizer_per_parameter() -> None:
    counter = StepCounter()
    count(range(200), counter)
    assert count(list(range(200)) * 10, counter) == 10


def test_an_optimizer_that_is_done_does_not_hold_up_the_count() -> None:
    counter = StepCounter()
    count([1] * 30, counter)
    later = count([2] * 100, counter)
    assert 60 <= later <= 100
    assert count([2] * 50, counter) == 50


def test_the_generator_may_stop() -> None:
    counter = StepCounter()
    count([1, 1, 2] * 10, counter)
    count([1] * 60, counter)
    assert count([1] * 50, counter) == 50


def test_median_of_the_last_steps() -> None:
    durations = Durations()
    assert durations.ended(10**9) == 0.0
    at = 10**9
    for duration_s in (1, 1, 9, 1, 1):
        at += duration_s * 10**9
        durations.ended(at)
    assert durations.median_s == 1.0
