"""Losses from the files of experiment trackers: the right file, the right names, this attempt only."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evertrain.detect.metrics import MetricRules
from evertrain.model.config import MetricConfig
from evertrain.observe import experiment_logs
from evertrain.observe.experiment_logs import ExperimentLogs
from support.trackers import event, frame, history, parts

TIME = 1000.0


def events(folder: Path, *written: bytes, changed: float = TIME + 50) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "events.out.tfevents.1.host.7.0"
    with open(path, "ab") as file:
        file.write(b"".join(map(frame, written)))
    os.utime(path, (changed, changed))
    return path


def logs(*folders: Path) -> ExperimentLogs:
    made = ExperimentLogs(folders, MetricConfig())
    made.begin(TIME)
    return made


def losses(reader: ExperimentLogs, now: float = TIME) -> list[tuple[int, float | None, float | None]]:
    return [(step.step, step.loss, step.grad_norm) for step in reader.read(now)]


def test_a_loss_and_a_gradient_norm_of_each_step(tmp_path: Path) -> None:
    path = events(tmp_path / "runs" / "first", *[event(at, {"lr": 1.0, "train/loss": at}) for at in (1, 2)])
    reader = logs(tmp_path)
    assert losses(reader) == [(1, 1.0, None), (2, 2.0, None)] and reader.speaker == str(path)
    events(path.parent, event(3, {"Train/Loss": 3.0, "train/grad_norm": 0.5}), event(3, {"accuracy": 1.0}))
    assert losses(reader) == [(3, 3.0, 0.5)] and losses(reader) == []


def test_wandb(tmp_path: Path) -> None:
    folder = tmp_path / "wandb" / "offline-run-1"
    folder.mkdir(parents=True)
    (folder / "run-1.wandb").write_bytes(parts([history(at, {"loss": at, "grad_norm": 2.0}) for at in range(3)]))
    assert losses(logs(tmp_path)) == [(0, 0.0, 2.0), (1, 1.0, 2.0), (2, 2.0, 2.0)]


def test_an_evaluation_does_not_speak_for_training(tmp_path: Path) -> None:
    for name in ("validation", "eval", "run_test", "a/val"):
        events(tmp_path / name, event(1, {"loss": 100.0}), changed=TIME + 99)
    reader = logs(tmp_path)
    assert losses(reader) == [] and reader.speaker == ""
    events(tmp_path / "train", event(1, {"loss": 1.0}))
    assert losses(reader, TIME + 11) == [(1, 1.0, None)]


def test_two_files_are_never_mixed(tmp_path: Path) -> None:
    for name in ("one", "two"):
        events(tmp_path / name, event(1, {"loss": 1.0}))
    reader = logs(tmp_path)
    assert len(losses(reader)) == 1
    for name in ("one", "two"):
        events(tmp_path / name, event(2, {"loss": 2.0}))
    assert len(losses(reader)) == 1


def test_the_best_name_speaks(tmp_path: Path) -> None:
    events(
        tmp_path,
        *[event(1, {"train_loss": 1.0}), event(2, {"loss": 2.0}), event(3, {"train_loss": 3.0}), event(4, {"loss": 4})],
    )
    assert losses(logs(tmp_path)) == [(1, 1.0, None), (2, 2.0, None), (4, 4.0, None)]


def test_names_can_be_given(tmp_path: Path) -> None:
    events(tmp_path, event(1, {"my/loss": 1.0, "loss": 9.0}))
    reader = ExperimentLogs([tmp_path], MetricConfig(loss_names=("my/loss",), grad_norm_names=()))
    assert losses(reader) == [(1, 1.0, None)]


def test_what_is_older_than_the_attempt_is_of_another(tmp_path: Path) -> None:
    events(tmp_path / "old", event(1, {"loss": 1.0}), changed=TIME - 50)
    events(tmp_path / "both", event(1, {"loss": 1.0}, time=TIME - 5), event(2, {"loss": 2.0}, time=TIME + 5))
    reader = logs(tmp_path)
    assert losses(reader) == [(2, 2.0, None)]
    reader.begin(TIME + 6)
    assert losses(reader) == [] and reader.speaker == ""
    events(tmp_path / "both", event(2, {"loss": 7.0}, time=TIME + 8))
    assert losses(reader) == [(2, 7.0, None)]


def test_folders_are_looked_through_seldom_and_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = logs(tmp_path / "later")
    assert losses(reader) == []
    events(tmp_path / "later", event(1, {"loss": 1.0}))
    assert losses(reader, TIME + 5) == [] and losses(reader, TIME + 10.5) == [(1, 1.0, None)]
    events(tmp_path / "a" / "b" / "c" / "d" / "e" / "f", event(1, {"loss": 1.0}))
    assert losses(logs(tmp_path / "a")) == [], "too deep"
    monkeypatch.setattr(experiment_logs, "_MOST_ENTRIES", 10)
    for at in range(20):
        (tmp_path / "many" / f"{at:03}").mkdir(parents=True)
    events(tmp_path / "many" / "019", event(1, {"loss": 1.0}))
    assert losses(logs(tmp_path / "many")) == []


def test_a_clock_that_was_set_back_does_not_stop_the_looks(tmp_path: Path) -> None:
    reader = logs(tmp_path)
    assert losses(reader, TIME + 3600) == []
    events(tmp_path, event(1, {"loss": 1.0}))
    assert losses(reader, TIME) == [(1, 1.0, None)]


def test_damage_is_said(tmp_path: Path) -> None:
    path = events(tmp_path, event(1, {"loss": 1.0}))
    path.write_bytes(b"\xff" * 100)
    reader = logs(tmp_path)
    assert losses(reader) == [] and "damaged" in reader.trouble


def test_the_rules_read_them_as_they_read_reports(tmp_path: Path) -> None:
    values = [1.0] * 60 + [float("nan")]
    written = [event(at, {"loss": value, "grad_norm": 1.0}, time=TIME + at) for at, value in enumerate(values)]
    events(tmp_path, *written)
    rules = MetricRules(MetricConfig())
    found = [event for step in logs(tmp_path).read(TIME) for event in rules.step(step)]
    assert [(one.kind, one.step) for one in found] == [("loss_not_finite", 60)]


def test_times_that_are_no_seconds_do_not_bring_back_an_attempt_that_is_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "loss": NaN, "timestamp": {1000 * (TIME - 50)}}}\n')
    os.utime(path, (TIME + 50, TIME + 50))
    assert losses(logs(tmp_path)) == []
