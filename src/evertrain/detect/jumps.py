"""Is this loss, or this gradient norm, what it should be? One series of numbers, judged as it comes.

Not finite is found at once. A jump needs a factor over what was usual, and it needs to stay: what comes back within two
steps was a spike. Three things keep noise from being a jump, and each can only make it later: the median says what is
usual, the tenth of the values that is largest says how far noise reaches, and the highest median of the attempt says
what size is worth a word.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Literal

from evertrain.model.config import MetricConfig
from evertrain.model.metrics import MetricEvent

_NOISE = 3.0
"""A jump is so many times larger than nine tenths of the values before it."""


class Series:
    """Of one attempt. Only how large numbers are counts, so that a loss may be negative."""

    def __init__(
        self, name: Literal["loss", "grad_norm"], config: MetricConfig, *, only_not_finite: bool = False
    ) -> None:
        self._name: Literal["loss", "grad_norm"] = name
        self._config = config
        self._only_not_finite = only_not_finite
        # with loss scaling, a norm that is not finite alone is a step that is skipped
        self._patience = config.norm_steps if name == "grad_norm" else config.loss_steps
        self._not_finite = 0
        """In a row, """
        self._first_not_finite = 0
        """... and the step of the first."""
        self._any_finite = False
        self._high: list[tuple[int, float]] = []
        self._before: deque[float] = deque(maxlen=config.jump_window)
        self._highest = 0.0

    def new_stage(self) -> None:
        """The script does something else now: what was usual says nothing about it."""
        self._before.clear()
        self._high.clear()
        self._highest = 0.0

    def take(self, step: int, time: float, value: float) -> MetricEvent | None:
        if not math.isfinite(value):
            return self._take_not_finite(step, time, value)
        self._not_finite = 0
        self._any_finite = True
        if self._only_not_finite:
            return None
        limit = self._limit()
        if limit is not None and value > limit:
            return self._take_high(step, time, value, limit)
        # a spike that came back is noise like any other: seldom, it moves neither of the two marks
        self._before.extend(abs(high) for _, high in self._high)
        self._high.clear()
        self._before.append(abs(value))
        return None

    def _limit(self) -> float | None:
        """Above it a value is a jump; None: nothing can be said yet."""
        config = self._config
        if len(self._before) < max(config.jump_needs, 1):
            return None
        ordered = sorted(self._before)
        usual = median(ordered)
        self._highest = max(self._highest, usual)
        if not self._highest:
            return None  # nothing but zeros has been seen
        reach = ordered[(9 * len(ordered)) // 10]
        return max(config.jump_factor * usual, _NOISE * reach, config.jump_floor * self._highest)

    def _take_high(self, step: int, time: float, value: float, limit: float) -> MetricEvent | None:
        config = self._config
        self._high.append((step, value))
        row = len(self._high)
        if row >= config.jump_steps + config.jump_window:
            # it stays there: this is what is usual now
            values = [abs(high) for _, high in self._high]
            self._high.clear()
            self._before.clear()
            self._before.extend(values)
            return None
        if row not in (1, config.jump_steps):
            return None
        usual = median(self._before)
        first = self._high[0][0]
        text = f"{self._words} {value:.6g} at step {step} (a jump is above {limit:.4g}; median before: {usual:.4g})"
        is_warning = row < config.jump_steps
        return MetricEvent(
            kind="loss_jump" if self._name == "loss" else "grad_norm_jump",
            step=first, time=time, value=value, baseline=usual,
            evidence=text if row == 1 else f"{text}, high for {row} steps since step {first}",
            confidence=0.3 if is_warning else 0.8,
            is_warning=is_warning,
        )  # fmt: skip

    def _take_not_finite(self, step: int, time: float, value: float) -> MetricEvent | None:
        """The first of a row is told at once; a gradient norm's is a warning until it cannot be loss scaling."""
        self._high.clear()
        self._not_finite += 1
        if self._not_finite == 1:
            self._first_not_finite = step
        row, first, patience = self._not_finite, self._first_not_finite, self._patience
        if self._name == "grad_norm" and patience > 1 and not self._any_finite:
            patience = max(patience, 20)  # loss scaling looks for its first scale with many steps that are skipped
        if row not in (1, patience):
            return None
        is_warning = row < patience
        since = f" for {row} steps since step {first}" if row > 1 else f" at step {first}"
        return MetricEvent(
            kind="loss_not_finite" if self._name == "loss" else "grad_norm_not_finite",
            step=first, time=time, value=value,
            evidence=f"{self._words} is {value}{since}" + (
                "; single ones are usual with loss scaling" if is_warning and self._name == "grad_norm" else ""
            ),
            confidence=0.3 if is_warning else 1.0,
            is_warning=is_warning,
        )  # fmt: skip

    @property
    def _words(self) -> str:
        return self._name.replace("grad_norm", "gradient norm")
