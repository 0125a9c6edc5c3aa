"""Which environment does a rank get? All of torchrun's, by the same names and with the same values."""

from __future__ import annotations

from collections.abc import Mapping

from evertrain.model.report import Go, RankOrder


def of_rank(go: Go, order: RankOrder, run_id: str, error_file: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that a rank adds to what it inherits.

    Source: torch 2.13 `torch/distributed/elastic/agent/server/local_elastic_agent.py` and `run.py`.
    """
    rank, local_rank, world_size = str(order.rank), str(order.local_rank), str(go.world_size)
    return {
        "LOCAL_RANK": local_rank,
        "RANK": rank,
        "GROUP_RANK": str(go.group_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": go.role,
        "LOCAL_WORLD_SIZE": str(go.local_world_size),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(go.group_world_size),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": go.master_addr,
        "MASTER_PORT": str(go.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(go.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(go.max_restarts),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": go.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": inherited.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
