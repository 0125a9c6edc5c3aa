"""What does an experiment tracker write about training? For scripts that report to wandb or TensorBoard only.

Asked for by `metrics.tracker_folders`; without it nothing is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from evertrain.model.config import MetricConfig
from evertrain.model.metrics import Step
from evertrain.model.sensing import Seen, Sign
from evertrain.observe.experiment_logs import ExperimentLogs

Judge = Callable[[int, Sequence[Step], float], tuple[Sign, ...]]
"""Signs from the new steps of an attempt, as of now."""


class TrackersSensor:
    name = "trackers"
    period_s = 2.0
    limit_s = 10.0

    def __init__(self, config: MetricConfig, judge: Judge) -> None:
        """`judge`: the rules; a new attempt begins with none of what they knew."""
        self._logs = ExperimentLogs(map(Path, config.tracker_folders), config)
        self._is_wanted = bool(config.tracker_folders)
        self._judge = judge
        self._attempt: int | None = None
        self._steps = 0
        self.attempt: int | None = None
        """That runs now; set from outside."""

    def look(self, now: float) -> Seen:
        if not self._is_wanted:
            return Seen(absent="no folders are named (metrics.tracker_folders)")
        attempt = self.attempt
        if attempt is None:
            return Seen(last="no ranks run")
        if attempt != self._attempt:
            self._attempt, self._steps = attempt, 0
            self._logs.begin(time.time())
        steps = self._logs.read(time.time())
        self._steps += len(steps)
        signs = self._judge(attempt, steps, now)
        if self._logs.trouble:
            return Seen(signs=signs, blind=self._logs.trouble)
        return Seen(signs=signs, last=f"{self._steps} steps in {self._logs.speaker}" if self._steps else "nothing yet")
