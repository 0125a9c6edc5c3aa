"""What is this rank doing right now? The telemetry page, from the writer's side.

A page is a small file in shared memory. The agent creates it, the rank writes it, the agent reads it ten times a
second, also when the rank is stopped or dead:

    ┌──────────┬──────────┬──────────┬─────────────────┬──────────┬─────────┐
    │  header  │  slot 0  │  slot 1  │  collective 0 1 │  losses  │  steps  │
    └──────────┴──────────┴──────────┴─────────────────┴──────────┴─────────┘

Two slots are written in turn; each carries a sequence number and a CRC, so whatever state the writer died in, the slot
that it was not writing is whole. The last collective, which is written most often, has two small slots of its own.

The losses are a ring of the last (step, loss) pairs, each with a CRC of its own: a pair that was being written when the
writer died is the only one lost. They are read when two attempts are compared, not ten times a second. The steps are a
second ring of the same kind: what was reported with each, and when it was finished, for whoever must not miss one.

One write is one slice assignment of finished bytes (threads cannot tear it under the interpreter's lock), takes about
a microsecond and makes no system call. All fields are native and aligned, so that C can read and write them too. Times
are by the machine's monotonic clock, which nobody can set, and which the agent reads as well.
`evertrain.observe.pages` is the reader.
"""

from __future__ import annotations

import _thread
import itertools
import os
import struct
import time
from zlib import crc32

from evertrain.worker import mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import SupportsFloat

MAGIC = b"EVPAGE\n\0"
LAYOUT = 5

HEADER = struct.Struct("@8s II qqq d 64s I4x")
"""magic, layout, slot bytes, term, attempt, rank, created time, job, CRC of what precedes it."""
HEADER_BYTES = 128

SLOT = struct.Struct("@Q d I4x qqq d qd qqd ddd dd IIII 32s")
"""Sequence and time of the write first; see `PageWriter.write`. The CRC of these bytes follows, then the named metrics,
whose CRC is one of these fields: they change seldom, and a checksum costs more than a copy."""
CRC = struct.Struct("@I4x")
METRICS_AT = SLOT.size + CRC.size
METRICS_BYTES = 256
SLOT_BYTES = METRICS_AT + METRICS_BYTES

COLLECTIVE = struct.Struct("@Q dQ 48s32s I I")
"""Which write it is, counted from 1; time, number in its group, group, operation, state, CRC of what precedes it."""
COLLECTIVES_AT = HEADER_BYTES + 2 * SLOT_BYTES
LOSSES_AT = COLLECTIVES_AT + 2 * COLLECTIVE.size
"""The part before it is what a reader looks at again and again."""

LOSS = struct.Struct("@Qqd I4x")
"""Which loss it is, counted from 1; step, loss, CRC of what precedes it."""
LOSSES = 256

STEPS_AT = LOSSES_AT + LOSSES * LOSS.size
STEP = struct.Struct("@Qqq ddddd HHI")
"""Which step it is, counted from 1; the step as it is named, optimizer steps, time, time in declared phases, loss,
gradient norm, tokens, flags, stage, CRC of what precedes it. One that has come is written again when more is known."""
STEPS = 128
SIZE = STEPS_AT + STEPS * STEP.size

METRIC = struct.Struct("@24s d")
MAX_METRICS = METRICS_BYTES // METRIC.size

# flags of a slot
ENV_CHANGED = 1
HAS_LOSS = 2
HAS_GRAD_NORM = 4
HAS_TOKENS = 8
# ... the script has asked whether it is a replay
TAKES_REPLAYS = 32
# ... and of a step, beside the last three: more will be known of it, or the next will come
IS_OPEN = 16

# states of the last collective
NONE, ENTERED, DONE = 0, 1, 2

assert HEADER.size <= HEADER_BYTES and SLOT_BYTES % 8 == COLLECTIVE.size % 8 == 0


def text(value: str, size: int) -> bytes:
    """UTF-8, cut to `size` bytes with at least one NUL at the end."""
    return value.encode("utf-8", "backslashreplace")[: size - 1]


def number(value: SupportsFloat) -> float:
    """As a float; a tensor in the middle of a graph as well."""
    detach = getattr(value, "detach", None)
    return float(value if detach is None else detach())


def create(path: str, *, job: str, term: int, attempt: int, rank: int) -> None:
    """Allocate an empty page at `path`. The agent does this before it lets the rank go.

    Raises OSError with the bytes needed and free when the shared memory is full.
    """
    fields = (MAGIC, LAYOUT, SLOT_BYTES, term, attempt, rank, _now(), text(job, 64))
    body = HEADER.pack(*fields, 0)[: -CRC.size]
    whole = (body + CRC.pack(crc32(body))).ljust(SIZE, b"\0")
    fresh = f"{path}.new"
    mapping.allocate(fresh, SIZE)
    with open(fresh, "r+b", buffering=0) as file:
        file.write(whole)
    os.replace(fresh, path)


