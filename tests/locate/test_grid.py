"""What differs is seen, in eight ranks or ten thousand."""

from __future__ import annotations

from evertrain.locate import grid
from support import stuck
from support.stuck import Job


def test_a_cell_a_rank_over_the_mesh() -> None:
    job = Job({"pp": 2, "dp": 2, "tp": 2})
    job.outside(5, stuck.FETCH)
    found = grid.draw(job.merged(), job.mesh, marked=(5,))
    assert found.title == "grid pp x dp x tp: one cell a rank, a letter a group"
    assert found.lines == ("pp=0  dp=0-1  AA", "pp=1  dp=0  AB*   dp=1  AA")
    assert [(letter, one.ranks) for letter, one in found.legend] == [("A", (0, 1, 2, 3, 4, 6, 7)), ("B", (5,))]


def test_two_dimensions_and_one() -> None:
    job = Job({"dp": 4, "tp": 2})
    job.outside(3, stuck.FETCH)
    assert grid.draw(job.merged(), job.mesh).lines == ("dp=0  AA   dp=1  AB   dp=2-3  AA",)
    job = Job({"dp": 4})
    assert grid.draw(job.merged(), job.mesh).lines == ("AAAA",)


def test_ranks_that_were_not_seen() -> None:
    job = Job({"dp": 4})
    assert grid.draw(job.merged(missing=["node-1"]), job.mesh).lines == ("AA??",)


def test_without_a_mesh_or_with_one_that_does_not_fit() -> None:
    job = Job({"dp": 72})
    job.outside(70, stuck.FETCH)
    for mesh in (None, {"dp": 3}):
        assert grid.draw(job.merged(), mesh).lines == ("rank=0   AAAAAAAA x8", "rank=64  AAAAAABA")


def test_ten_thousand_ranks_in_a_few_lines() -> None:
    job = Job({"pp": 10, "dp": 125, "tp": 8}, per_node=8)
    job.outside(4711, stuck.FETCH)
    lines = grid.draw(job.merged(), job.mesh, marked=(4711,)).lines
    assert lines == (
        "pp=0-3  dp=0-124  AAAAAAAA",
        "pp=4    dp=0-87  AAAAAAAA   dp=88  AAAAAAAB*   dp=89-124  AAAAAAAA",
        "pp=5-9  dp=0-124  AAAAAAAA",
    )


def test_a_long_block_is_told_by_its_runs() -> None:
    job = Job({"dp": 1000})
    job.outside(400, stuck.FETCH)
    assert grid.draw(job.merged(), job.mesh).lines == ("Ax400 B Ax599",)
