"""Who computes other bits: by majority, by what was stored, by its own other runs."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.locate import alignment
from evertrain.locate.alignment import Alignment, Entry, NodeRuns, RankRuns, Run, Setting, judge

H200 = Setting(device="NVIDIA H200", versions="torch 2.13.0")
L4 = Setting(device="NVIDIA L4", versions="torch 2.13.0")
PLACES = ["weights", "forward layer 0", "forward layer 1", "loss", "backward layer 1", "backward layer 0"]


def run(odd_from: int = len(PLACES), rank: int = 1, word: str = "x") -> Run:
    """Two ranks; from one place on `rank` differs, and everybody after it."""
    return tuple(
        Entry(at, place, one, f"{word}{at}" if at > odd_from or (at == odd_from and one == rank) else f"{at}")
        for one in (0, 1)
        for at, place in enumerate(PLACES)
    )


GOOD = run()


def node(name: str, *runs: Run, setting: Setting = H200) -> NodeRuns:
    return NodeRuns(node=name, setting=setting, runs=runs or (GOOD,))


def accused(found: Alignment) -> list[str]:
    return [one.node for one in found.accused]


def test_the_one_that_differs_its_place_and_its_rank() -> None:
    found = judge([node("a"), node("b", run(odd_from=2)), node("c")], {})
    (one,) = found.accused
    assert (one.node, one.place, one.ranks, one.odd_runs, one.runs) == ("b", "forward layer 1", (1,), 1, 1)
    assert found.cleared == ("a", "c")
    assert one.evidence == ("b: 1 of 1 run differ from what most nodes give, first in forward layer 1 on local rank 1")


def test_the_earliest_of_several_odd_runs() -> None:
    found = judge([node("a"), node("b", run(4), GOOD, run(1, rank=0), run(3)), node("c")], {})
    assert (found.accused[0].place, found.accused[0].ranks, found.accused[0].odd_runs) == ("forward layer 0", (0,), 3)


def test_all_agree() -> None:
    found = judge([node(name) for name in "abc"], {})
    assert found == Alignment(cleared=("a", "b", "c"), to_store=((H200, GOOD),))
    assert judge([node(name) for name in "abc"], {H200: GOOD}).to_store == ()
    # two that agree are right, but too few to be the measure of all to come
    assert judge([node("a"), node("b")], {}) == Alignment(cleared=("a", "b"))


def test_two_that_differ_need_what_was_stored() -> None:
    both = [node("a"), node("b", run(3))]
    assert accused(judge(both, {})) == []
    assert judge(both, {}).undecided == ("a", "b") and "no majority" in judge(both, {}).because[0]
    assert accused(judge(both, {H200: GOOD})) == ["b"]
    neither = judge(both, {H200: run(1)})
    assert accused(neither) == [] and "nor is any of it what was stored" in neither.because[0]


def test_a_tie_of_two_and_two() -> None:
    four = [node("a"), node("b", run(3)), node("c"), node("d", run(3))]
    assert judge(four, {}).undecided == ("a", "b", "c", "d")
    assert accused(judge(four, {H200: GOOD})) == ["b", "d"]


def test_a_node_alone() -> None:
    assert judge([node("a", run(3))], {}).undecided == ("a",)
    assert accused(judge([node("a", run(3))], {H200: GOOD})) == ["a"]
    assert judge([node("a")], {H200: GOOD}).cleared == ("a",)
    assert judge([node("a", GOOD, run(3))], {}).undecided == ("a",)


def test_most_nodes_against_what_was_stored_accuse_nobody_who_has_either() -> None:
    found = judge([node("a"), node("b"), node("c", run(1)), node("d", run(2)), node("e")], {H200: run(1)})
    assert accused(found) == ["d"] and found.undecided == ("a", "b", "c", "e") and not found.to_store
    assert "not with what was stored" in found.because[0]


def test_settings_are_not_compared() -> None:
    other = run(0)
    found = judge([node("a"), node("b"), node("x", other, setting=L4), node("y", other, setting=L4)], {})
    assert accused(found) == [] and found.cleared == ("a", "b", "x", "y")


def test_now_and_then() -> None:
    mostly = [GOOD] * 9 + [run(2)]
    found = judge([node("a", *[GOOD] * 10), node("b", *mostly), node("c", *[GOOD] * 10)], {})
    assert accused(found) == ["b"] and found.accused[0].odd_runs == 1
    assert accused(judge([node("a", *[GOOD] * 10), node("b", *mostly)], {})) == ["b"]


def test_one_of_two_that_never_repeats_itself() -> None:
    unsteady = [run(2, word=str(at)) for at in range(5)]
    found = judge([node("a", *[GOOD] * 5), node("b", *unsteady)], {})
    assert accused(found) == ["b"] and found.undecided == ("a",)
    assert found.accused[0].against == "its own other runs"


def test_a_test_that_repeats_itself_nowhere_accuses_nobody() -> None:
    nodes = [node(name, *[run(2, word=f"{name}{at}") for at in range(5)]) for name in "abcd"]
    for stored in ({}, {H200: GOOD}):
        found = judge(nodes, stored)
        assert accused(found) == [] and len(found.undecided) == 4 and "do not repeat" in found.because[0]
    sometimes = [node(name, *[GOOD] * 4, run(2, word=name)) for name in "abcd"]
    assert accused(judge(sometimes, {H200: GOOD})) == []


def test_a_rank_that_told_nothing_differs() -> None:
    half = tuple(entry for entry in GOOD if entry.rank == 0)
    assert judge([node("a"), node("b"), node("c", half)], {}).accused[0].ranks == (1,)
    assert judge([NodeRuns(node="a", setting=H200, runs=())], {}) == Alignment()


def test_runs_of_ranks_become_runs_of_a_node() -> None:
    told = {
        1: RankRuns(runs=("p", "p", "q"), records={"p": ((0, "loss", "1"),), "q": ((0, "loss", "2"),)}),
        0: RankRuns(runs=("r", "r"), records={"r": ((0, "loss", "3"),)}),
    }
    both = (Entry(0, "loss", 0, "3"), Entry(0, "loss", 1, "1"))
    assert alignment.merged(told) == (both, both)
    assert alignment.merged({}) == ()


def test_what_is_stored_can_be_written_and_read() -> None:
    stored = [(H200, GOOD)]
    assert msgspec.json.decode(msgspec.json.encode(stored), type=list[tuple[Setting, Run]]) == stored


@settings(deadline=None)
@given(st.integers(3, 12), st.data())
def test_fewer_than_half_are_found_and_nobody_else(count: int, data: st.DataObject) -> None:
    names = [f"n{at}" for at in range(count)]
    bad = data.draw(st.sets(st.sampled_from(names), max_size=(count - 1) // 2))
    nodes = [node(name, run(data.draw(st.integers(0, 5))) if name in bad else GOOD) for name in names]
    found = judge(nodes, data.draw(st.sampled_from([{}, {H200: GOOD}])))
    assert set(accused(found)) == bad and set(found.cleared) == set(names) - bad