class PageWriter:
    """The rank's end of its page: set fields, then `write()`.

    Fields are plain attributes; nothing is visible to the agent before `write()`. Any thread may write.
    """

    __slots__ = (
        "_lock", "_losses", "_metrics", "_take", "_taken", "_view", "abs_step", "collective", "dump_signal", "flags",
        "grad_norm", "loss", "metrics_count", "metrics_crc", "passed_step", "passed_time", "phase", "phase_time", "pid",
        "progress_time", "reached", "rel_step", "resumed_step", "resumed_time", "saves_failed", "sequence", "step_s",
        "steps", "tokens",
    )  # fmt: skip

    def __init__(self, path: str) -> None:
        self._view = mapping.map_file(path)
        magic, layout, slot_bytes, *_ = HEADER.unpack(self._view[: HEADER.size])
        if (magic, layout, slot_bytes) != (MAGIC, LAYOUT, SLOT_BYTES):
            raise ValueError(f"{path} is no telemetry page of layout {LAYOUT}")
        # re-entrant: a signal handler of the script may report in the middle of a write
        self._lock = _thread.RLock()
        self._metrics = bytes(METRICS_BYTES)
        self._take = itertools.count(1).__next__
        self._taken = 0
        self._losses = 0
        self.steps = 0
        """Counted."""
        self.sequence = 0
        self.pid = os.getpid()
        self.abs_step = -1
        self.rel_step = 0
        self.progress_time = 0.0
        self.resumed_step = -1
        self.resumed_time = 0.0
        self.reached = -1
        self.passed_step = -1
        self.passed_time = 0.0
        self.loss = 0.0
        self.grad_norm = 0.0
        self.tokens = 0.0
        self.step_s = 0.0
        self.phase = b""
        self.phase_time = 0.0
        self.collective = b"", 0, b"", NONE
        """Group, number, operation and state, as `write_collective` had them last."""
        self.dump_signal = 0
        """At which this rank writes its stack down, see `worker.contact`; 0: none."""
        self.flags = 0
        self.saves_failed = 0
        """In a row."""
        self.metrics_count = 0
        self.metrics_crc = crc32(self._metrics)

    def set_metrics(self, metrics: dict[str, SupportsFloat]) -> None:
        """Replace the named metrics; the first eight are kept."""
        kept = list(metrics.items())[:MAX_METRICS]
        packed = b"".join([METRIC.pack(text(name, 24), number(value)) for name, value in kept])
        self._metrics = packed.ljust(METRICS_BYTES, b"\0")
        self.metrics_count = len(kept)
        self.metrics_crc = crc32(self._metrics)

    def remember_loss(self, step: int, loss: float) -> None:
        """Put a loss into the ring, in place of the oldest; before the `write` that names the step as finished."""
        with self._lock:
            count = self._losses = self._losses + 1
            body = _pack_loss(count, step, loss)
            start = LOSSES_AT + (count - 1) % LOSSES * LOSS.size
            self._view[start : start + LOSS.size] = body + _pack_crc(crc32(body))

    def remember_step(
        self, count: int, step: int, rel_step: int, now: float, declared_s: float, loss: float, grad_norm: float,
        tokens: float, flags: int, stage: int,
    ) -> None:  # fmt: skip
        """Put a step into the ring, in place of the oldest, or again in its own."""
        with self._lock:
            self.steps = count
            body = _pack_step(
                count, step, rel_step, now, declared_s, loss, grad_norm, tokens, flags, stage & 0xFFFF
            )  # fmt: skip
            start = STEPS_AT + (count - 1) % STEPS * STEP.size
            self._view[start : start + STEP.size] = body + _pack_short_crc(crc32(body))

    def write(self, now: float | None = None) -> None:
        """Make the fields visible, all at once."""
        with self._lock:
            sequence = self.sequence = self.sequence + 1
            body = _pack(
                sequence, _now() if now is None else now, self.dump_signal,
                self.pid, self.abs_step, self.rel_step, self.progress_time,
                self.resumed_step, self.resumed_time, self.reached, self.passed_step, self.passed_time,
                self.loss, self.grad_norm, self.tokens, self.step_s, self.phase_time,
                self.flags, self.metrics_count, self.metrics_crc, self.saves_failed, self.phase,
            )  # fmt: skip
            start = HEADER_BYTES if sequence & 1 else _SECOND
            self._view[start : start + SLOT_BYTES] = body + _pack_crc(crc32(body)) + self._metrics
            if sequence != self.sequence:  # a signal handler wrote in between; the page must not go back in time
                self.write()

    def write_collective(self, group: bytes, seq: int, op: bytes, state: int, now: float = 0.0) -> None:
        """The most frequent write, at once visible, without a lock. `now` where it is known."""
        number = self._taken = self._take()
        self.collective = group, seq, op, state
        body = _pack_collective(number, now or _now(), seq, group, op, state)
        start = COLLECTIVES_AT if number & 1 else _SECOND_COLLECTIVE
        self._view[start : start + _COLLECTIVE_BYTES] = body + _pack_short_crc(crc32(body))
        if number != self._taken:  # as above, or another thread
            self.write_collective(*self.collective)


_pack = SLOT.pack
_pack_loss = struct.Struct("@Qqd").pack
_pack_step = struct.Struct("@Qqq ddddd HH").pack
_pack_short_crc = struct.Struct("@I").pack
_pack_crc = CRC.pack
_pack_collective = struct.Struct("@Q dQ 48s32s I").pack
_now = time.monotonic
_SECOND = HEADER_BYTES + SLOT_BYTES
_COLLECTIVE_BYTES = COLLECTIVE.size
_SECOND_COLLECTIVE = COLLECTIVES_AT + _COLLECTIVE_BYTES
