"""How many standbys are enough, at a rate that is given, and at one that a history shows."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.decide.history import History
from evertrain.decide.sizing import ENOUGH_FAILURES, USUAL_RATE, learnt, standbys
from support.effort import examples


@pytest.mark.parametrize(("nodes", "number"), [(128, 2), (256, 2), (512, 3), (1024, 4), (1200, 5)])
def test_the_published_numbers(nodes: int, number: int) -> None:
    assert standbys(nodes, USUAL_RATE) == number


@pytest.mark.parametrize("rate", [0.00117, 0.00125])
def test_they_hold_for_rates_nearby(rate: float) -> None:
    assert [standbys(nodes, rate) for nodes in (128, 256, 512, 1024)] == [2, 2, 3, 4]


def test_the_edges() -> None:
    assert standbys(1024, 0.0) == 0
    assert standbys(7, 1.0) == 7
    # one node that stays well on exactly 99 days of 100 needs no spare, and at the next rate it does
    assert standbys(1, 0.01) == 0
    assert standbys(1, 0.010000001) == 1
    assert standbys(1, 0.5, quantile=0.5) == 0


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 60), st.integers(0, 1000), st.integers(1, 999))
def test_it_is_the_smallest_number_that_suffices(nodes: int, per_mille: int, quantile_per_mille: int) -> None:
    rate, wanted = Fraction(per_mille, 1000), Fraction(quantile_per_mille, 1000)
    number = standbys(nodes, per_mille / 1000, quantile_per_mille / 1000)

    def at_most(failures: int) -> Fraction:
        chances = (comb(nodes, k) * rate**k * (1 - rate) ** (nodes - k) for k in range(failures + 1))
        return sum(chances, Fraction(0))

    assert at_most(number) >= wanted
    assert number == 0 or at_most(number - 1) < wanted


def test_thousands_of_nodes_are_no_trouble() -> None:
    assert 165 <= standbys(100_000, 0.00137) <= 168


def test_with_much_history_failures_are_counted() -> None:
    rate = learnt(History(node_days=1_000_000.0, failures=1200))
    assert (rate.daily, rate.is_bound) == (0.0012, False)
    assert rate.because == "1200 failures in 1,000,000 node-days"
    assert standbys(1024, rate.daily) == 4


def test_with_little_history_the_rate_is_an_upper_bound_that_says_so() -> None:
    rate = learnt(History(node_days=2000.0, failures=0))
    # the rule of three: no failure in 2000 + 833 days
    assert rate.is_bound and rate.daily == pytest.approx(3.0 / 2833, rel=0.01)
    assert rate.because.startswith("0 failures in 2,000 node-days, which is little: the 95% upper bound, after 833")


@pytest.mark.parametrize(("failures", "at_most"), [(1, 4.744), (2, 6.296), (10, 16.962), (29, 39.54)])
def test_the_bound_is_the_one_in_the_tables(failures: int, at_most: float) -> None:
    days = 1e6
    rate = learnt(History(node_days=days, failures=failures))
    assert rate.daily == pytest.approx(at_most / days, rel=0.005)


def test_a_short_trial_does_not_ask_for_a_spare_for_every_node() -> None:
    rate = learnt(History(node_days=0.003, failures=1))
    assert standbys(4, rate.daily) == 1


@given(st.floats(1e-6, 1e7), st.integers(0, 2 * ENOUGH_FAILURES))
def test_it_is_never_more_than_once_a_day_nor_less_than_what_was_seen(days: float, failures: int) -> None:
    rate = learnt(History(days, failures))
    assert 0 < rate.daily <= 1
    if not rate.is_bound:
        assert rate.daily >= min(1.0, failures / days) * (1 - 1e-12)
