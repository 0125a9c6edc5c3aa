"""The reference model gives the same bits everywhere, and a flipped one is named by place and rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from evertrain.diagnose import mini_gpt
from evertrain.diagnose.mini_gpt import Layout
from evertrain.locate import alignment
from evertrain.locate.alignment import Alignment, NodeRuns, RankRuns, Run, Setting
from support.fleet import Done, Fleet, Node

TINY = {"width": 32, "context": 16, "batch": 2, "vocabulary": 32}


def runs(name: str, done: Done) -> NodeRuns:
    assert done.outcome == "passed", done
    readings = done.named("alignment")
    (setting,) = {msgspec.convert(one["detail"]["setting"], Setting) for one in readings}
    by_rank = {one["rank"]: msgspec.convert(one["detail"], RankRuns) for one in readings}
    return NodeRuns(node=name, setting=setting, runs=alignment.merged(by_rank))


def align(nodes: Sequence[Node], **parameters: Any) -> list[NodeRuns]:
    """All at the same time."""
    for node in nodes:
        node.ask("alignment", **parameters)
    return [runs(node.name, node.hear_done()) for node in nodes]


def judged(nodes: Sequence[NodeRuns], golden: dict[Setting, Run] | None = None) -> Alignment:
    return alignment.judge(nodes, golden or {})


def test_layouts_use_every_rank() -> None:
    whole, half, pair, one = mini_gpt.LAYOUTS
    assert mini_gpt.blocks(8) == [(0, whole)] and mini_gpt.blocks(16) == [(0, whole), (8, whole)]
    assert mini_gpt.blocks(7) == [(0, half), (4, pair), (6, one)]
    assert mini_gpt.blocks(4) == [(0, half)] and mini_gpt.blocks(2) == [(0, pair)] and mini_gpt.blocks(1) == [(0, one)]
    places = [whole.rank(s, p, d) for d, p, s in itertools.product(range(2), repeat=3)]
    assert places == list(range(8)) and Layout(1, 1, 1).ranks == 1


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_healthy_nodes_agree_in_every_run(fleet: Fleet, kind: str, ranks: int) -> None:
    nodes = align([fleet.node(name, ranks=ranks) for name in ("a", "b")], kind=kind, repeats=4)
    assert nodes[0].setting == nodes[1].setting and nodes[0].runs == nodes[1].runs
    assert len(nodes[0].runs) == 4 and len(set(nodes[0].runs)) == 1
    assert {entry.rank for entry in nodes[0].runs[0]} == set(range(ranks))
    told = {entry.place for entry in nodes[0].runs[0]}
    assert told == set(mini_gpt.places(kind, layers=4))
    assert judged(nodes).cleared == ("a", "b")


def test_number_of_threads_and_sizes_are_settings_of_their_own(fleet: Fleet) -> None:
    one, two = fleet.node("a"), fleet.node("b", threads=2)
    settings = {runs("x", node.test("alignment", repeats=1)).setting for node in (one, two)}
    settings.add(runs("x", one.test("alignment", repeats=1, sizes=TINY)).setting)
    assert len(settings) == 3


@pytest.mark.parametrize(
    ("kind", "ranks", "bad", "matmul", "place"),
    [
        ("dense", 1, 0, 0, "forward embedding"),
        ("dense", 2, 1, 1, "forward layer 0 attention"),
        ("dense", 2, 0, 6, "forward layer 0 mlp"),
        ("moe", 2, 1, 5, "forward layer 0 router"),
        ("moe", 2, 1, 7, "forward layer 0 mlp"),
    ],
)
def test_one_flipped_bit_is_named_by_place_and_rank(
    fleet: Fleet, kind: str, ranks: int, bad: int, matmul: int, place: str
) -> None:
    fault = f"flip:node=b,rank={bad},matmul={matmul}"
    nodes = align([fleet.node(name, ranks=ranks, fault=fault) for name in "abc"], kind=kind, repeats=2, sizes=TINY)
    found = judged(nodes)
    assert found.cleared == ("a", "c")
    (one,) = found.accused
    assert (one.node, one.place, one.ranks, one.odd_runs) == ("b", place, (bad,), 2)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_bit_flipped_anywhere_in_the_step_is_seen_on_its_rank(fleet: Fleet, kind: str) -> None:
    good = fleet.node("good", ranks=2)
    norm = runs("good", good.test("alignment", kind=kind, repeats=1, sizes=TINY))
    places = set()
    for matmul in range(0, 72, 12):
        node = fleet.node("bad", ranks=2, fault=f"flip:node=bad,rank=1,matmul={matmul}")
        bad = runs("bad", node.test("alignment", kind=kind, repeats=1, sizes=TINY))
        (one,) = judged([bad], {norm.setting: norm.runs[0]}).accused
        assert one.ranks == (1,), (matmul, one)
        places.add(one.place.split()[0])
    assert places == {"forward", "backward"}


def test_a_fault_in_a_tenth_of_the_runs_is_found_by_repeats(fleet: Fleet) -> None:
    fault = "flip:node=b,p=0.1,matmul=5,seed=3"
    nodes = align([fleet.node(name, fault=fault) for name in "abc"], repeats=40, sizes=TINY)
    (one,) = judged(nodes).accused
    assert one.node == "b" and 0 < one.odd_runs < 12 and one.runs == 40


def test_repeats_are_as_many_as_there_is_time_for(fleet: Fleet) -> None:
    done = fleet.node("a", ranks=2).test("alignment", budget_s=5, repeats=1_000_000, sizes=TINY)
    told = runs("a", done)
    assert done.seconds < 5 and 1 < len(told.runs) < 1_000_000


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize(("ranks", "bad"), [(4, 3), (8, 6), (3, 2)])
def test_larger_layouts(fleet: Fleet, kind: str, ranks: int, bad: int) -> None:
    fault = f"flip:node=b,rank={bad},matmul=3"
    nodes = align([fleet.node(name, ranks=ranks, fault=fault) for name in ("a", "b")], kind=kind, repeats=2, sizes=TINY)
    good, wrong = nodes
    assert len(set(good.runs)) == 1
    (one,) = judged([wrong], {good.setting: good.runs[0]}).accused
    assert one.ranks == (bad,)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_twenty_fleets(fleet: Fleet) -> None:
    """Each is run healthy, and then with one of its nodes replaced by a bad one."""
    names = [f"node-{at}" for at in range(6)]
    found = {"always": 0, "now and then": 0, "healthy": 0}
    sizes = {**TINY, "layers": 2}
    for trial in range(20):
        bad = names[trial % 6]
        nodes = [fleet.node(name) for name in names]
        healthy = align(nodes, repeats=40, sizes=sizes)
        found["healthy"] += len(judged(healthy).accused)
        for kind, more in (("always", ""), ("now and then", f",p=0.1,seed={trial}")):
            nodes.append(fleet.node(bad, fault=f"flip:node={bad},matmul={trial}{more}"))
            (spoilt,) = align(nodes[-1:], repeats=40, sizes=sizes)
            accused = [one.node for one in judged([one for one in healthy if one.node != bad] + [spoilt]).accused]
            assert accused in ([], [bad])
            found[kind] += bool(accused)
        for node in nodes:
            node.close()
    assert found["always"] == 20 and found["now and then"] >= 18 and found["healthy"] == 0
