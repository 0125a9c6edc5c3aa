"""What does a signal about a node prove? Its kind says so: a machine fault for certain, trouble of a link, or less.

fault      the machine is broken: nothing that waits or restarts will mend it
network    a link misbehaves; most such troubles heal themselves
reading    something is odd about the hardware; alone it proves nothing
condition  the machine runs short of something, or something outside of it troubles it: its hardware is well
metric     training itself reports something odd: no evidence against any machine
blind      a sensor cannot see, which neither accuses nor acquits
"""

from __future__ import annotations

from typing import Literal

Grade = Literal["fault", "network", "reading", "condition", "metric", "blind"]

FAULTS = frozenset(
    {
        "gpu_lost", "gpu_unavailable", "gpu_driver_hang", "disk_fault", "kernel_panic", "row_remap_failed",
        "failed_tests",
        # NVIDIA's codes after which the GPU is of no use until somebody has seen to it
        "xid_48", "xid_64", "xid_79", "xid_119",
    }
)  # fmt: skip
NETWORK = frozenset({"network_alert", "nic_down", "link_flap", "packet_loss", "switch_down"})
CONDITIONS = frozenset(
    {
        "disk_full", "mount_dead", "memory_low", "descriptors_low", "clock_offset", "clock_unsynchronised",
        "kernel_stall", "disk_warning", "gpu_occupied", "tcp_resends",
    }
)  # fmt: skip
METRICS = frozenset(
    {
        "loss_not_finite", "grad_norm_not_finite", "loss_jump", "grad_norm_jump",
        "slow", "hot_and_slow", "no_traffic", "tensor_idle",
    }
)  # fmt: skip

FATAL = frozenset({"loss_not_finite", "grad_norm_not_finite"})
"""Of these: training that goes on like this is worth nothing."""


def grade(kind: str) -> Grade:
    """How much a signal of this kind proves; one that nobody knows is a reading."""
    if kind in FAULTS:
        return "fault"
    if kind in NETWORK:
        return "network"
    if kind in CONDITIONS:
        return "condition"
    if kind in METRICS:
        return "metric"
    return "blind" if kind.startswith("blind") else "reading"
