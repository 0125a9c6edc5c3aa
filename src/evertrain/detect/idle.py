"""Is the machine idle where it should not be? Traffic of ports, tensor cores, heat: each beside what training does.

None of these says anything alone: a job of one node has no traffic, one in plain fp32 uses no tensor cores, and a GPU
may run hot all its life. What counts is a change against what this attempt itself has shown, while it should train.
"""

from __future__ import annotations

from collections import deque

from evertrain.model.config import MetricConfig
from evertrain.model.metrics import MetricEvent

_LEAST_BYTES_PER_S = 1e6
"""Below it there is no traffic of training that could end."""
_NOTHING = 0.01
"""Part of the usual traffic: heartbeats and logins go on for ever."""
_STEPS = 20
"""So many have to be made before it is known what is usual."""
_READINGS = 3
_HOT_FOR_S = 60.0
"""A reading is news for so long."""


class Traffic:
    """Bytes at all ports of the node, over time."""

    def __init__(self, config: MetricConfig) -> None:
        self._config = config
        self._readings: deque[tuple[float, float]] = deque()
        self._usual = 0.0
        self._steps = 0
        self._start: tuple[float, float] | None = None
        self._is_told = False

    def step(self) -> None:
        """A step was made: what flowed until now was training."""
        self._steps += 1
        self._is_told = False
        if self._readings and self._start is not None and self._steps >= _STEPS:
            (begun, first), (now, total) = self._start, self._readings[-1]
            if now > begun:
                self._usual = max(0.0, total - first) / (now - begun)
        self._readings = deque(list(self._readings)[-1:])

    def take(self, time: float, total: float, step: int, step_s: float | None, is_declared: bool) -> MetricEvent | None:
        """`total`: received and sent since the counters began. `is_declared`: inside an evaluation or a save."""
        if self._readings and (total < self._readings[-1][1] or is_declared):
            self._readings.clear()  # counters began anew, or what flows is not of training
        self._readings.append((time, total))
        if self._start is None or total < self._start[1]:
            self._start, self._steps, self._usual = (time, total), 0, 0.0
        limit_s = max(self._config.traffic_s, self._config.traffic_steps * (step_s or 0.0))
        while len(self._readings) > 2 and time - self._readings[1][0] >= limit_s:
            self._readings.popleft()
        begun, first = self._readings[0]
        if self._is_told or step_s is None or self._usual < _LEAST_BYTES_PER_S or time - begun < limit_s:
            return None
        rate = (total - first) / (time - begun)
        if rate > _NOTHING * self._usual:
            return None
        self._is_told = True
        return MetricEvent(
            kind="no_traffic", step=step, time=time, value=rate, baseline=self._usual,
            evidence=f"no step after {step}, and {rate:.3g} bytes a second at the node's ports for {time - begun:.0f} s"
            f" (usual: {self._usual:.3g})",
            confidence=0.6,
        )  # fmt: skip


class Tensor:
    """The tensor cores of one GPU."""

    def __init__(self, device: str, config: MetricConfig) -> None:
        self._device = device
        self._config = config
        self._busy_s = self._idle_s = 0.0
        self._last: float | None = None
        self._is_told = False

    def take(
        self, time: float, activity: float, utilisation: float, step: int, is_declared: bool
    ) -> MetricEvent | None:
        """Both as parts of the time since the last reading."""
        passed_s = 0.0 if self._last is None else min(time - self._last, 10.0)
        self._last = time
        limit = self._config.tensor_below
        if is_declared or utilisation < 0.9:
            self._idle_s = 0.0
            return None
        if activity >= limit:
            self._idle_s, self._is_told = 0.0, False
            # a job that never made use of them shows nothing by not doing so
            self._busy_s += passed_s if activity >= 2 * limit else 0.0
            return None
        self._idle_s += passed_s
        if self._is_told or self._busy_s < self._config.tensor_s or self._idle_s < self._config.tensor_s:
            return None
        self._is_told = True
        return MetricEvent(
            kind="tensor_idle", step=step, time=time, value=activity, baseline=limit, device=self._device,
            evidence=f"tensor cores of {self._device} active {100 * activity:.0f} % (limit {100 * limit:.0f} %) for "
            f"{self._idle_s:.0f} s while the GPU is busy {100 * utilisation:.0f} %; they were in use before",
            confidence=0.4,
        )  # fmt: skip


class Heat:
    """How hot the GPUs of the node are; news only while training is slow."""

    def __init__(self, config: MetricConfig) -> None:
        self._config = config
        self._row: dict[str, int] = {}
        self._hot: dict[str, tuple[float, int, int]] = {}

    def take(self, time: float, device: str, temperature_c: int, slowdown_c: int | None) -> None:
        limit_c = slowdown_c if slowdown_c is not None else self._config.hot_c
        row = self._row[device] = self._row.get(device, 0) + 1 if temperature_c >= limit_c else 0
        if row >= _READINGS:
            self._hot[device] = (time, temperature_c, limit_c)
        elif not row:
            self._hot.pop(device, None)

    def hottest(self, now: float) -> tuple[str, int, int] | None:
        """The GPU that is farthest above its limit, its temperature and the limit."""
        recent = [
            (temperature_c - limit_c, device, temperature_c, limit_c)
            for device, (time, temperature_c, limit_c) in self._hot.items()
            if now - time <= _HOT_FOR_S
        ]
        return max(recent)[1:] if recent else None
