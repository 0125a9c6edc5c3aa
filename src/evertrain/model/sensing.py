"""What do the sensors of a node see? Readings go to the rules of `detect`, signs come out; both with their place.

A sensor that cannot see says so (`blind`), and one that has nothing to look at here is `absent`: neither accuses nor
acquits anybody.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Sign(msgspec.Struct, frozen=True, kw_only=True):
    """Something that may be wrong with this node."""

    key: str
    """The same for as long as it is the same event, also after the agent has been started again: it is told once."""
    kind: str
    """What it proves is said by its kind (`detect.readings.grade`)."""
    device: str = ""
    """GPU, port, disk or mount; empty: the node as a whole."""
    evidence: str
    """One line for whoever reads the incident: the device, what was read, and against which limit."""
    time: float
    """When it was seen first, by the agent's clock."""
    attempt: int | None = None
    """What training reports is about one attempt."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What one look of a sensor has come to."""

    signs: tuple[Sign, ...] = ()
    """That hold now, or have been seen since the last look."""
    last: str = ""
    """The reading in one line, for `status`."""
    blind: str = ""
    """Why it could not see; empty: it could."""
    absent: str = ""
    """Why there is nothing to look at on this node; it is asked again, seldom."""


class SensorState(msgspec.Struct, frozen=True, kw_only=True):
    """How one sensor of a node is doing."""

    name: str
    state: Literal["starting", "ok", "blind", "absent"]
    period_s: float
    last: str = ""
    because: str = ""
    """Why it is blind or absent."""
    since: float = 0.0
    """It has been in this state since then."""
    looks: int = 0
    cpu_s: float = 0.0
    """Of all looks."""


class KernelMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the kernel's log."""

    key: str
    """`kernel:<boot id>:<sequence number>`."""
    time: float
    """When it was written, by the agent's clock."""
    text: str
    """As `dmesg` prints it."""
    is_own: bool = True
    """The kernel's own; False: a program wrote it into the log."""
    is_told: bool = False
    """It was there before: looked at by an earlier run of the agent, or too old. What follows is judged with it."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU at one moment. None: this driver or GPU cannot say."""

    index: int
    uuid: str
    bus: str = ""
    """PCI address, as kernel messages name it."""
    is_lost: bool = False
    temperature_c: int | None = None
    slowdown_c: int | None = None
    """The device's own threshold."""
    throttle_reasons: tuple[str, ...] = ()
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    utilisation: int | None = None
    """Per cent."""
    sm_clock_mhz: int | None = None
    ecc_uncorrected: int | None = None
    """Volatile, since the driver was loaded."""
    remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    nvlinks_down: tuple[int, ...] | None = None
    """Of the links that the device has; those without a cable or bridge are down for good."""
    xids: tuple[int, ...] = ()
    """Codes that the driver has told since the last look."""
    recovery_action: str = ""
    """What the driver recommends; empty: nothing."""
    processes: tuple[int, ...] = ()
    """Pids of whoever computes on it."""


class PortReading(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface or RDMA port at one moment; counters only grow, or wrap."""

    name: str
    is_up: bool
    carrier_changes: int | None = None
    speed_mbps: int | None = None
    received_bytes: int = 0
    sent_bytes: int = 0
    received_packets: int = 0
    sent_packets: int = 0
    errors: int = 0
    dropped: int = 0
    unclaimed: int = 0
    """Came in and went nowhere: also what healthy machines do with protocols that they do not speak."""
    is_rdma: bool = False


class PingReading(msgspec.Struct, frozen=True, kw_only=True):
    """Whether another node's agent answered."""

    peer: str
    seconds: float | None
    """None: it did not, in time."""


class HostReading(msgspec.Struct, frozen=True, kw_only=True):
    """The machine at one moment. None: it cannot be said."""

    disk_free_fraction: dict[str, float] = {}
    """By folder that the job writes to."""
    mounts_dead: dict[str, float] = {}
    """By mount point: for so many seconds it has not answered."""
    disk_errors: dict[str, int] = {}
    """By device."""
    memory_free_fraction: float | None = None
    shared_memory_free_fraction: float | None = None
    descriptors_fraction: float | None = None
    """Of what the machine allows, in use."""
    clock_offset_s: float | None = None
    clock_is_synchronised: bool | None = None
    load_per_core: float | None = None
