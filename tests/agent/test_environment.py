"""torchrun's variables; the whole environment is compared with torchrun's own in tests/system/parity."""

from __future__ import annotations

import pytest

from evertrain.agent.environment import OURS, UNKNOWN, ahead_of_start, of_rank, why_not
from evertrain.model.report import Go, RankOrder


def go(*, virtual: bool = False) -> Go:
    return Go(
        master_addr="localhost", master_port=29123, world_size=8, group_rank=1, group_world_size=2, local_world_size=4,
        restart_count=2, max_restarts=0, role="trainer", signals_to_handle="SIGTERM", virtual_local_rank=virtual,
        mesh=None, resume=None, reached=None, faults=(), ranks=(),
    )  # fmt: skip


ORDER = RankOrder(rank=6, local_rank=2)


def test_numbers_of_rank_and_group() -> None:
    found = of_rank(go(), ORDER, "job", "/error.json", {})
    assert (found["RANK"], found["LOCAL_RANK"], found["GROUP_RANK"], found["WORLD_SIZE"]) == ("6", "2", "1", "8")
    assert (found["ROLE_NAME"], found["TORCHELASTIC_RESTART_COUNT"], found["TORCHELASTIC_RUN_ID"]) == (
        "trainer",
        "2",
        "job",
    )
    assert "CUDA_VISIBLE_DEVICES" not in found


def test_the_user_may_switch_off_asynchronous_errors() -> None:
    assert of_rank(go(), ORDER, "job", "", {})["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    given = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    assert of_rank(go(), ORDER, "job", "", given)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


def test_what_is_ours_cannot_be_set_and_all_else_can() -> None:
    follow_the_user = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "CUDA_VISIBLE_DEVICES"}
    assert {*of_rank(go(virtual=True), ORDER, "job", "", {})} - follow_the_user == set(OURS)
    assert all(name in why_not(name) for name in (*OURS, "EVERTRAIN_TOKEN"))
    assert not any(map(why_not, (*follow_the_user, "OMP_NUM_THREADS", "PATH", "rank")))


@pytest.mark.parametrize("name", ["", "A=B", "A\0"])
def test_no_name_of_a_variable(name: str) -> None:
    assert "is not the name of a variable" in why_not(name)


def test_virtual_local_rank_shows_one_device_as_the_first() -> None:
    found = of_rank(go(virtual=True), ORDER, "job", "", {"CUDA_VISIBLE_DEVICES": "4, 5, 6, 7"})
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", "6")
    assert of_rank(go(virtual=True), ORDER, "job", "", {})["CUDA_VISIBLE_DEVICES"] == "2"


@pytest.mark.parametrize("virtual", [False, True])
def test_ahead_of_its_start_a_rank_has_what_it_will_have_but_for_what_nobody_knows(virtual: bool) -> None:
    ahead = ahead_of_start(go(virtual=virtual), RankOrder(rank=-1, local_rank=2), "job", {})
    whole = of_rank(go(virtual=virtual), ORDER, "job", "/error.json", {})
    assert ahead.items() <= whole.items()
    assert whole.keys() - ahead.keys() == set(UNKNOWN)
