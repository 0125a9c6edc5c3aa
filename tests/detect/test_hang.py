"""A job hangs: on whom, since when, and may it be acted upon? Cases as they look to the controller."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from evertrain.detect.hang import Hang, find_hang
from evertrain.model.activity import Operation, RankActivity
from evertrain.model.config import HangConfig

CONFIG = HangConfig()
STEP_7 = Operation("0", "allreduce", 7)
STEP_6 = Operation("0", "allreduce", 6)


def rank(number: int, still_s: float = 11.0, **more: Any) -> RankActivity:
    idle = {"cpu_fraction": 0.0, "io_bytes_per_s": 0.0, "faults_per_s": 0.0}
    fields: dict[str, Any] = {"inside": STEP_7, "last": STEP_7, "started": True, "step_s": 0.2, **idle, **more}
    return RankActivity(rank=number, node=f"node-{number // 2}", still_s=still_s, **fields)


def outside(number: int, **more: Any) -> RankActivity:
    return rank(number, **{"inside": None, "last": STEP_6, **more})


def find(*ranks: RankActivity, config: HangConfig = CONFIG, stretch: float = 1.0) -> Hang | None:
    return find_hang(ranks, 4, config, stretch=stretch)


def test_nothing_before_suspicion() -> None:
    assert find(*(rank(number, still_s=2.0) for number in range(4))) is None
    assert find() is None


def test_a_rank_outside_that_does_nothing_is_named_and_others_are_not() -> None:
    hang = find(rank(0), rank(1), outside(2), rank(3))
    assert hang is not None and hang.is_due
    assert (hang.kind, hang.ranks, hang.nodes) == ("still", (2,), ("node-1",))
    assert "others wait for it in allreduce number 7 of group 0" in hang.evidence[0]


def test_it_is_suspected_before_it_is_due() -> None:
    hang = find(*(rank(number, still_s=6.0) for number in (0, 1, 3)), outside(2, still_s=6.0))
    assert hang is not None and hang.ranks == (2,) and not hang.is_due


def test_a_stopped_rank_is_named_even_inside_a_collective() -> None:
    hang = find(rank(0), rank(1, stopped=True), rank(2), rank(3))
    assert hang is not None and (hang.kind, hang.ranks) == ("stopped", (1,))


def test_no_start_and_no_phase_explains_a_stopped_rank() -> None:
    starting = [outside(number, started=False, last=None, cpu_fraction=0.9) for number in (0, 1, 3)]
    hang = find(*starting, outside(2, started=False, last=None, stopped=True))
    assert hang is not None and (hang.kind, hang.ranks, hang.is_due) == ("stopped", (2,), True)
    hang = find(outside(0, phase="evaluate", stopped=True), rank(1), rank(2), rank(3))
    assert hang is not None and hang.is_due


def test_a_rank_that_works_is_named_but_left_alone_for_long() -> None:
    evaluating = outside(0, cpu_fraction=0.98)
    hang = find(evaluating, rank(1), rank(2), rank(3))
    assert hang is not None and (hang.kind, hang.ranks, hang.is_due) == ("busy", (0,), False)
    assert "evertrain.phase" in hang.evidence[0]
    late = find(*(rank(number, still_s=601.0) for number in (1, 2, 3)), outside(0, still_s=601.0, cpu_fraction=0.98))
    assert late is not None and late.is_due


def test_io_and_faults_are_work_too() -> None:
    for work in ({"io_bytes_per_s": 1e6}, {"faults_per_s": 500.0}):
        hang = find(outside(0, **work), rank(1), rank(2), rank(3))
        assert hang is not None and hang.kind == "busy"


def test_somebody_at_a_debuggers_prompt_is_at_work() -> None:
    hang = find(outside(0, reads_stdin=True), rank(1), rank(2), rank(3))
    assert hang is not None and (hang.kind, hang.is_due) == ("busy", False)
    assert "waits for its standard input" in hang.evidence[0]


def test_nobody_is_judged_before_anybody_has_looked() -> None:
    unknown = {"cpu_fraction": None, "io_bytes_per_s": None, "faults_per_s": None}
    assert find(outside(0, **unknown), rank(1), rank(2), rank(3)) is None


def test_a_stale_inside_is_seen_through_by_its_number() -> None:
    # C++ waited for number 6 and nobody told; the others are one further
    hang = find(rank(0), rank(1), rank(2, inside=STEP_6, last=STEP_6), rank(3))
    assert hang is not None and (hang.kind, hang.ranks) == ("still", (2,))


def test_all_in_one_operation_and_nothing_moves_blames_nobody() -> None:
    hang = find(*(rank(number) for number in range(4)))
    assert hang is not None and (hang.kind, hang.ranks) == ("stuck", ())


def test_operations_that_never_meet_are_listed_and_the_odd_one_is_named() -> None:
    other = Operation("0", "broadcast", 7)
    hang = find(rank(0), rank(1), rank(2), rank(3, inside=other, last=other))
    assert hang is not None and (hang.kind, hang.ranks) == ("mismatch", (3,))
    assert len(hang.evidence) == 2


def test_two_groups_that_wait_for_each_other_blame_nobody() -> None:
    first, second = Operation("1", "allreduce", 3), Operation("2", "allreduce", 3)
    hang = find(*(rank(n, inside=op, last=op) for n, op in enumerate((first, first, second, second))))
    assert hang is not None and (hang.kind, hang.ranks) == ("mismatch", ())


def test_verdicts_about_all_wait_until_all_are_seen() -> None:
    assert find(rank(0), rank(1), rank(2)) is None


def test_one_rank_that_moves_means_no_hang() -> None:
    assert find(rank(0), outside(1), rank(2), rank(3, still_s=0.5)) is None


def test_start_and_declared_phases_have_limits_of_their_own() -> None:
    importing = [outside(number, started=False, last=None, still_s=60.0) for number in range(4)]
    assert find(*importing) is None
    evaluating = [outside(0, phase="evaluate", still_s=60.0), *(rank(n, still_s=60.0) for n in (1, 2, 3))]
    assert find(*evaluating) is None


def test_long_steps_stretch_the_limit_and_so_does_a_repeat() -> None:
    slow = [outside(0, step_s=30.0, still_s=100.0), *(rank(n, step_s=30.0, still_s=100.0) for n in (1, 2, 3))]
    hang = find(*slow)
    assert hang is not None and hang.limit_s == 150.0 and not hang.is_due
    again = find(rank(0), rank(1), outside(2), rank(3), stretch=2.0)
    assert again is not None and again.limit_s == 20.0 and not again.is_due


activities = st.builds(
    rank,
    st.integers(0, 3),
    still_s=st.floats(0, 1000),
    inside=st.sampled_from([None, STEP_6, STEP_7]),
    last=st.sampled_from([None, STEP_6, STEP_7]),
    stopped=st.booleans(),
    cpu_fraction=st.sampled_from([None, 0.0, 0.5]),
    started=st.booleans(),
    phase=st.sampled_from(["", "evaluate"]),
)


@given(st.lists(activities, max_size=4, unique_by=lambda one: one.rank))
def test_a_verdict_has_evidence_and_blames_only_who_was_seen(ranks: list[RankActivity]) -> None:
    hang = find(*ranks)
    if hang is not None:
        assert hang.evidence
        assert set(hang.ranks) <= {one.rank for one in ranks}
        assert hang.for_s == min(one.still_s for one in ranks)
