"""Which signs follow from the steps that a tracker's files tell of? Those of `detect.metrics`, an attempt at a time."""

from __future__ import annotations

from collections.abc import Sequence

from evertrain.detect.metrics import MetricRules
from evertrain.model.config import MetricConfig
from evertrain.model.metrics import Step
from evertrain.model.sensing import Sign


class TrackerRules:
    """Loss and gradient norm only: when a tracker writes says little about when a step was done."""

    def __init__(self, config: MetricConfig) -> None:
        self._config = config
        self._attempt: int | None = None
        self._rules = MetricRules(config)
        self._signs: dict[str, Sign] = {}

    def __call__(self, attempt: int, steps: Sequence[Step], now: float) -> tuple[Sign, ...]:
        """Those of this attempt, old and new."""
        if attempt != self._attempt:
            self._attempt, self._rules, self._signs = attempt, MetricRules(self._config), {}
        for step in steps:
            for event in self._rules.step(step):
                if event.is_warning or event.is_over or event.kind in ("slow", "hot_and_slow"):
                    continue
                key = f"metrics:{event.kind}:a{attempt}:{event.step}"
                self._signs.setdefault(
                    key, Sign(key=key, kind=event.kind, evidence=event.evidence, time=now, attempt=attempt)
                )
        return tuple(self._signs.values())
