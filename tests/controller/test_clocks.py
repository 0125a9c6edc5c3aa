"""Neither a wall clock that is set nor nodes whose clocks differ move anything in the log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evertrain.controller.clocks import TIE_S, AgentClock, clock_of_term
from evertrain.model.clocks import Clock
from evertrain.model.report import NodeReport, PageReport, Report

RUNNING = Clock("boot-1", 1000.0)
EPOCH = 1.75e9
"""Times in this file are seconds after it: 0.0 itself would mean an unknown time."""


def heard(clock: AgentClock, *, sent: float, now: float, moved: float) -> tuple[float, float]:
    """Time of a report and of the progress in it, as the controller takes them."""
    page = PageReport(rank=0, attempt=1, pid=1, progress_time=EPOCH + moved)
    report = Report(
        job="job", run_id="job-1", term=1, time=EPOCH + sent, report=NodeReport(node="node-0", pages=(page,))
    )
    corrected = clock.corrected(report, EPOCH + now)
    return corrected.time - EPOCH, corrected.report.pages[0].progress_time - EPOCH


# -- the clock of a run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("set_by_s", [-3600.0, 0.0, 3600.0])
def test_a_successor_on_the_same_boot_counts_on_whatever_the_wall_clock_says(set_by_s: float) -> None:
    clock = clock_of_term(RUNNING, 1049.0, wall=1051.0 + set_by_s, monotonic=51.0, boot_id="boot-1")
    assert clock == RUNNING
    assert clock.at(51.0) == 1051.0


def test_elsewhere_the_wall_clock_counts_but_never_runs_behind_the_log() -> None:
    assert clock_of_term(RUNNING, 1049.0, wall=1060.0, monotonic=7.0, boot_id="boot-2").at(7.0) == 1060.0
    assert clock_of_term(RUNNING, 1049.0, wall=900.0, monotonic=7.0, boot_id="boot-2").at(7.0) == 1049.0


def test_a_new_run_begins_by_the_wall_clock_but_never_before_the_end_of_the_last_one() -> None:
    assert clock_of_term(None, 1049.0, wall=1060.0, monotonic=7.0, boot_id="boot-1").at(8.0) == 1061.0
    assert clock_of_term(None, 1049.0, wall=900.0, monotonic=7.0, boot_id="boot-1").at(8.0) == 1050.0
    assert clock_of_term(None, 0.0, wall=900.0, monotonic=7.0, boot_id="boot-1").at(7.0) == 900.0


@given(
    st.floats(0, 2e9),
    st.lists(st.tuples(st.sampled_from(["boot-1", "boot-2"]), st.floats(0, 2e9), st.floats(0, 1e6)), max_size=8),
)
def test_times_in_the_log_never_run_backwards(first: float, terms: list[tuple[str, float, float]]) -> None:
    last, before = first, RUNNING
    for boot, wall, monotonic in terms:
        before = clock_of_term(before, last, wall=wall, monotonic=monotonic, boot_id=boot)
        now = before.at(monotonic)
        assert now >= last - 1e-6
        last = now


# -- the clock of an agent ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [-3600.0, -0.3, 0.3, 3600.0])
def test_an_agents_times_become_the_controllers(ahead_s: float) -> None:
    clock = AgentClock()
    time, moved = heard(clock, sent=100.0 + ahead_s, now=100.002, moved=99.5 + ahead_s)
    assert time == pytest.approx(100.0, abs=0.003)
    assert moved == pytest.approx(99.5, abs=0.003)


@pytest.mark.parametrize("ahead_s", [-TIE_S * 0.9, 0.0, TIE_S * 0.9])
def test_small_differences_are_a_tie(ahead_s: float) -> None:
    seen = heard(AgentClock(), sent=100.0 + ahead_s, now=100.0, moved=99.0 + ahead_s)
    assert seen == pytest.approx((100.0 + ahead_s, 99.0 + ahead_s))


def test_a_report_that_was_long_on_its_way_is_no_difference_of_clocks() -> None:
    clock = AgentClock()
    # the first one knows no better
    assert heard(clock, sent=100.0, now=102.0, moved=99.0) == (102.0, 101.0)
    assert heard(clock, sent=101.0, now=102.01, moved=100.0)[1] == pytest.approx(101.01, abs=1e-6)
    assert heard(clock, sent=102.0, now=102.02, moved=101.0) == (102.0, 101.0)
    assert heard(clock, sent=103.0, now=105.0, moved=102.0) == (103.0, 102.0)


def test_a_difference_that_grows_is_seen_when_no_fast_report_of_old_speaks_against_it() -> None:
    clock = AgentClock()
    heard(clock, sent=100.0, now=100.01, moved=99.0)
    # its machine slept for an hour; ours did not
    shifts = [heard(clock, sent=100.0 + n, now=3700.01 + n, moved=99.0 + n)[1] - (99.0 + n) for n in range(1, 80)]
    assert shifts[0] == 0.0
    assert shifts[-1] == pytest.approx(3600.01, abs=1e-6)


@given(st.lists(st.floats(0, 0.5), min_size=1, max_size=200), st.floats(-1e4, 1e4))
def test_times_are_never_early_by_more_than_a_tie_nor_late_by_more_than_that_and_the_fastest_report(
    latencies: list[float], ahead_s: float
) -> None:
    clock = AgentClock()
    for number, latency in enumerate(latencies):
        true = 100.0 + number
        _, moved = heard(clock, sent=true + ahead_s, now=true + latency, moved=true + ahead_s)
        fastest = min(latencies[max(0, number - 59) : number + 1])
        assert -TIE_S - 1e-6 <= moved - true <= fastest + TIE_S + 1e-6
