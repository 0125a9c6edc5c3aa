"""How many standby nodes does a job need? As many as fail on a bad day, and no more.

    failures of one day ~ Binomial(nodes, daily failure rate of one node)      standbys: its 99th percentile

The rate is given, or learnt from what the nodes here have gone through (`decide.history`). Where
that is little, the estimate lies on the safe side.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, Context
from fractions import Fraction
from math import exp

import msgspec

from evertrain.decide.history import History
from evertrain.model.words import counted

QUANTILE = 0.99
USUAL_RATE = 0.0012
"""Failures of a node and day in ByteRobust's clusters (SOSP'25): the rate that gives their published numbers of
standbys, 2, 2, 3 and 4 for 128 to 1,024 nodes."""
ENOUGH_FAILURES = 30
"""From so many on they are counted and nothing is added."""
CONFIDENCE = 0.95


def standbys(nodes: int, daily_failure_rate: float, quantile: float = QUANTILE) -> int:
    """The smallest number that the failures of a day do not exceed, with probability `quantile` at least.

    In whole numbers, so that no rounding decides where a sum just reaches the quantile.
    """
    rate, wanted = Fraction(str(daily_failure_rate)), Fraction(str(quantile))
    fails, all_ = rate.numerator, rate.denominator
    stays = all_ - fails
    if stays == 0:
        return nodes
    whole = all_**nodes
    # of `whole` equally likely days, those on which exactly `number` nodes fail
    days = stays**nodes
    reached, number = days, 0
    while reached * wanted.denominator < wanted.numerator * whole:
        days = days * (nodes - number) * fails // ((number + 1) * stays)
        reached, number = reached + days, number + 1
    return number


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """How often a node fails, and how that is known."""

    daily: float
    """Failures of one node and day."""
    is_bound: bool
    """The history is short: the rate is likely to be lower."""
    because: str


def learnt(history: History) -> Rate:
    """The rate that a history shows: counted where there are failures enough, else bounded from above.

    The bound is the usual one for counts (one-sided, 95 %). Days in which the usual machine fails once count as well,
    as days without a failure; else an hour without failures could not rule out hundreds a day.
    """
    seen = f"{counted(history.failures, 'failure')} in {_days(history.node_days)} node-days"
    if history.failures >= ENOUGH_FAILURES:
        return Rate(daily=_rounded_up(history.failures / history.node_days), is_bound=False, because=seen)
    before = 1 / USUAL_RATE
    bound = _most_likely_at_most(history.failures) / (history.node_days + before)
    because = (
        f"{seen}, which is little: the {CONFIDENCE:.0%} upper bound, after {before:.0f} node-days without a failure "
        f"(what ByteRobust's machines last, at {USUAL_RATE:g} a day)"
    )
    return Rate(daily=_rounded_up(bound), is_bound=True, because=because)


def _most_likely_at_most(failures: int) -> float:
    """The largest mean at which so few failures, or fewer, still have a chance of 1 - CONFIDENCE."""
    low, high = 0.0, 10.0 * (failures + 1)
    for _ in range(60):
        middle = (low + high) / 2
        if _chance_of_at_most(failures, middle) > 1 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _chance_of_at_most(failures: int, mean: float) -> float:
    term = total = exp(-mean)
    for number in range(1, failures + 1):
        term *= mean / number
        total += term
    return total


def _rounded_up(rate: float) -> float:
    """To three digits: more would claim what nobody knows. A node fails no more than once a day here."""
    return min(1.0, float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(str(rate))))


def _days(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
