"""What makes a job hang, on purpose, and what the truth is: which ranks, which class, would an eviction be wrong?

Each is done by scripts/faulty_3d.py, or from outside by whoever runs the job (`by_signal`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PIPELINE, REPLICAS, PARTS = 2, 2, 2
RANKS = PIPELINE * REPLICAS * PARTS
NODES, PER_NODE = 4, 2
MESH = f"pp={PIPELINE},dp={REPLICAS},tp={PARTS}"
SIZES = (
    f"--pp={PIPELINE}", f"--dp={REPLICAS}", f"--tp={PARTS}", "--layers=2", "--width=32", "--context=32", "--batch=2",
    "--microbatches=2", "--steps=1000000", "--evaluate-every=1000000",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    name: str
    what: str
    kinds: tuple[str, ...]
    """Of `LocatedKind`, those that are right."""
    seen: tuple[str, ...] = ()
    """Words of the evidence: it says at least one of them."""
    acts: tuple[str, ...] = ("restart",)
    """What may be done about it; never an eviction, unless ..."""
    may_evict: bool = False
    """... the process cannot be ended."""
    by_signal: bool = False
    in_circle: bool = False
    """All ranks of the chosen one's pipeline stage wait for each other: each of them may be named, or none."""
    is_quick: bool = True

    def culprits(self, rank: int) -> tuple[int, ...]:
        first = rank - rank % (REPLICAS * PARTS)
        return tuple(range(first, first + REPLICAS * PARTS)) if self.in_circle else (rank,)

    def is_right(self, rank: int, named: Sequence[int], kind: str) -> bool:
        """Whether ranks and class of a verdict are right, `rank` being the one that was chosen."""
        ranks_right = set(named) <= set(self.culprits(rank)) and (bool(named) or self.in_circle)
        return ranks_right and kind in self.kinds

    def may_lead_to(self, action: str) -> bool:
        return action in self.acts or (self.may_evict and action == "evict")


FAULTS = {
    one.name: one
    for one in (
        Fault("stopped", "SIGSTOP", ("stopped",), ("stopped",), by_signal=True),
        Fault("loader", "a data loader's worker sleeps", ("loader",), ("loader", "wait_for_record")),
        Fault("loop", "computes without end in Python", ("loop",), ("pack_sequences",), acts=("tolerate",)),
        Fault("skipped", "leaves out a sum over all", ("skipped",), ("allreduce", "all_reduce")),
        Fault("order", "gathers before it adds", ("order",), ("allgather", "all_gather")),
        Fault("shape", "adds half as many numbers", ("mismatch",), ("4194304", "8388608")),
        Fault("dtype", "adds numbers of twice the size", ("mismatch",), ("float64", "Double", "double")),
        Fault("deadlock", "groups of tp and dp wait in a circle", ("deadlock",), ("tp", "dp", "group"), in_circle=True),
        Fault(
            "dead-mount", "reads what never comes (state D)", ("uninterruptible", "storage"), ("read_shard", "state D"),
            may_evict=True,
        ),
        Fault("writer-process", "its checkpoint's writer, a process, is stuck", ("checkpoint",), ("checkpoint",)),
        Fault("writer-thread", "the same, a thread", ("checkpoint",), ("checkpoint",)),
        # its other threads ask for the lock 200 times a second, which may look like work
        Fault("held", "sleeps in C and keeps the GIL", ("held",), ("decode_native",), acts=("restart", "tolerate")),
        Fault("sleep", "sleeps outside of all operations", ("outside",), ("sleep_outside",), is_quick=False),
        Fault(
            "held-busy", "computes in C and keeps the GIL", ("held", "loop"), ("match_record",), acts=("tolerate",),
            is_quick=False,
        ),
    )
}  # fmt: skip


def by_stacks(incident: Mapping[str, Any]) -> bool:
    """Whether the hang's own look has spoken; the records of collectives often say something earlier."""
    return not str(incident["cause"]).startswith("communication ")


def kind_of(incident: Mapping[str, Any]) -> str:
    """The class that an incident names; without stacks it is what the cause says: loader, of `hang (loader)`."""
    found = re.search(r"\(([a-z]+)\)", incident["cause"])
    return str(incident.get("class") or (found[1] if found else incident["cause"]))
