"""Has training become slower? The last ten steps against fifty from the beginning of the attempt.

Steps that take long for a reason of their own (an evaluation that nobody declared, the first after one, a collection of
garbage) are few: the fifth that is slowest is left out on both sides, and so is the fifth that is fastest. A job whose
step times vary by nature has to be slower by more than they vary. Where tokens are known, steps of more tokens are no
slower, nor are steps that only have fewer of them: both speeds must have dropped.

The baseline never follows a drop, however slowly it comes. It follows a rise: clocks, caches and loaders may warm up.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median, pstdev

from evertrain.model.config import MetricConfig
from evertrain.model.metrics import MetricEvent, Step

_CERTAIN = 6.0
"""Standard errors; many comparisons are made, and step times that follow each other are alike."""
_TAILS = 1.2
"""What cutting them takes from the spread."""
_FASTER = 0.9
"""Part of the time before: a rise that the baseline follows."""
_ROW = 5
"""Comparisons in a row."""


class Pace:
    """The speed of one rank in one attempt."""

    def __init__(self, config: MetricConfig) -> None:
        self._config = config
        self._steps = _Speed(config)
        self._tokens = _Speed(config)
        self._recent: deque[float] = deque(maxlen=config.recent_steps)
        self._last: Step | None = None
        self._last_tokens: Step | None = None
        self._slow_steps: list[tuple[int, float]] = []
        self.slow_since: int | None = None
        """The first slow step, while training is slow."""

    @property
    def step_s(self) -> float | None:
        """Median of the last steps."""
        return median(self._recent) if self._recent else None

    def take(self, step: Step) -> MetricEvent | None:
        last = self._last
        if last is not None and step.count == last.count:
            return None
        self._last = step
        if last is None or step.count < last.count:
            self._last_tokens = step
            return None
        seconds = _between(last, step) / (step.count - last.count)
        self._recent.append(seconds)
        is_slow = self.slow_since is not None
        self._steps.take(seconds, is_slow)
        self._take_tokens(step, is_slow)
        return self._judge(step)

    def _take_tokens(self, step: Step, is_slow: bool) -> None:
        before = self._last_tokens
        if step.tokens is None:
            return
        if before is None or before.tokens is None or step.tokens < before.tokens:
            self._last_tokens = step
        elif step.tokens > before.tokens:
            self._tokens.take(_between(before, step) / (step.tokens - before.tokens), is_slow)
            self._last_tokens = step

    def _judge(self, step: Step) -> MetricEvent | None:
        speeds = [speed for speed in (self._steps, self._tokens) if speed.is_known]
        if self._tokens.is_begun and not self._tokens.is_known:
            return None
        if not speeds:
            return None
        if self.slow_since is not None:
            if any(speed.is_back for speed in speeds):
                return self._end(step)
            return None
        # of steps of any size one of the two speeds varies and the other hardly does
        if not min(speeds, key=lambda speed: speed.spread).is_slow or not all(speed.is_below for speed in speeds):
            self._slow_steps.clear()
            return None
        self._slow_steps.append((step.step, step.time))
        if len(self._slow_steps) < _ROW or step.time - self._slow_steps[0][1] < self._config.slow_s:
            del self._slow_steps[_ROW:]
            return None
        self.slow_since = self._slow_steps[0][0]
        return self._event(step, self.slow_since, is_over=False)

    def _end(self, step: Step) -> MetricEvent:
        first, self.slow_since = self.slow_since, None
        self._slow_steps.clear()
        assert first is not None
        return self._event(step, first, is_over=True)

    def _event(self, step: Step, first: int, *, is_over: bool) -> MetricEvent:
        now, usual = 1 / self._steps.recent, 1 / self._steps.usual
        text = f"{now:.4g} steps a second since step {first}, {100 * now / usual:.0f} % of {usual:.4g} before"
        if self._tokens.is_known:
            now_tokens, usual_tokens = 1 / self._tokens.recent, 1 / self._tokens.usual
            text += f"; {now_tokens:.4g} tokens a second, {100 * now_tokens / usual_tokens:.0f} % of {usual_tokens:.4g}"
        if is_over:
            text = f"back at {now:.4g} steps a second at step {step.step}, slow since step {first}"
        return MetricEvent(
            kind="slow", step=first, time=step.time, value=now, baseline=usual, evidence=text,
            confidence=0.7, is_over=is_over,
        )  # fmt: skip


class _Speed:
    """Seconds for one of something."""

    def __init__(self, config: MetricConfig) -> None:
        self._config = config
        self._left_out = config.warm_up_steps
        self._block: list[float] = []
        self._last: deque[float] = deque(maxlen=config.recent_steps)
        self.usual = 0.0
        self.spread = 0.0
        self.is_begun = False

    def take(self, seconds: float, is_slow: bool) -> None:
        self.is_begun = True
        if self._left_out > 0:
            self._left_out -= 1
            return
        self._last.append(seconds)
        if is_slow:
            self._block.clear()
            return
        self._block.append(seconds)
        if len(self._block) >= self._config.baseline_steps:
            self._follow()

    def _follow(self) -> None:
        usual, spread = _middle(self._block), _spread(self._block)
        error = _CERTAIN * spread / math.sqrt(len(self._block))
        if not self.usual or usual < self.usual * min(_FASTER, math.exp(-error)):
            self.usual, self.spread = usual, spread
        self._block.clear()

    @property
    def is_known(self) -> bool:
        return self.usual > 0 and len(self._last) == self._last.maxlen

    @property
    def recent(self) -> float:
        return _middle(self._last)

    @property
    def is_below(self) -> bool:
        return self.recent > self.usual / self._config.slow_below

    @property
    def is_slow(self) -> bool:
        """Below the limit, and by more than it varies."""
        return self.is_below and self.recent > self.usual * math.exp(_CERTAIN * self._error)

    @property
    def is_back(self) -> bool:
        return self.recent < self.usual * max(1 / self._config.slow_until, math.exp(_CERTAIN / 2 * self._error))

    @property
    def _error(self) -> float:
        """Of the last steps and of the baseline together, as part of the latter."""
        return self.spread * math.sqrt(1 / len(self._last) + 1 / self._config.baseline_steps)


def _between(last: Step, step: Step) -> float:
    """Time from the end of one step to the end of another that was not spent in declared phases."""
    return max(step.time - last.time - (step.declared_s - last.declared_s), 1e-9)


def _middle(seconds: list[float] | deque[float]) -> float:
    """The geometric mean without the fifth that is largest and the fifth that is smallest."""
    ordered = sorted(seconds)
    cut = len(ordered) // 5
    return math.exp(fmean(map(math.log, ordered[cut : len(ordered) - cut])))


def _spread(seconds: list[float]) -> float:
    """How far they vary, as a standard deviation of logarithms; what lies farther out than nine tenths lies there."""
    ordered = sorted(map(math.log, seconds))
    tenth = len(ordered) // 10
    low, high = ordered[tenth], ordered[-1 - tenth]
    return _TAILS * pstdev([min(max(one, low), high) for one in ordered])
