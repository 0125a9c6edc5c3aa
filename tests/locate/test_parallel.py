"""Meshes: as the user names them, and as they are read off the process groups that ranks have made."""

from __future__ import annotations

import pytest

from evertrain.locate import parallel
from evertrain.model.recording import Group

WORLD = Group("0", "default_pg", tuple(range(8)))


def dim(name: str, *members: int) -> Group:
    return Group(name, f"mesh_{name}", members)


@pytest.mark.parametrize(
    ("groups", "mesh"),
    [
        ([WORLD], "dp=8"),
        ([WORLD, dim("pp", 1, 5), dim("dp", 1, 3), dim("tp", 0, 1)], "pp=2,dp=2,tp=2"),
        ([WORLD, dim("dp", 1, 3, 5, 7), dim("tp", 0, 1), dim("pp", 1)], "dp=4,tp=2"),
        ([WORLD, dim("dp", 1, 3), dim("tp", 0, 1)], ""),
        ([WORLD, dim("pp", 1, 5), dim("dp", 1, 3), dim("tp", 0, 1), dim("pp_dp", 1, 3, 5, 7)], ""),
        ([WORLD, Group("1", "", (0, 1))], ""),
        ([WORLD, dim("dp", 1, 3, 5, 7), dim("tp", 0, 1), Group("7", "", (0, 1, 2, 3))], ""),
        ([WORLD, dim("tp", 1, 2, 4, 7), dim("dp", 0, 1)], ""),
        ([WORLD, Group("1", "another of all", tuple(range(8))), Group("2", "of others", (2, 3))], "dp=8"),
    ],
)
def test_a_mesh_is_read_off_the_groups_of_one_rank(groups: list[Group], mesh: str) -> None:
    assert parallel.learnt(groups, 1, 8) == mesh


def test_all_but_the_dimensions_of_the_data_make_a_replica() -> None:
    assert parallel.sizes("pp=4, dp=2,tp=2") == {"pp": 4, "dp": 2, "tp": 2}
    assert parallel.sizes("") == parallel.sizes("pp=x") == {}
    for mesh, ranks in (("pp=4,dp=2,tp=2", 8), ("dp_replicate=2,dp_shard=4,tp=2", 2), ("dp=8", 1), ("ep=2,fsdp=3", 2)):
        assert parallel.ranks_of_replica(parallel.sizes(mesh)) == ranks
