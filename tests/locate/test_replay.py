"""Dual-phase replay: which groups run, and what their results come to."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.locate import replay
from evertrain.locate.replay import Conclusion, Division, Group, Replay, divide

Outcome = Callable[[Group], str | None]


def names(count: int) -> list[str]:
    return [f"node-{x}" for x in range(count)]


def play(started: Replay, outcome: Outcome) -> tuple[Conclusion, Replay]:
    while groups := started.asked:
        in_use = [node for group in groups for node in group.nodes]
        assert len(set(in_use)) == len(in_use), "groups that run at the same time share a node"
        assert {len(group.nodes) for group in groups} == {started.division.m}
        started = started.taken([outcome(group) for group in groups])
    assert started.conclusion is not None
    return started.conclusion, started


def faulty(*nodes: int, p: float = 1.0, seed: int = 0, wrong: str = "") -> Outcome:
    """A fault shows with probability p in each run, and never twice as the same number unless `wrong`."""
    draw = random.Random(seed)
    bad = {f"node-{x}" for x in nodes}

    def outcome(group: Group) -> str:
        shows = [node for node in group.nodes if node in bad and (p == 1.0 or draw.random() < p)]
        return (wrong or f"bad-{draw.random()}") if shows else "good"

    return outcome


def found(count: int, replica: int, outcome: Outcome, repeats: int = replay.REPEATS) -> Conclusion:
    return play(replay.begin(names(count), replica, repeats), outcome)[0]


def named(nodes: Collection[int]) -> tuple[str, ...]:
    return tuple(f"node-{x}" for x in sorted(nodes))


def test_the_example_of_the_paper() -> None:
    assert divide(24, 4) == Division(4, 6)
    conclusion, end = play(replay.begin(names(24), 4), faulty(13))
    assert conclusion.nodes == ("node-13",) and conclusion.suspects == () and conclusion.confidence == replay.SURE
    horizontal, vertical, again = end.rounds
    assert horizontal[3].group.nodes == named({12, 13, 14, 15}) and horizontal[3].digest != "good"
    assert vertical[1].group.nodes == named({1, 7, 13, 19})
    assert [result.group.phase for result in again] == ["retest", *["control"] * 3]
    assert (
        "horizontal groups 3" not in conclusion.because
        and "horizontal group 3 and vertical group 1" in conclusion.because
    )


@pytest.mark.parametrize(
    ("nodes", "replica", "division"),
    [
        (256, 8, Division(16, 16)),  # k = 2: 16 <= 16
        (1024, 16, Division(32, 32)),
        (2048, 16, Division(32, 64)),
        (64, 8, Division(8, 8)),
        (24, 1, Division(4, 6)),
        (6, 1, Division(2, 3)),
        (31, 1, Division(1, 31)),
        (4, 2, Division(2, 2)),
        (32, 16, Division(16, 2)),  # no k leaves m <= n
        (5, 5, Division(5, 1)),
    ],
)
def test_sizes_of_groups(nodes: int, replica: int, division: Division) -> None:
    assert divide(nodes, replica) == division
    assert division.nodes == nodes


def test_nodes_that_are_no_whole_number_of_replicas() -> None:
    with pytest.raises(ValueError, match="10 nodes"):
        divide(10, 4)
    with pytest.raises(ValueError, match="twice"):
        replay.begin(["a", "a"], 1)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_solutions_are_all_nodes_in_both_groups(m: int, n: int, data: st.DataObject) -> None:
    division = Division(m, n)
    a, b = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))
    both = set(division.members("horizontal", a)) & set(division.members("vertical", b))
    assert set(division.solutions(a, b)) == both
    assert len(both) <= division.most_solutions
    for phase in ("horizontal", "vertical"):
        assert sorted(x for number in range(n) for x in division.members(phase, number)) == list(range(m * n))  # type: ignore[arg-type]


def find_one(z: int, draw: random.Random) -> None:
    replica = draw.choice([size for size in range(1, min(z // 2, 64) + 1) if z % size == 0])
    division = divide(z, replica)
    bad = draw.randrange(z)
    conclusion, end = play(replay.begin(names(z), replica), faulty(bad, seed=z))
    if z <= 3 or division.n == 2:
        assert conclusion.nodes in ((), named({bad})), (z, replica, bad)  # two groups: nobody says which is right
        return
    assert conclusion.nodes == named({bad}) and not conclusion.suspects, (z, replica, bad)
    if 1 < division.m <= division.n:
        assert len(end.rounds) == 3, "two replays find it, and one more confirms it"


def test_a_random_faulty_node_of_any_number_of_nodes() -> None:
    draw = random.Random(1)
    for z in [*range(2, 66), *draw.sample(range(66, 4096), 16), 4096]:
        find_one(z, draw)


@pytest.mark.matrix
@pytest.mark.parametrize("first", range(2, 4097, 512))
@pytest.mark.timeout(300)
def test_a_random_faulty_node_of_every_number_of_nodes(first: int) -> None:
    draw = random.Random(first)
    for z in range(first, min(first + 512, 4097)):
        find_one(z, draw)


def test_more_than_one_solution_is_tried_one_by_one() -> None:
    # m = 16, n = 4: each pair of groups has four nodes in common
    conclusion, end = play(replay.begin(names(64), 16), faulty(37))
    assert conclusion.nodes == ("node-37",) and conclusion.confidence == replay.SURE
    assert {result.group.phase for result in end.rounds[2]} >= {"retest"}
    assert all(
        "node-37" not in result.group.nodes or result.group.number == 37 for one in end.rounds[2:] for result in one
    )


@pytest.mark.parametrize("bad", [(3, 22), (12, 13), (1, 7), (0, 23)])
def test_several_faulty_nodes(bad: tuple[int, ...]) -> None:
    conclusion = found(24, 4, faulty(*bad))
    assert conclusion.nodes == named(bad) and conclusion.suspects == ()


def test_three_faulty_nodes_of_many() -> None:
    assert found(256, 8, faulty(2, 109, 216)).nodes == named({2, 109, 216})


def test_too_many_faulty_nodes_are_not_told_from_a_script_that_is_not_deterministic() -> None:
    conclusion = found(24, 4, faulty(2, 9, 16))
    assert conclusion.nodes == () and conclusion.suspects and "not deterministic" in conclusion.because


def test_two_faulty_nodes_that_give_the_same_wrong_numbers() -> None:
    assert found(24, 4, faulty(3, 22, wrong="bad")).nodes == named({3, 22})


def test_nothing_differs() -> None:
    conclusion, end = play(replay.begin(names(24), 4), faulty())
    assert conclusion.nodes == () == conclusion.suspects
    assert len(end.rounds) == 2 * replay.REPEATS and "agree bit by bit in 6 replays" in conclusion.because


def test_a_fault_that_shows_now_and_then() -> None:
    right = 0
    for seed in range(60):
        bad = seed % 6
        conclusion = found(6, 1, faulty(bad, p=0.1, seed=seed), repeats=40)
        right += conclusion.nodes == named({bad})
        assert conclusion.nodes in ((), named({bad})), "somebody else is accused"
        if conclusion.nodes:
            assert conclusion.confidence <= replay.SURE
    assert right >= 54


def test_a_fault_that_shows_now_and_then_among_several_solutions() -> None:
    right = 0
    for seed in range(60):
        conclusion = found(64, 16, faulty(seed, p=0.3, seed=seed), repeats=20)
        right += conclusion.nodes == named({seed})
        assert conclusion.nodes in ((), named({seed}))
    assert right >= 55


def test_a_fault_that_showed_in_one_direction_only_names_suspects() -> None:
    shown = iter([True])
    conclusion = found(24, 4, lambda group: "bad" if "node-13" in group.nodes and next(shown, False) else "good")
    assert conclusion.nodes == () and conclusion.suspects == named({12, 13, 14, 15})
    assert conclusion.confidence == replay.UNSURE


def test_a_pair_of_groups_without_a_common_node_is_inconclusive() -> None:
    def outcome(group: Group) -> str:
        # m = 4, n = 6: horizontal group 0 is 0..3, vertical group 5 begins at 5
        return "bad" if (group.phase, group.number) in (("horizontal", 0), ("vertical", 5)) else "good"

    conclusion = found(24, 4, outcome)
    assert conclusion.nodes == () and set(conclusion.suspects) == {*named({0, 1, 2, 3}), *named({5, 11, 17, 23})}


@pytest.mark.parametrize("count", [2, 4, 6, 24])
def test_a_script_that_never_gives_the_same_twice_accuses_nobody(count: int) -> None:
    draw = random.Random(3)
    conclusion = found(count, 1, lambda group: str(draw.random()))
    assert (
        conclusion.nodes == () and conclusion.confidence == replay.UNSURE and conclusion.suspects == tuple(names(count))
    )


@pytest.mark.parametrize("replica", [1, 2, 4])
def test_a_script_with_two_results_hardly_ever_accuses(replica: int) -> None:
    accused = 0
    for seed in range(100):
        draw = random.Random(seed)
        accused += bool(found(24, replica, lambda group, draw=draw: draw.choice("ab")).nodes)  # type: ignore[misc]
    assert accused <= 3


def test_one_replica_has_nothing_to_be_compared_with() -> None:
    conclusion = found(8, 8, faulty(1))
    assert conclusion.nodes == () and "no second group" in conclusion.because


def test_a_group_without_a_result_is_asked_again_and_is_no_evidence() -> None:
    silent = {"node-3"}

    def outcome(group: Group) -> str | None:
        if group.phase == "horizontal" and silent & set(group.nodes):
            silent.clear()
            return None
        return faulty(13)(group)

    conclusion, end = play(replay.begin(names(24), 4), outcome)
    assert conclusion.nodes == ("node-13",)
    assert [len(one) for one in end.rounds] == [6, 6, 1, 4]
    assert found(24, 4, lambda group: None).nodes == ()


def test_too_few_others_to_try_candidates_with() -> None:
    # m = n = 2: both groups of both directions hold a candidate
    conclusion = found(4, 2, lambda group: "good" if group.number == 0 else "bad")
    assert conclusion.nodes == () or len(conclusion.nodes) == 1


def test_results_that_were_not_asked() -> None:
    with pytest.raises(ValueError, match="2 results for 6 groups"):
        replay.begin(names(24), 4).taken(["a", "b"])


def test_a_replay_can_be_stored_in_the_middle() -> None:
    started = replay.begin(names(24), 4).taken(["good"] * 3 + ["bad"] + ["good"] * 2)
    again = msgspec.json.decode(msgspec.json.encode(started), type=Replay)
    assert again == started and again.asked == started.asked


@settings(deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 8), st.sets(st.integers(0, 31), max_size=3), st.floats(0.05, 1.0),
    st.integers(0, 1000),
)  # fmt: skip
def test_it_ends_and_what_always_shows_is_found(
    replica: int, replicas: int, bad: set[int], p: float, seed: int
) -> None:
    z = replica * replicas
    bad = {x for x in bad if x < z}
    conclusion, end = play(replay.begin(names(z), replica), faulty(*bad, p=p, seed=seed))
    assert len(end.rounds) <= 2 * replay.REPEATS + z * replay.REPEATS
    if not bad:
        assert conclusion.nodes == () == conclusion.suspects
    if p == 1.0 and len(bad) == 1 and end.division.n > 2:
        assert conclusion.nodes == named(bad)
