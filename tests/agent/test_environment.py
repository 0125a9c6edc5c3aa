"""torchrun's variables; the whole environment is compared with torchrun's own in tests/system/parity."""

from __future__ import annotations

from evertrain.agent.environment import of_rank
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


def test_virtual_local_rank_shows_one_device_as_the_first() -> None:
    found = of_rank(go(virtual=True), ORDER, "job", "", {"CUDA_VISIBLE_DEVICES": "4, 5, 6, 7"})
    assert (found["LOCAL_RANK"], found["CUDA_VISIBLE_DEVICES"]) == ("0", "6")
    assert of_rank(go(virtual=True), ORDER, "job", "", {})["CUDA_VISIBLE_DEVICES"] == "2"
