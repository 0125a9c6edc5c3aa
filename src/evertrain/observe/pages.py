"""What does a rank's telemetry page say? The reader's side of `evertrain.worker.page`.

A read takes the newest whole slot and never waits: the writer may be running, stopped or dead at any point. What
cannot be read is reported as blind, with the reason; it is never taken for healthy or for dead.
"""

from __future__ import annotations

import os
import struct
from typing import Any, Literal
from zlib import crc32

import msgspec

from evertrain.worker import page as layout

_TORN = "both slots are damaged"
_METRICS_CRC = -3
_STATES: tuple[Literal["none", "entered", "done"], ...] = ("none", "entered", "done")


class Collective(msgspec.Struct, frozen=True):
    """The collective a rank touched last. `entered` may be stale for one that nobody waited for yet."""

    group: str
    seq: int
    """Counted per group from 1; send and recv have a count of their own."""
    op: str
    state: Literal["none", "entered", "done"]
    time: float


class PageView(msgspec.Struct, frozen=True, kw_only=True):
    """One page at one moment. Steps are -1 and times 0.0 while unknown."""

    job: str
    term: int
    attempt: int
    rank: int
    sequence: int
    """Grows with every write."""
    written_time: float
    pid: int
    abs_step: int
    """Last step that the script named as finished."""
    rel_step: int
    """Steps counted in this attempt by the optimizer hook."""
    progress_time: float
    """Last step, report, save or change of phase."""
    step_s: float
    """Median of the last few steps; 0.0 before the second."""
    phase: str
    phase_time: float
    """When the phase began."""
    resumed_step: int
    """Step that `load()` restored."""
    resumed_time: float
    """When training was back: at the end of `load()`, else at the first step."""
    reached: int
    """Highest step of all earlier attempts, as the controller told the rank."""
    passed_step: int
    """The first named step that was higher than `reached`."""
    passed_time: float
    """When this rank first finished a step higher than `reached`."""
    loss: float | None
    grad_norm: float | None
    tokens: float | None
    """All that the rank has reported in this attempt."""
    metrics: dict[str, float]
    collective: Collective
    dump_signal: int = 0
    """At which the rank writes its stack down; 0: none."""
    saves_failed: int
    """Checkpoints in a row that could not be saved."""
    env_changed: bool
    """The script changed environment that torch reads while it is imported."""
    takes_replays: bool = False
    """The script has asked whether it is a replay."""


def read(path: str | os.PathLike[str]) -> tuple[PageView | None, str]:
    """The newest state on a page, or None and why nothing can be seen."""
    reason = ""
    # a very busy writer may overtake one read; a stopped or dead one never spoils more than one slot
    for _ in range(3):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return None, f"page cannot be opened: {error.strerror}"
        try:
            raw = os.read(descriptor, layout.LOSSES_AT)
        except OSError as error:
            return None, f"page cannot be read: {error.strerror}"
        finally:
            os.close(descriptor)
        view, reason = parse(raw)
        if view is not None or reason != _TORN:
            return view, reason
    return None, reason


class Reader:
    """Reads one page again and again: what has not changed is not parsed again, and the file stays open."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._descriptor = -1
        self._raw = b""
        self._seen: tuple[PageView | None, str] = (None, "never read")

    def read(self) -> tuple[PageView | None, str]:
        """As `read`: the newest state, or None and why nothing can be seen."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            raw = os.pread(self._descriptor, layout.LOSSES_AT, 0)
        except OSError as error:
            return None, f"page cannot be read: {error.strerror}"
        if raw != self._raw:
            self._raw, self._seen = raw, parse(raw)
            if self._seen[1] == _TORN:
                return read(self._path)
        return self._seen

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def parse(raw: bytes) -> tuple[PageView | None, str]:
    """The newest state in the bytes of a page (its losses may be left out), or None and why there is none."""
    if (reason := _why_unreadable(raw)) is not None:
        return None, reason
    _, _, slot_bytes, term, attempt, rank, _, job, _ = layout.HEADER.unpack_from(raw)
    slots = [raw[at : at + slot_bytes] for at in (layout.HEADER_BYTES, layout.HEADER_BYTES + slot_bytes)]
    if not any(map(any, slots)):
        return None, "nothing written yet"
    whole = [fields for slot in slots if (fields := _slot(slot)) is not None]
    if not whole:
        return None, _TORN
    return _view(*max(whole), *_collective(raw), job=_text(job), term=term, attempt=attempt, rank=rank), ""


