"""A script that reports to a tracker only."""

from __future__ import annotations

import json
import time
from pathlib import Path

from evertrain.detect.trackers import TrackerRules
from evertrain.model.config import MetricConfig
from evertrain.model.sensing import Seen
from evertrain.observe.sensors.trackers import TrackersSensor


def write(file: Path, losses: list[float], first: int = 1) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        for step, loss in enumerate(losses, first):
            lines.write(json.dumps({"_step": step, "_timestamp": time.time(), "loss": loss}) + "\n")


def sensor(folder: Path) -> TrackersSensor:
    config = MetricConfig(tracker_folders=(str(folder),))
    return TrackersSensor(config, TrackerRules(config))


def test_without_folders_nothing_is_read() -> None:
    config = MetricConfig()
    seen = TrackersSensor(config, TrackerRules(config)).look(0.0)
    assert "metrics.tracker_folders" in seen.absent and seen.signs == ()


def test_a_loss_that_is_none_is_a_sign_of_its_attempt(tmp_path: Path) -> None:
    watched = sensor(tmp_path)
    assert watched.look(0.0).last == "no ranks run"
    watched.attempt = 3
    assert watched.look(0.0).signs == ()
    history = tmp_path / "wandb" / "run-1" / "wandb-history.jsonl"
    write(history, [1.0, 0.9])
    assert sensor_after(watched).signs == ()
    write(history, [float("nan")], first=3)
    (sign,) = sensor_after(watched).signs
    assert (sign.kind, sign.attempt) == ("loss_not_finite", 3)
    watched.attempt = 4
    assert sensor_after(watched).signs == (), "a new attempt begins with none"


def sensor_after(watched: TrackersSensor) -> Seen:
    # files are looked for every ten seconds of the wall clock; a new attempt or a known file needs no wait
    watched._logs._next_look = 0.0
    return watched.look(1.0)
