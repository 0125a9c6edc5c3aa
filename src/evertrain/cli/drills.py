"""Which faults happen to whole local nodes? Those that no rank can bring about itself: `run` does them from outside.

    wipe        keeper, agent and ranks killed, shared memory and disk of the node gone; it comes back empty
    node-loss   keeper, agent and ranks killed at once and not started again: the machine is gone (`for=S`: so long)
    gpu-lost, network-alert, reading    a report about the node reaches the controller: a GPU that is gone for certain,
                                        a link that misbehaves, a reading of its hardware that is odd

Each is done once per job run, when the job's step has come far enough; the same text twice is two drills.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from evertrain.worker import faults

REPORTED = {"gpu-lost": "gpu_lost", "network-alert": "network_alert", "reading": "hardware_reading"}
"""Those that are no more than a signal, and of which kind."""


@dataclass(frozen=True)
class Drill:
    """A fault of a node that has not happened yet."""

    index: int
    """Its place among all `--inject` arguments, which names its file in the folder of fired faults."""
    text: str
    kind: str
    node: str
    """Its name or its number."""
    at: int
    away_s: float = inf
    """Of a lost node: until it comes back."""

    def name(self, nodes: Sequence[str]) -> str:
        """Of the node that is meant, where these are all nodes in their order."""
        number = int(self.node) if self.node.isdigit() else -1
        return nodes[number] if 0 <= number < len(nodes) else self.node

    def due(self, step: int | None) -> bool:
        return step is not None and step >= self.at


def waiting(texts: Sequence[str]) -> list[Drill]:
    parsed = [(index, faults.parse(text)) for index, text in enumerate(texts)]
    return [
        Drill(
            index,
            fault.text,
            fault.kind,
            fault.node or "",
            fault.at if fault.at is not None else 1,
            fault.for_s if fault.for_s is not None else inf,
        )
        for index, fault in parsed
        if fault.on_node
    ]


def first_time(drill: Drill, fired: Path) -> bool:
    """Claim the drill for this run; False where it has been done."""
    fired.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.close(os.open(fired / str(drill.index), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True
