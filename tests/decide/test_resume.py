"""Training goes on from the newest step that all ranks have whole, and from one past only."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from evertrain.decide.resume import Resume, Rules, choose
from evertrain.model.report import Copy


def copy(
    rank: int, step: int, attempt: int = 1, tier: Literal["memory", "disk"] = "memory", world_size: int = 2
) -> Copy:
    return Copy(rank=rank, step=step, attempt=attempt, world_size=world_size, tier=tier)


def newest_common(copies: list[Copy], world_size: int) -> Resume | None:
    return choose({"node": copies}, dict.fromkeys(range(world_size), "node"))


def test_nothing_in_common() -> None:
    assert newest_common([], 2) is None
    assert newest_common([copy(0, 5), copy(1, 4)], 2) is None


def test_the_newest_that_all_have() -> None:
    copies = [copy(0, 5), copy(0, 4), copy(0, 3), copy(1, 4), copy(1, 3)]
    assert newest_common(copies, 2) == Resume(4, {0: "memory", 1: "memory"}, 1)


def test_each_rank_reads_the_nearest_tier_that_has_it() -> None:
    copies = [copy(0, 4), copy(0, 4, tier="disk"), copy(1, 4, tier="disk")]
    assert newest_common(copies, 2) == Resume(4, {0: "memory", 1: "disk"}, 1)


def test_disk_is_used_where_memory_has_nothing_in_common() -> None:
    copies = [copy(0, 9), copy(0, 4, tier="disk"), copy(1, 4, tier="disk"), copy(1, 8)]
    choice = newest_common(copies, 2)
    assert choice is not None and choice.step == 4


def test_two_pasts_are_never_mixed() -> None:
    """Both attempts reached step 5, but each rank has the copy of another one."""
    assert newest_common([copy(0, 5, attempt=1), copy(1, 5, attempt=2)], 2) is None


def test_shards_of_another_world_size_are_set_aside() -> None:
    copies = [copy(0, 9, world_size=4), copy(1, 9, world_size=4), copy(0, 3), copy(1, 3)]
    choice = newest_common(copies, 2)
    assert choice is not None and choice.step == 3


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 6), st.integers(1, 2)), max_size=40))
def test_the_choice_is_whole_and_nothing_newer_is(seen: list[tuple[int, int, int]]) -> None:
    copies = [copy(rank, step, attempt, world_size=4) for rank, step, attempt in seen]
    choice = newest_common(copies, 4)
    whole = {
        (step, attempt)
        for step in range(7)
        for attempt in (1, 2)
        if {one.rank for one in copies if (one.step, one.attempt) == (step, attempt)} == {0, 1, 2, 3}
    }
    assert (choice is None) == (not whole)
    if choice is not None:
        assert choice.step == max(whole)[0] and sorted(choice.tiers) == [0, 1, 2, 3]


def test_a_copy_that_a_later_attempt_went_back_behind_is_void() -> None:
    copies = {"node": [copy(0, 5), copy(1, 5), copy(0, 3), copy(1, 3)]}
    placement = dict.fromkeys(range(2), "node")
    assert choose(copies, placement, Rules(lineage=((1, -1), (2, 5)))) == Resume(5, {0: "memory", 1: "memory"}, 1)
    assert choose(copies, placement, Rules(lineage=((1, -1), (2, 3)))) == Resume(3, {0: "memory", 1: "memory"}, 1)
    assert choose(copies, placement, Rules(lineage=((1, -1), (2, -1)))) is None


def test_copies_of_an_earlier_life_or_of_another_node_do_not_count() -> None:
    both = [copy(0, 5), copy(1, 5)]
    assert choose({"node": both}, dict.fromkeys(range(2), "node"), Rules(first_attempt=2)) is None
    assert choose({"node": both}, {0: "node", 1: "other"}) is None
