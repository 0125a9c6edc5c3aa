"""What does a sign of trouble weigh? A certain fault of the machine, a network alert, an odd reading, or blindness.

Sensors name what they saw (`POST /v1/signals`); nothing is acted upon that is not listed here as certain, or comes
twice as a network alert. A name that is not known is a reading: alone it proves nothing.
"""

from __future__ import annotations

from typing import Literal

Grade = Literal["fault", "network", "reading", "blind"]

CERTAIN = frozenset(
    {
        "gpu_lost", "gpu_unavailable", "gpu_driver_hang", "row_remap_failed", "disk_fault", "kernel_panic",
        "xid_48", "xid_64", "xid_79", "xid_119",
    }
)  # fmt: skip
NETWORK = frozenset({"network_alert", "nic_down", "link_flap", "packet_loss", "switch_down"})


def grade(kind: str) -> Grade:
    """How a sign of this kind counts."""
    if kind in CERTAIN:
        return "fault"
    if kind in NETWORK:
        return "network"
    return "blind" if kind.startswith("blind") else "reading"
