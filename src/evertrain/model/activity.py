"""What is a rank doing that makes no step? The words in which agents describe it and detectors judge it."""

from __future__ import annotations

import msgspec


class Operation(msgspec.Struct, frozen=True, order=True):
    """One collective or point-to-point operation, as a rank counts it."""

    group: str
    op: str
    seq: int

    def __str__(self) -> str:
        return f"{self.op} number {self.seq} of group {self.group}"


class RankActivity(msgspec.Struct, frozen=True, kw_only=True):
    """One rank whose page has stood still for a while. Rates are None while nobody has looked at its processes."""

    rank: int
    node: str
    still_s: float
    """Since anything on its page changed, in seconds during which the agent was looking."""
    inside: Operation | None
    """The operation it waits in; None: it is outside."""
    last: Operation | None
    """The newest operation it has entered at all."""
    started: bool
    """Whether this attempt has left its start-up behind: steps, or a good number of collectives, were seen."""
    phase: str = ""
    """A phase that the script has declared."""
    step: int | None = None
    """Steps that it has made in this attempt."""
    step_s: float | None = None
    """Median of its last steps."""
    stopped: bool = False
    """Every thread is stopped (state T)."""
    uninterruptible: bool = False
    """Its main thread sleeps in the kernel and heeds no signal (state D)."""
    reads_stdin: bool = False
    """It waits for somebody to type."""
    cpu_fraction: float | None = None
    """CPU use of its whole process tree, in cores."""
    io_bytes_per_s: float | None = None
    faults_per_s: float | None = None
