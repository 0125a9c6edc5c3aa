"""Over which network interface does NCCL send each channel? Read from its own log lines, where there are any.

    gpu02:811:933 [1] NCCL INFO Channel 03/0 : 9[1] -> 17[1] [send] via NET/IB/2/GDRDMA
    gpu02:811:933 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM

`NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET` makes it say so when it connects. Ranks are those of the communicator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from evertrain.model.tracing import Side, Transport

_LINE = re.compile(
    r"NCCL INFO Channel (?P<channel>\d+)(?:/\d+)?\s*:\s*(?P<source>\d+)\[[^\]]*\] -> (?P<target>\d+)\[[^\]]*\]"
    r"(?: \[(?P<side>send|receive)\])? via (?P<via>\S+)"
)
_NET = re.compile(r"NET/(?P<kind>[^/(]+)/(?P<device>\d+)(?:\((?P<pxn>\d+)\))?")


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One channel from one rank of a communicator to another."""

    channel: int
    source: int
    target: int
    side: Side
    """Whose line it is."""
    transport: Transport | None = None
    """None: inside the node, where no proxy works and no chunk is counted."""
    device: int | None = None
    """Number of the network interface, by NCCL's count; None: there is none, or another process sends it."""
    via: str = ""


def routes(lines: Iterable[str]) -> Iterator[Route]:
    """Each channel that a rank's log tells of; lines of other kinds are passed over."""
    for line in lines:
        if (found := _LINE.search(line)) is None:
            continue
        net = _NET.match(found["via"])
        device = int(net["device"]) if net is not None and net["pxn"] is None else None
        yield Route(
            channel=int(found["channel"]),
            source=int(found["source"]),
            target=int(found["target"]),
            side="receive" if found["side"] == "receive" else "send",
            transport=None if net is None else "socket" if net["kind"].lower() == "socket" else "ib",
            device=device,
            via=found["via"],
        )
