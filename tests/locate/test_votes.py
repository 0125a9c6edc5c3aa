"""Slow ranks are found by five rounds of twenty looks, and healthy jobs accuse nobody, however uneven they are."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

import pytest

from evertrain.locate import votes
from evertrain.locate.grouping import Merged
from evertrain.locate.parallel import coordinates
from evertrain.model.recording import Group
from evertrain.model.stacks import Frame, Located, Member, Position

MESH = {"pp": 2, "dp": 2, "tp": 2}
LOOKS = 20

INSIDE = (Frame("all_reduce", "torch/distributed/distributed_c10d.py", 2501), Frame("main", "train.py", 9))
COMPUTES = (Frame("forward", "model.py", 12), Frame("main", "train.py", 9))


def rounds(
    mesh: Mapping[str, int], slow: Mapping[int, float], seed: int, *, count: int = 5, busy: float = 0.65,
    stages: tuple[float, ...] = (), noise: float = 0.1, step_s: float = 0.3,
) -> list[Merged]:  # fmt: skip
    """Twenty looks in a second, again and again, at a job whose ranks compute and then wait for the last of them.

    A rank of usual speed computes for `busy` of a step, in two parts with a bubble of the pipeline between them; the
    step ends when the slowest has computed. `stages` are factors of pipeline stages, which are no fault. The machine is
    loaded: each part of each step takes a rank longer or shorter by chance.
    """
    chance = random.Random(seed)
    size = math.prod(mesh.values())
    work = {
        rank: slow.get(rank, 1.0) * (stages[coordinates(mesh, rank)["pp"]] if stages else 1.0) for rank in range(size)
    }
    found = []
    for number in range(count):
        start, outside = chance.random() * step_s, dict.fromkeys(range(size), 0)
        looks = [start + at * 0.05 + chance.random() * 0.01 for at in range(LOOKS)]
        began = 0.0
        while began < looks[-1]:
            parts = {
                rank: [step_s * busy * work[rank] / 2 * math.exp(noise * chance.gauss(0, 1)) for _ in range(2)]
                for rank in range(size)
            }
            bubble = step_s * (1 - busy) / 2
            half = max(one[0] for one in parts.values()) + bubble
            for look in looks:
                for rank, (first, second) in parts.items():
                    outside[rank] += began <= look < began + first or began + half <= look < began + half + second
            began += half + max(one[1] for one in parts.values()) + bubble
        found.append(merged(number, size, outside))
    return found


def merged(number: int, size: int, outside: Mapping[int, int]) -> Merged:
    def position(frames: tuple[Frame, ...], place: str, looks: Mapping[int, int]) -> Position:
        members = tuple(Member(rank, 1000 + rank, count) for rank, count in looks.items() if count)
        is_idle = place == "collective"
        return Position(kind="trainer", place=place, frames=frames, is_idle=is_idle, members=members)  # type: ignore[arg-type]

    inside = {rank: LOOKS - count for rank, count in outside.items()}
    positions = (position(COMPUTES, "elsewhere", outside), position(INSIDE, "collective", inside))
    nodes = {rank: f"node-{rank // 4}" for rank in range(size)}
    return Merged(number=number, attempt=1, time=float(number), positions=positions, nodes=nodes)


def found(
    factor: float, mesh: Mapping[str, int], seeds: range, *, busy: float = 0.65, stages: tuple[float, ...] = ()
) -> float:
    """How often a slow rank is named, and nobody else with it."""
    size, right = math.prod(mesh.values()), 0
    for seed in seeds:
        rank = seed % size
        one = votes.vote(rounds(mesh, {rank: factor}, seed, busy=busy, stages=stages), mesh=mesh)
        assert set(one.ranks) <= {rank}
        right += one.ranks == (rank,)
    return right / len(seeds)


@pytest.mark.parametrize("factor", [1.5, 2.0, 3.0])
def test_a_slow_rank_is_found(factor: float) -> None:
    assert found(factor, MESH, range(60)) >= 0.9


@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_a_slow_rank_among_many_is_found(factor: float) -> None:
    assert found(factor, {"pp": 4, "dp": 8, "tp": 4}, range(12)) >= 0.8


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_in_whatever_stage_of_an_uneven_pipeline_it_is(factor: float) -> None:
    assert found(factor, {"pp": 2, "dp": 4}, range(40), busy=0.45, stages=(1.0, 0.7)) >= 0.9


@pytest.mark.parametrize("stages", [(), (1.0, 1.5), (0.4, 1.0)])
@pytest.mark.parametrize("busy", [0.2, 0.6])
def test_a_healthy_job_accuses_nobody(busy: float, stages: tuple[float, ...]) -> None:
    assert [one for seed in range(100) if (one := healthy(MESH, seed, busy, stages)).ranks] == []


def healthy(
    mesh: Mapping[str, int], seed: int, busy: float, stages: tuple[float, ...] = (), noise: float = 0.15
) -> Located:
    return votes.vote(rounds(mesh, {}, seed, busy=busy, stages=stages, noise=noise), mesh=mesh)


def test_nor_does_a_large_one() -> None:
    assert [one for seed in range(10) if (one := healthy({"dp": 512}, seed, 0.5)).ranks] == []


def test_all_equally_slow() -> None:
    everyone = dict.fromkeys(range(8), 2.0)
    one = votes.vote(rounds(MESH, everyone, 3), mesh=MESH)
    assert (one.kind, one.ranks, one.eviction) == ("unknown", (), ())
    assert "all are equally slow" in one.evidence[-1]


def test_the_verdict_names_node_and_place() -> None:
    one = votes.vote(rounds(MESH, {5: 2.0}, 1), mesh=MESH)
    assert (one.kind, one.ranks, one.nodes, one.eviction) == ("slow", (5,), ("node-1",), ("node-1",))
    assert (one.category, one.captures) == ("straggler", (0, 1, 2, 3, 4))
    assert "rank 5 on node-1" in one.evidence[0] and "forward < main" in one.evidence[1]


def test_two_slow_ranks_are_both_named() -> None:
    mesh = {"dp": 8}
    assert votes.vote(rounds(mesh, {2: 2.5, 6: 2.5}, 1), mesh=mesh).ranks == (2, 6)


def test_somebody_near_it_asks_for_more_rounds_and_these_decide() -> None:
    """A little slower than its peers, in some rounds only."""
    some = [
        merged(number, 8, dict.fromkeys(range(8), 10) | ({6: 14} if number % 2 else {3: 15})) for number in range(5)
    ]
    one = votes.vote(some, mesh={"dp": 8})
    assert one.kind == "unknown" and "5 more rounds are needed" in one.evidence[-1]
    more = [merged(number, 8, dict.fromkeys(range(8), 10) | {3: 15}) for number in range(10)]
    assert votes.vote(more, mesh={"dp": 8}).ranks == (3,)


def test_fewer_rounds_than_five_say_nothing() -> None:
    assert votes.vote(rounds(MESH, {5: 3.0}, 1)[:4], mesh=MESH).kind == "unknown"


def test_stages_without_peers_are_not_compared() -> None:
    one = votes.vote(rounds({"pp": 4}, {2: 3.0}, 1), mesh={"pp": 4})
    assert one.kind == "unknown" and "no rank has peers" in one.evidence[0]


def test_stages_are_learnt_from_the_groups_that_the_job_created() -> None:
    some = rounds(MESH, {}, 1, stages=(0.3, 1.0))
    pipelines = {f"{at}": Group(f"{at}", "mesh_pp", (at, at + 4)) for at in range(4)}
    with_groups = [Merged(**{name: getattr(one, name) for name in one.__struct_fields__} | {"groups": pipelines})
                   for one in some]  # fmt: skip
    assert votes.vote(with_groups).ranks == ()
    assert votes.vote(some).evidence != votes.vote(with_groups).evidence
