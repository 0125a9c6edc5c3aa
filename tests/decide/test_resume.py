"""Training goes on from the newest step that all ranks have whole, and from one past only."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from evertrain.decide.resume import Resume, Rules, choose, elsewhere, survives_any_node
from evertrain.model.copies import Backup, Copy, Failed, Part, Pinned
from evertrain.model.report import NodeReport


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


# --- copies on other nodes


PLACED = {0: "a", 1: "a", 2: "b", 3: "b"}
OWN = {rank: Part(f"own-{rank}", 10) for rank in PLACED}
MODEL = Part("model", 100)


def backup(step: int, *ranks: int, model: bool = False, world_size: int = 4) -> Backup:
    """A node keeps these ranks' heads and own parts, and the model, which all ranks have in common."""
    heads = {rank: (MODEL, OWN[rank]) for rank in ranks}
    parts = [OWN[rank] for rank in ranks] + [MODEL] * model
    return Backup(attempt=1, step=step, world_size=world_size, heads=heads, parts=tuple(parts))


def pinned(step: int, *ranks: int) -> tuple[Pinned, ...]:
    return tuple(Pinned(rank=rank, attempt=1, step=step, world_size=4, parts=(MODEL, OWN[rank])) for rank in ranks)


def whole(*ranks: int, step: int) -> tuple[Copy, ...]:
    return tuple(copy(rank, step, world_size=4) for rank in ranks)


def after_losing_b(a: NodeReport, b: NodeReport | None = None) -> Resume | None:
    reports = {"a": a, "b": b or NodeReport(node="b")}
    copies = {node: report.copies for node, report in reports.items()}
    return choose(copies, PLACED, elsewhere=elsewhere(reports, PLACED))


def test_ranks_of_a_node_that_lost_everything_get_their_state_from_others() -> None:
    kept = NodeReport(
        node="a", copies=whole(0, 1, step=9) + whole(0, 1, step=5), pinned=pinned(5, 0, 1), backups=(backup(5, 2, 3),)
    )
    assert after_losing_b(kept) == Resume(5, {0: "memory", 1: "memory"}, 1, {2: ("a",), 3: ("a",)})


def test_without_every_piece_there_is_nothing_to_get() -> None:
    no_model = NodeReport(node="a", copies=whole(0, 1, step=5), backups=(backup(5, 2, 3),))
    assert after_losing_b(no_model) is None
    one_head = NodeReport(node="a", copies=whole(0, 1, step=5), backups=(backup(5, 2, model=True),))
    assert after_losing_b(one_head) is None
    other_size = NodeReport(node="a", copies=whole(0, 1, step=5), backups=(backup(5, 2, 3, model=True, world_size=8),))
    assert after_losing_b(other_size) is None


def test_a_newer_step_of_ones_own_is_preferred() -> None:
    kept = NodeReport(node="a", copies=whole(0, 1, step=9), backups=(backup(5, 2, 3, model=True),))
    assert after_losing_b(kept, NodeReport(node="b", copies=whole(2, 3, step=9))) == Resume(
        9, dict.fromkeys(PLACED, "memory"), 1
    )


def test_a_fetch_that_failed_is_not_tried_again() -> None:
    kept = NodeReport(
        node="a",
        copies=whole(0, 1, step=5) + whole(0, 1, step=3),
        backups=(backup(3, 2, 3, model=True), backup(5, 2, 3, model=True)),
    )
    broken = Failed(rank=3, attempt=1, step=5, because="damaged")
    choice = after_losing_b(kept, NodeReport(node="b", failed_fetches=(broken,)))
    assert choice is not None and choice.step == 3


def test_a_rank_that_moved_takes_its_copy_along() -> None:
    reports = {"a": NodeReport(node="a", copies=whole(0, 1, 2, step=5)), "c": NodeReport(node="c", copies=())}
    found = elsewhere(reports, {0: "a", 1: "a", 2: "c"})
    assert found == {} or found[1, 5] == {}, "copies of four ranks do not fit three"
    assert elsewhere(reports, {0: "a", 1: "a", 2: "c", 3: "c"}) == {(1, 5): {2: ("a",)}}


def test_what_survives_any_node() -> None:
    a = NodeReport(node="a", pinned=pinned(5, 0, 1), backups=(backup(5, 2, 3),))
    b = NodeReport(node="b", pinned=pinned(5, 2, 3), backups=(backup(5, 0, 1),))
    assert survives_any_node({"a": a, "b": b}, PLACED, Rules()) == 5
    assert survives_any_node({"a": a, "b": b}, PLACED, Rules(lineage=((2, 4),))) is None
    for lacking in (NodeReport(node="b"), replace(b, backups=()), replace(b, pinned=())):
        assert survives_any_node({"a": a, "b": lacking}, PLACED, Rules()) is None


# --- copies that attempts went wrong with


def copies_of(*steps: int) -> dict[str, list[Copy]]:
    return {"node": [copy(rank, step) for rank in (0, 1) for step in steps]}


def test_a_copy_that_was_tried_often_enough_is_left_for_another_tier_else_an_older_step() -> None:
    placement = dict.fromkeys(range(2), "node")
    spent = Rules(spent=frozenset({((1, 5), rank, "memory") for rank in (0, 1)}))
    there = copies_of(4, 5)
    assert choose(there, placement) == Resume(5, {0: "memory", 1: "memory"}, 1)
    assert choose(there, placement, spent) == Resume(4, {0: "memory", 1: "memory"}, 1)
    there["node"] += [copy(rank, 5, tier="disk") for rank in (0, 1)]
    assert choose(there, placement, spent) == Resume(5, {0: "disk", 1: "disk"}, 1)


def test_what_was_tried_is_not_fetched_once_more() -> None:
    placement = {0: "a", 1: "b"}
    spent = Rules(spent=frozenset({((1, 5), 1, "memory")}))
    own = {"a": [copy(0, 5)], "b": [copy(1, 5)]}
    assert choose(own, placement, spent, elsewhere={(1, 5): {1: ("a",)}}) is None
