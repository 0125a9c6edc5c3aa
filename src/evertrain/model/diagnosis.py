"""What is asked of stopped nodes, and what do they find? The words of the stop-time checks, and what the log says.

A suite is a list of tests, one after the other (`decide.inspection`); a stage is one of them on all its nodes at once.
The event log keeps every number that a stage has brought; orders and reports carry only the newest one.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from evertrain.model.record import Record

Symptom = Literal["nccl", "nan", "illegal_access", "crash", "slow", "returning"]
"""By which the tests are chosen; `returning`: nothing was seen, but it has not been tested."""

Outcome = Literal["passed", "failed", "late", "crashed", "absent", "refused", "silent"]
"""As the test programs say it; `silent`: the node has said nothing in time."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What the bits may depend on, other than on the health of the machine."""

    device: str
    """Model of the GPU, or of the CPU."""
    capability: str = ""
    """Vector instructions that the CPU's kernels use, or compute capability."""
    threads: int = 1
    versions: str = ""
    """Of torch and the libraries that it computes with."""
    model: str = ""
    """Kind, sizes, number type and layout of what was run."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """The hash of one intermediate result on one rank."""

    at: int
    """In the order of computation; what has the same number is computed at the same time."""
    place: str
    """`forward layer 2 attention`."""
    rank: int
    """Within the node."""
    digest: str


Run = tuple[Entry, ...]


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One number that a rank of a test has measured."""

    rank: int
    """Within the node."""
    name: str
    value: float | None
    """None: it is no finite number."""
    unit: str
    ok: bool | None = None
    """None: only a comparison with others can say."""
    detail: dict[str, Any] = {}


class InspectOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a stopped node is to test now."""

    number: int
    """Of the stage."""
    ranks: int
    """Processes that take part, one a GPU."""
    program: str = ""
    """Of `evertrain.diagnose`; empty: nothing on this node, or its answer is noted; the next stage may need it."""
    parameters: dict[str, Any] = {}
    budget_s: float = 30.0


class Inspected(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it on one node."""

    number: int
    outcome: Outcome
    because: str = ""
    seconds: float = 0.0
    readings: tuple[Reading, ...] = ()


class StageAsked(Record, frozen=True, kw_only=True):
    """Stopped nodes are to run a test."""

    stage: int
    """Its number, over all runs of the job."""
    incident: int
    """0: of no incident, but of the examination that is under way."""
    symptom: Symptom
    name: str
    """Of the test in its suite."""
    program: str
    parameters: dict[str, Any]
    budget_s: float
    nodes: tuple[str, ...]
    """All that are inspected because of this incident."""
    groups: tuple[tuple[str, ...], ...]
    """Who runs it: nodes of one group exchange data with each other."""
    again: bool = False
    """Only those of which it was in doubt the first time."""


class StageDone(Record, frozen=True, kw_only=True):
    """All have answered, or their time is up."""

    stage: int
    incident: int
    results: dict[str, Inspected]
    accused: dict[str, str]
    """By node, what speaks against it."""
    notes: tuple[str, ...] = ()
    """What was seen that accuses nobody: a bad link, nothing to compare with."""
    golden: tuple[tuple[Setting, Run], ...] = ()
    """Bits that enough nodes agree on, to compare with from now on."""