def losses(path: str | os.PathLike[str]) -> dict[int, float]:
    """The losses that a rank named together with their steps, the last 256; of a step reported twice the later one.

    Empty where there is no page, or one that cannot be read. A pair that is not whole is left out.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            raw = file.read(layout.STEPS_AT)
    except OSError:
        return {}
    if len(raw) < layout.STEPS_AT or _why_unreadable(raw) is not None:
        return {}
    found = []
    for at in range(layout.LOSSES_AT, layout.STEPS_AT, layout.LOSS.size):
        count, step, loss, crc = layout.LOSS.unpack_from(raw, at)
        if count and crc32(raw[at : at + layout.LOSS.size - layout.CRC.size]) == crc:
            found.append((count, step, loss))
    return {step: loss for _, step, loss in sorted(found, key=lambda one: one[0])}


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a rank as it stands in the ring. None: not reported with this step."""

    count: int
    """From 1, without a gap as far as the ring reaches."""
    step: int
    rel_step: int
    """Optimizer steps of this attempt; 0 where none are seen."""
    time: float
    declared_s: float
    stage: int
    loss: float | None
    grad_norm: float | None
    tokens: float | None
    is_open: bool
    """The optimizer has stepped, and what the script says of it is still to come, if it says anything."""


class StepReader:
    """Reads the steps of one page as they come. None is told twice, and none missed unless 128 come at once."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self._descriptor = -1
        self._after = 0

    def read(self) -> list[StepRecord]:
        """Those that are new and finished, in order; one that is open counts once another has come after it."""
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
                raw = os.pread(self._descriptor, layout.SIZE, 0)
                if len(raw) < layout.SIZE or _why_unreadable(raw) is not None:
                    self.close()
                    return []
            raw = os.pread(self._descriptor, layout.SIZE - layout.STEPS_AT, layout.STEPS_AT)
        except OSError:
            return []
        found = self._next(raw)
        if found and found[-1].is_open:
            del found[-1]
        if found:
            self._after = found[-1].count
        return found

    def _next(self, raw: bytes) -> list[StepRecord]:
        found: list[StepRecord] = []
        for count in range(self._after + 1, self._after + 1 + layout.STEPS):
            at = (count - 1) % layout.STEPS * layout.STEP.size
            (there,) = _COUNT.unpack_from(raw, at)
            if there > count:  # the writer has gone round since the last look
                everything = [_step(raw, at) for at in range(0, layout.STEPS * layout.STEP.size, layout.STEP.size)]
                newer = [one for one in everything if one is not None and one.count > self._after]
                return sorted(newer, key=lambda one: one.count)
            step = _step(raw, at) if there == count else None
            if step is None:
                break
            found.append(step)
        return found

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def step_times(path: str | os.PathLike[str]) -> list[float]:
    """When the last steps of a rank were over, in order; also of one of which more may yet be told. Empty where there
    is no page, or one that cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            raw = file.read(layout.SIZE)
    except OSError:
        return []
    if len(raw) < layout.SIZE or _why_unreadable(raw) is not None:
        return []
    found = [_step(raw, at) for at in range(layout.STEPS_AT, layout.SIZE, layout.STEP.size)]
    return sorted(one.time for one in found if one is not None)


_COUNT = struct.Struct("@Q")


def _step(raw: bytes, at: int) -> StepRecord | None:
    """None: it was being written."""
    fields = layout.STEP.unpack_from(raw, at)
    count, step, rel_step, time, declared_s, loss, grad_norm, tokens, flags, stage, crc = fields
    if not count or crc32(raw[at : at + layout.STEP.size - 4]) != crc:
        return None
    return StepRecord(
        count=count, step=step, rel_step=rel_step, time=time, declared_s=declared_s, stage=stage,
        loss=loss if flags & layout.HAS_LOSS else None,
        grad_norm=grad_norm if flags & layout.HAS_GRAD_NORM else None,
        tokens=tokens if flags & layout.HAS_TOKENS else None,
        is_open=bool(flags & layout.IS_OPEN),
    )  # fmt: skip


