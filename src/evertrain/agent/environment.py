"""Which environment does a rank get? All of torchrun's, by the same names and with the same values."""

from __future__ import annotations

from collections.abc import Mapping

from evertrain.model.report import Go, RankOrder

OURS = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
)  # fmt: skip
"""Names whose values are ours alone; whatever else `of_rank` sets follows what the user has set."""


UNKNOWN = (
    "RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip
"""Of these, those that nobody can know before a standby takes over ranks."""


def why_not(name: str) -> str:
    """Why a user cannot set this variable of the ranks; empty: nothing speaks against it."""
    if not name or "=" in name or "\0" in name:
        return f"{name!r} is not the name of a variable"
    if name in OURS:
        return f"{name} is set for each rank by evertrain"
    if name.startswith("EVERTRAIN_"):
        return f"{name}: names that begin with EVERTRAIN_ are evertrain's own"
    return ""


def of_rank(go: Go, order: RankOrder, run_id: str, error_file: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that a rank adds to what it inherits.

    Source: torch 2.13 `torch/distributed/elastic/agent/server/local_elastic_agent.py` and `run.py`.
    """
    rank, world_size = str(order.rank), str(go.world_size)
    return {
        **_device(go, order, inherited),
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


def ahead_of_start(go: Go, order: RankOrder, run_id: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Those of them that are known before the rank has a number."""
    whole = of_rank(go, order, run_id, "", inherited)
    return {name: value for name, value in whole.items() if name not in UNKNOWN}


def _device(go: Go, order: RankOrder, inherited: Mapping[str, str]) -> dict[str, str]:
    """The local rank; with --virtual-local-rank it is always 0, and the one device that is visible is the rank's."""
    if not go.virtual_local_rank:
        return {"LOCAL_RANK": str(order.local_rank)}
    visible = inherited.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible is not None else []
    # `run` has checked that there are enough
    own = devices[order.local_rank].strip() if order.local_rank < len(devices) else str(order.local_rank)
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": own}
