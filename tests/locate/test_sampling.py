"""Which ranks are watched?"""

from __future__ import annotations

import time

from evertrain.locate.parallel import coordinates
from evertrain.locate.sampling import MOST, sample

MESH = {"pp": 2, "dp": 2, "tp": 2}


def test_one_rank_of_each_data_parallel_group() -> None:
    found = sample(8, MESH, 0, range(8))
    places = {(at["pp"], at["tp"]) for at in (coordinates(MESH, rank) for rank in found)}
    assert len(found) == len(places) == 4
    assert all(sample(8, MESH, turn, range(8)) == found for turn in range(5)), "their past is known"


def test_ten_at_most_and_all_groups_have_their_turn() -> None:
    mesh = {"pp": 10, "dp": 125, "tp": 8}
    seen = set()
    for turn in range(8):
        found = sample(10_000, mesh, turn, range(10_000))
        assert len(found) == MOST
        seen |= {(at["pp"], at["tp"]) for at in (coordinates(mesh, rank) for rank in found)}
    assert len(seen) == 80
    again = sample(10_000, mesh, 8, range(10_000))
    assert not set(again) & set(sample(10_000, mesh, 0, range(10_000))), "others of the same groups"


def test_ranks_that_are_gone_are_replaced() -> None:
    found = sample(8, MESH, 0, [2, 3, 5, 6, 7])
    assert found == (2, 3, 5, 6) and sample(8, MESH, 0, []) == ()


def test_several_dimensions_of_data_are_one_group() -> None:
    assert len(sample(16, {"dp_replicate": 2, "dp_shard": 4, "tp": 2}, 0, range(16))) == 2


def test_a_job_that_has_not_said_how_it_is_divided_is_watched_all_over() -> None:
    assert sample(4, None, 0, range(4)) == (0, 1, 2, 3)
    assert sample(100, None, 0, range(100)) == tuple(range(0, 100, 10))
    assert sample(64, {"pp": 8, "tp": 8}, 0, range(64))[-1] > 50
    assert len(sample(64, {"dp": 2}, 0, range(64))) == MOST, "a mesh of another size says nothing"


def test_with_ten_thousand_ranks_the_controller_goes_on_with_its_work() -> None:
    alive = tuple(range(10_000))
    sample(10_000, {"dp": 10_000}, 0, alive)
    began = time.process_time()
    for turn in range(10):
        sample(10_000, {"dp": 10_000}, turn, alive)
    assert time.process_time() - began < 1.0, "it is asked whenever a node says something"
