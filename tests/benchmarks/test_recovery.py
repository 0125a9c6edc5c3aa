"""What the recovery benchmark reads out of a job's events."""

from __future__ import annotations

from typing import Any

import pytest

import recovery
from recovery import NotRecovered, Outcome, read_outcome

BEGAN = 100.0


def steps(rank: int, first: int, last: int, *, at: float, every: float = 0.1) -> list[dict[str, Any]]:
    return [
        {"event": "step", "rank": rank, "step": step, "time": at + (step - first) * every}
        for step in range(first, last + 1)
    ]


def job(*, resumed: int, ready_at: float, slower: float = 0.0) -> list[dict[str, Any]]:
    """Two ranks finish steps 1 to 12 by 106.1, a kill at 106.2, and steps on from `resumed`."""
    before = [*steps(0, 1, 12, at=105.0), *steps(1, 1, 12, at=105.0)]
    kill = {"event": "kill", "rank": 1, "step": 13, "time": 106.2}
    ready = [{"event": "ready", "rank": rank, "step": resumed, "time": ready_at} for rank in (0, 1)]
    after = [*steps(0, resumed + 1, 18, at=ready_at + 0.1), *steps(1, resumed + 1, 18, at=ready_at + 0.1 + slower)]
    return sorted([*before, kill, *ready, *after], key=lambda event: event["time"])


def test_the_slowest_rank_counts() -> None:
    outcome = read_outcome(job(resumed=12, ready_at=106.4, slower=0.05), 2, BEGAN)
    assert outcome.recovery_s == pytest.approx(0.35)
    assert outcome.start_s == pytest.approx(5.0)
    assert outcome.steps_redone == 0


def test_steps_done_again_are_paid_for_and_stated() -> None:
    outcome = read_outcome(job(resumed=10, ready_at=112.0), 2, BEGAN)
    assert outcome.recovery_s == pytest.approx(6.1)
    assert outcome.steps_redone == 2


def test_a_rank_that_never_came_back_is_not_recovered() -> None:
    events = [event for event in job(resumed=12, ready_at=106.4) if event["rank"] == 0 or event["time"] <= 106.2]
    with pytest.raises(NotRecovered, match="1 of 2 ranks finished step 13"):
        read_outcome(events, 2, BEGAN)


def test_a_job_that_was_not_killed_measures_nothing() -> None:
    events = [event for event in job(resumed=12, ready_at=106.4) if event["event"] != "kill"]
    with pytest.raises(NotRecovered, match="0 kills"):
        read_outcome(events, 2, BEGAN)


def test_figures_compare_with_the_best_of_the_others() -> None:
    outcomes = {
        ("evertrain", 4): [Outcome(2.0, 0.2, 0), Outcome(3.0, 0.4, 0), Outcome(2.5, 0.3, 0)],
        ("torchrun", 4): [Outcome(5.0, 6.0, 2)],
        ("ft_launcher", 4): [Outcome(5.0, 5.0, 2)],
        ("evertrain", 8): [Outcome(4.0, 0.5, 0)],
        ("torchrun", 8): [Outcome(9.0, 10.0, 2)],
    }
    assert recovery.figures_of(outcomes) == pytest.approx(
        {
            "evertrain_kill_median_s": 0.3,
            "torchrun_kill_median_s": 6.0,
            "ft_launcher_kill_median_s": 5.0,
            "evertrain_kill_median_s_8": 0.5,
            "torchrun_kill_median_s_8": 10.0,
            "kill_ratio_to_best_peer": 0.06,
            "kill_ratio_to_best_peer_8": 0.05,
            "start_ratio_to_torchrun": 0.5,
        }
    )
