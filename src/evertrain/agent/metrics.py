"""Does what the ranks of this node report look as it should? Every step is read from their pages, and judged by rules.

Numbers that are not finite are looked for in all ranks. Jumps and speed are the same on all of them, as far as a job
works together: the lowest rank of the node speaks for it. A sign stays for the attempt; a new attempt begins with none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from evertrain.detect.metrics import MetricRules
from evertrain.model.config import MetricConfig
from evertrain.model.metrics import MetricEvent, Step
from evertrain.model.sensing import GpuReading, PortReading, Sign
from evertrain.observe.pages import PageView, StepReader, StepRecord

_MOST_SIGNS = 32
_OVER_S = 10.0
"""So long is a sign still told that is over, for whoever looks seldom."""
_TRAINING = frozenset({"train"})
"""The phase of a page in which traffic and busy tensor cores are to be expected."""


class Metrics:
    """Of one node. All times are by the machine's monotonic clock, as those of the pages are."""

    def __init__(self, page_path: Callable[[int, int], Path], config: MetricConfig) -> None:
        """`page_path`: of an attempt and a rank."""
        self._page_path = page_path
        self._config = config
        self._attempt: int | None = None
        self._ranks: dict[int, _Rank] = {}
        self._signs: dict[str, Sign] = {}
        self._named: dict[str, set[int]] = {}
        self._over: dict[str, float] = {}
        self._in_training = False

    def signs(self) -> tuple[Sign, ...]:
        """That hold, or were seen in this attempt; safe to ask as often as anybody likes."""
        return tuple(self._signs.values())

    def look(self, views: Iterable[PageView], attempt: int | None, now: float) -> None:
        """Read what is new on the pages of the attempt; those of others are left alone. None: none is running."""
        if attempt is not None and attempt != self._attempt:
            self._begin(attempt)
        for key in [key for key, since in self._over.items() if now - since > _OVER_S]:
            del self._over[key], self._signs[key], self._named[key]
        current = [view for view in views if view.attempt == self._attempt]
        lowest = min((view.rank for view in current), default=-1)
        self._in_training = any(view.rank == lowest and view.phase in _TRAINING for view in current)
        for view in sorted(current, key=lambda view: view.rank):
            known = self._ranks.get(view.rank)
            if known is None:
                known = self._ranks[view.rank] = _Rank(self._page_path(view.attempt, view.rank))
            known.speak_for_all(view.rank == lowest, self._config)
            for event in known.read():
                self._note(event, view.rank, now)

    def look_at_machine(self, ports: Iterable[PortReading], gpus: Iterable[GpuReading], now: float) -> None:
        """What sensors have read of the ports that training uses, and of the GPUs; after `look`."""
        speaker = self._speaker
        if speaker is None:
            return
        rank, rules = speaker
        counted = tuple(ports)
        found = []
        if counted:
            total = sum(port.received_bytes + port.sent_bytes for port in counted)
            found += rules.traffic(now, total, is_declared=not self._in_training)
        for gpu in gpus:
            if gpu.temperature_c is not None:
                found += rules.heat(now, f"GPU {gpu.index} ({gpu.uuid})", gpu.temperature_c, gpu.slowdown_c)
        for event in found:
            self._note(event, rank, now)

    def look_at_tensor_cores(self, device: str, activity: float, utilisation: float, now: float) -> None:
        """Parts of the time since the last reading in which a GPU's tensor cores, and the GPU, were active."""
        speaker = self._speaker
        if speaker is not None:
            rank, rules = speaker
            for event in rules.tensor(now, device, activity, utilisation, is_declared=not self._in_training):
                self._note(event, rank, now)

    def close(self) -> None:
        for rank in self._ranks.values():
            rank.close()
        self._ranks.clear()

    @property
    def _speaker(self) -> tuple[int, MetricRules] | None:
        rank = min(self._ranks, default=None)
        return None if rank is None else (rank, self._ranks[rank].rules)

    def _begin(self, attempt: int) -> None:
        self.close()
        self._attempt = attempt
        self._signs.clear()
        self._named.clear()
        self._over.clear()

    def _note(self, event: MetricEvent, rank: int, now: float) -> None:
        key = f"metrics:{event.kind}:a{self._attempt}:{event.step}"
        if event.is_over:
            if key in self._signs:
                self._over[key] = now
            return
        if event.is_warning:
            return
        known = self._signs.get(key)
        ranks = self._named.setdefault(key, set())
        ranks.add(rank)
        if known is not None:
            # all ranks that average their gradients have them in the same step: one event
            _, _, text = known.evidence.partition(": ")
            self._signs[key] = msgspec.structs.replace(known, evidence=f"{_words(ranks)}: {text}")
            return
        self._signs[key] = Sign(
            key=key,
            kind=event.kind,
            device=event.device,
            evidence=f"{_words(ranks)}: {event.evidence}",
            time=now,
            attempt=self._attempt,
        )
        while len(self._signs) > _MOST_SIGNS:
            oldest = next(iter(self._signs))
            del self._signs[oldest], self._named[oldest]
            self._over.pop(oldest, None)


class _Rank:
    """One rank of one attempt, and how far its page has been read."""

    def __init__(self, path: Path) -> None:
        self._reader = StepReader(path)
        self._speaks: bool | None = None
        self.rules: MetricRules
        self._last: StepRecord | None = None
        self._count = 0

    def speak_for_all(self, speaks: bool, config: MetricConfig) -> None:
        """Whether it is the lowest rank that can be seen; a lower one may show up later."""
        if speaks != self._speaks:
            self._speaks = speaks
            self.rules = MetricRules(config, only_not_finite=not speaks)

    def read(self) -> list[MetricEvent]:
        return [event for record in self._reader.read() for event in self.rules.step(self._step(record))]

    def _step(self, record: StepRecord) -> Step:
        """Counted: whatever is named anew, or follows an optimizer's step, is the next one; those missed count too."""
        last, self._last = self._last, record
        if last is None or (last.step, last.rel_step) != (record.step, record.rel_step):
            self._count += 1 if last is None else record.count - last.count
        return Step(
            step=record.step, count=self._count, time=record.time, declared_s=record.declared_s, stage=record.stage,
            loss=record.loss, grad_norm=record.grad_norm, tokens=record.tokens,
        )  # fmt: skip

    def close(self) -> None:
        self._reader.close()


def _words(ranks: set[int]) -> str:
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