def _why_unreadable(raw: bytes) -> str | None:
    """What is wrong with a page's header; None: nothing."""
    if len(raw) < layout.HEADER.size:
        return "page is too short"
    magic, version, slot_bytes, *_, crc = layout.HEADER.unpack_from(raw)
    if magic != layout.MAGIC:
        return "not a telemetry page"
    if version != layout.LAYOUT:
        return f"page has layout {version}, this reader knows layout {layout.LAYOUT}"
    if slot_bytes != layout.SLOT_BYTES or len(raw) < layout.LOSSES_AT or crc32(raw[: layout.HEADER.size - 8]) != crc:
        return "page header is damaged"
    return None


def _slot(raw: bytes) -> tuple[tuple[Any, ...], bytes] | None:
    """Fields (sequence number first) and metrics of a slot that is whole."""
    body, metrics = raw[: layout.SLOT.size], raw[layout.METRICS_AT :]
    (crc,) = layout.CRC.unpack_from(raw, layout.SLOT.size)
    if crc32(body) != crc:
        return None
    fields = layout.SLOT.unpack(body)
    sequence, metrics_crc = fields[0], fields[_METRICS_CRC]
    return (fields, metrics) if sequence and crc32(metrics) == metrics_crc else None


def _collective(raw: bytes) -> tuple[int, Collective]:
    """Which write it is, and the collective; while the first is being written there is none."""
    newest = 0, Collective("", 0, "", "none", 0.0)
    for at in range(layout.COLLECTIVES_AT, layout.LOSSES_AT, layout.COLLECTIVE.size):
        number, time, seq, group, op, state, crc = layout.COLLECTIVE.unpack_from(raw, at)
        if number > newest[0] and crc32(raw[at : at + layout.COLLECTIVE.size - 4]) == crc:
            newest = number, Collective(_text(group), seq, _text(op), _STATES[min(state, 2)], time)
    return newest


def _view(
    fields: tuple[Any, ...], metrics: bytes, written: int, collective: Collective, *, job: str, term: int, attempt: int,
    rank: int,
) -> PageView:  # fmt: skip
    # fmt: off
    (
        sequence, written_time, dump_signal,
        pid, abs_step, rel_step, progress_time, resumed_step, resumed_time, reached, passed_step, passed_time,
        loss, grad_norm, tokens, step_s, phase_time, flags, metrics_count, _, saves_failed, phase,
    ) = fields
    # fmt: on
    named = list(layout.METRIC.iter_unpack(metrics))[:metrics_count]
    return PageView(
        job=job, term=term, attempt=attempt, rank=rank,
        sequence=sequence + written, written_time=max(written_time, collective.time), pid=pid,
        abs_step=abs_step, rel_step=rel_step, progress_time=progress_time, step_s=step_s, phase=_text(phase),
        phase_time=phase_time, resumed_step=resumed_step, resumed_time=resumed_time, reached=reached,
        passed_step=passed_step, passed_time=passed_time,
        loss=loss if flags & layout.HAS_LOSS else None,
        grad_norm=grad_norm if flags & layout.HAS_GRAD_NORM else None,
        tokens=tokens if flags & layout.HAS_TOKENS else None,
        metrics={_text(name): value for name, value in named},
        collective=collective,
        dump_signal=dump_signal,
        saves_failed=saves_failed,
        env_changed=bool(flags & layout.ENV_CHANGED),
        takes_replays=bool(flags & layout.TAKES_REPLAYS),
    )  # fmt: skip


def _text(raw: bytes) -> str:
    """Text that is safe to print: what is not printable is written as an escape."""
    decoded = raw.split(b"\0", 1)[0].decode("utf-8", "backslashreplace")
    return decoded if decoded.isprintable() else decoded.encode("unicode_escape").decode("ascii")
