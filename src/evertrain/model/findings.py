"""What was recognised in logs and dumps, and what follows from it: who is at fault, and what should be done?

A detector turns text into findings, each of them one recognised fact. The verdict is drawn from all findings of an
incident together, because most of what a failed job writes is a consequence of something else.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

CulpritType = Literal[
    "host", "gpu", "nic", "link", "rack", "switch",
    "rank", "code", "config", "data", "library", "storage", "scheduler", "none", "unknown",
]  # fmt: skip

Category = Literal[
    "gpu_hardware", "gpu_memory_ecc", "nvlink_fabric", "driver_gsp", "sdc", "network_ib", "network_config", "host_os",
    "storage", "container_config", "oom_gpu", "oom_host", "user_code", "user_config", "data", "numerics",
    "framework_bug", "hang_dataloader", "straggler", "preemption", "injected_device_assert", "injected_gil_lock",
    "none", "unknown",
]  # fmt: skip

Action = Literal["evict", "retry", "user_code", "rollback_user_code", "storage", "human", "none"]


class Culprit(Struct, frozen=True):
    """Who or what is at fault.

    `id` names hardware as `host`, `host/PCI address`, `host/device`, `host/gpuN/linkN`; a rank as its number; several
    ranks as a list. For code, configuration, data and libraries it is a description, or empty.
    """

    type: CulpritType = "unknown"
    id: str | int | tuple[str, ...] | tuple[int, ...] = ""


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was recognised, with what it would mean if it were alone."""

    rule: str
    category: Category
    action: Action
    culprit: Culprit = Culprit()
    confidence: float = 0.5
    """0 to 1: how sure this alone makes the category and the action."""
    evidence: tuple[str, ...] = ()
    """The decisive lines as they stand in the source."""
    time: float | None = None
    """Seconds since the epoch, if the source says when."""
    rank: int | None = None
    host: str | None = None
    is_symptom: bool = False
    """It follows from something else: peers' NCCL and gloo errors, watchdog time-outs, SIGTERM of survivors."""
    is_benign: bool = False
    """It happens to healthy jobs too: told, never acted upon."""
    note: str = ""
    """One sentence for people."""
    group: str = ""
    """Rules that are switched on and off together."""
    order: int = 0
    """Position in what was read: among equals the first is the cause."""


class Verdict(Struct, frozen=True, kw_only=True):
    """What all findings of an incident say together."""

    category: Category
    action: Action
    culprit: Culprit = Culprit()
    confidence: float
    evidence: tuple[str, ...] = ()
    considered: tuple[tuple[str, str], ...] = ()
    """(rule, why it is not the cause)."""
    summary: str = ""
