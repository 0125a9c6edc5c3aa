"""What a program calls at a place every time, and where it departs from that."""

import time

from evertrain.locate.habit import departures

STEP = "abcabdxy"


def test_who_repeats_himself_departs_from_nothing() -> None:
    assert list(departures(STEP * 20 + STEP[:5])) == []


def test_a_call_left_out_is_named_with_the_place() -> None:
    calls = STEP * 4 + "abcabdy"
    assert next(departures(calls)) == (len(calls) - 1, "x")


def test_one_earlier_round_is_enough_and_none_is_not() -> None:
    assert next(departures(STEP + "abcaby")) == (len(STEP) + 5, "d")
    assert list(departures("abcaby")) == []


def test_the_newest_comes_first() -> None:
    calls = STEP * 4 + "abcay" + STEP * 4 + "abcx"
    assert next(usual for _, usual in departures(calls)) == "a"


def test_two_ways_to_go_on_are_both_usual() -> None:
    calls = "abcdef" + "abcdeg" + "xyz" + "abcdeg"
    assert list(departures(calls)) == [(11, "f")]  # the first time only


def test_what_is_long_over_is_left_alone_and_long_pasts_are_cut() -> None:
    assert list(departures(STEP * 10 + "abcx" + STEP * 20)) == []
    calls = STEP * 1_000 + "abcaby"
    began = time.process_time()
    assert next(departures(calls)) == (len(calls) - 1, "d")
    assert time.process_time() - began < 1


def test_few_calls() -> None:
    assert list(departures("")) == list(departures("a")) == []
