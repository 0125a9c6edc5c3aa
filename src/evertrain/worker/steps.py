"""When is one training step finished, if the script does not say? Counted from the optimizers' own steps.

With several optimizers (GANs, one optimizer per parameter) the one that steps most rarely counts. Pure: it is told
that an optimizer has stepped, and answers whether a training step is finished.
"""

from __future__ import annotations


class _Seen:
    __slots__ = ("every", "last")

    def __init__(self, last: int, every: int) -> None:
        self.last = last
        self.every = every


class StepCounter:
    """Relative steps of this attempt. Optimizers are told apart by any key, such as `id()`."""

    __slots__ = ("_counting", "_seen", "_ticks")

    def __init__(self) -> None:
        self._ticks = 0
        self._seen: dict[int, _Seen] = {}
        self._counting: int | None = None

    def stepped(self, key: int) -> bool:
        """An optimizer has stepped. True if this finishes a training step."""
        self._ticks = tick = self._ticks + 1
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen(tick, tick)
            # the first optimizer counts at once; a rarer one takes over, but the step before it was counted already
            takes_over = self._counting is None or seen.every >= self._seen[self._counting].every
            first = self._counting is None
            if takes_over:
                self._counting = key
            return first
        seen.every, seen.last = tick - seen.last, tick
        if key == self._counting:
            return True
        assert self._counting is not None
        counting = self._seen[self._counting]
        stopped = tick - counting.last > 4 * counting.every + 16
        if stopped or seen.every > counting.every:
            if stopped:
                del self._seen[self._counting]
            self._counting = key
            return stopped
        return False


class Durations:
    """Median of the last few step times, from the moments at which steps ended."""

    __slots__ = ("_last_ns", "_recent")

    def __init__(self) -> None:
        self._last_ns = 0
        self._recent: list[int] = []

    def ended(self, now_ns: int) -> float:
        """A step ended; the median in seconds, 0.0 before the second step."""
        if self._last_ns:
            self._recent = [*self._recent[-4:], now_ns - self._last_ns]
        self._last_ns = now_ns
        return self.median_s

    @property
    def median_s(self) -> float:
        recent = sorted(self._recent)
        return recent[len(recent) // 2] / 1e9 if recent else 0.0
