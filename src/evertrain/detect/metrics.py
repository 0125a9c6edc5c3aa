"""Does training go as it should, by what it reports? All rules over the numbers of one rank and of its node.

    loss_not_finite, grad_norm_not_finite    at once, as soon as it can be nothing else
    loss_jump, grad_norm_jump                far above what was usual, for some steps
    slow, hot_and_slow                       fewer steps and tokens a second than this attempt has shown; a GPU is hot
    no_traffic, tensor_idle                  the machine does nothing of what training does

Every attempt begins with nothing known. Pure: numbers and times come in, events come out, in the order of time.
"""

from __future__ import annotations

from math import isfinite

from evertrain.detect.idle import Heat, Tensor, Traffic
from evertrain.detect.jumps import Series
from evertrain.detect.pace import Pace
from evertrain.model.config import MetricConfig
from evertrain.model.metrics import MetricEvent, Step


class MetricRules:
    """What one rank reports in one attempt, and what its node shows meanwhile; a new attempt gets a new one."""

    def __init__(self, config: MetricConfig, *, only_not_finite: bool = False) -> None:
        """`only_not_finite`: all ranks see the same jumps, and are as slow as the slowest; one of a node is enough."""
        self._config = config
        self._only_not_finite = only_not_finite
        self._loss = Series("loss", config, only_not_finite=only_not_finite)
        self._grad_norm = Series("grad_norm", config, only_not_finite=only_not_finite)
        self._pace = Pace(config)
        self._traffic = Traffic(config)
        self._tensors: dict[str, Tensor] = {}
        self._heat = Heat(config)
        self._is_hot_told = False
        self._last: Step | None = None

    def step(self, step: Step) -> list[MetricEvent]:
        """A step was finished. One that is told again, with the same count, may add what it had not said."""
        last, self._last = self._last, step
        if last is not None and step.stage != last.stage:
            self._loss.new_stage()
            self._grad_norm.new_stage()
        again = last is not None and step.count == last.count
        found: list[MetricEvent | None] = []
        # a script may report several times a step, for each micro-batch: "in a row" means steps
        if step.loss is not None and not (again and last and last.loss is not None and isfinite(step.loss)):
            found.append(self._loss.take(step.step, step.time, step.loss))
        if step.grad_norm is not None and not (again and last and last.grad_norm is not None):
            found.append(self._grad_norm.take(step.step, step.time, step.grad_norm))
        if not again and not self._only_not_finite:
            self._traffic.step()
            found.append(self._pace.take(step))
            found.append(self._hot(step.time))
        return [event for event in found if event is not None]

    def traffic(self, time: float, total: float, *, is_declared: bool = False) -> list[MetricEvent]:
        """Bytes at all ports of the node so far. Steps should be told first."""
        step = -1 if self._last is None else self._last.step
        event = self._traffic.take(time, total, step, self._pace.step_s, is_declared)
        return [event] if event is not None else []

    def tensor(
        self, time: float, device: str, activity: float, utilisation: float, *, is_declared: bool = False
    ) -> list[MetricEvent]:
        """How much of the time the tensor cores of a GPU were active, and the GPU busy."""
        step = -1 if self._last is None else self._last.step
        tensor = self._tensors.get(device)
        if tensor is None:
            tensor = self._tensors[device] = Tensor(device, self._config)
        event = tensor.take(time, activity, utilisation, step, is_declared)
        return [event] if event is not None else []

    def heat(self, time: float, device: str, temperature_c: int, slowdown_c: int | None = None) -> list[MetricEvent]:
        """How hot a GPU is, and from where on it slows down, if it says so."""
        self._heat.take(time, device, temperature_c, slowdown_c)
        event = self._hot(time)
        return [event] if event is not None else []

    def _hot(self, now: float) -> MetricEvent | None:
        first = self._pace.slow_since
        if first is None:
            self._is_hot_told = False
            return None
        hottest = None if self._is_hot_told else self._heat.hottest(now)
        if hottest is None:
            return None
        self._is_hot_told = True
        device, temperature_c, limit_c = hottest
        return MetricEvent(
            kind="hot_and_slow", step=first, time=now, value=float(temperature_c), baseline=float(limit_c),
            evidence=f"{device} at {temperature_c} C (limit {limit_c} C) while training is slow since step {first}",
            confidence=0.7, device=device,
        )  # fmt: skip
