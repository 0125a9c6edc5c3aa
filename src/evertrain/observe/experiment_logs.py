"""What do the files of an experiment tracker say about training, where the script itself tells Evertrain nothing?

The folders that the tracker writes to are looked through every ten seconds for files that have changed since the
attempt began. The first that has a loss, or a gradient norm, and is not by its name about an evaluation speaks for
training until the next attempt: numbers of two files are never mixed. Times are of the wall clock, as written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from evertrain.model.config import MetricConfig
from evertrain.model.metrics import Step
from evertrain.observe.record_files import EventFile, JsonLines, Number, RecordFile, WandbFile

_LOOK_EVERY_S = 10.0
_DEEPEST = 4
_MOST_ENTRIES = 5000
_MOST_FILES = 16
_OF_EVALUATION = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|eval|evaluation|test|dev)(?:[^a-z]|$)", re.IGNORECASE)
_SLACK_S = 1.0
"""Of file systems that keep times in whole seconds."""
_AHEAD_S = 3600.0
"""The clock of another machine may be ahead; what is later is no time in seconds."""


class ExperimentLogs:
    """The files of one attempt after the other; costs what has been written since the last look."""

    def __init__(self, folders: Iterable[Path], config: MetricConfig) -> None:
        self._folders = tuple(folders)
        self._names = {
            **{name.lower(): ("loss", at) for at, name in reversed(list(enumerate(config.loss_names)))},
            **{name.lower(): ("grad_norm", at) for at, name in reversed(list(enumerate(config.grad_norm_names)))},
        }
        self._since = 0.0
        self._next_look = 0.0
        self._files: dict[Path, RecordFile] = {}
        self._chosen: RecordFile | None = None
        self._best: dict[str, int] = {}

    @property
    def speaker(self) -> str:
        """The file that is read; empty: none has said anything yet."""
        return str(self._chosen.path) if self._chosen is not None else ""

    @property
    def trouble(self) -> str:
        """Why nothing can be seen, in one line; empty: nothing is wrong."""
        if self._chosen is not None:
            return self._chosen.trouble
        return next((file.trouble for file in self._files.values() if file.trouble), "")

    def begin(self, since: float) -> None:
        """An attempt began at this time of the wall clock; what was written before is of another."""
        self._since = since
        self._next_look = 0.0
        self._files.clear()
        self._chosen = None
        self._best.clear()

    def read(self, now: float) -> list[Step]:
        """Steps that are new, in the order in which they were written. `now`: by the wall clock."""
        if self._chosen is not None:
            return self._steps(self._chosen.read(), now)
        if not 0 <= self._next_look - now <= _LOOK_EVERY_S:
            self._next_look = now + _LOOK_EVERY_S
            self._find()
        for file in self._files.values():
            steps = self._steps(file.read(), now)
            if steps:
                self._chosen = file
                self._files.clear()
                return steps
        return []

    def _steps(self, numbers: Sequence[Number], now: float) -> list[Step]:
        """One for each run of numbers of the same step; a name that is better than those before takes their place."""
        found: list[Step] = []
        said: dict[str, float] = {}
        step, time = -1, 0.0
        for number in numbers:
            field, rank = self._names.get(number.tag.lower(), ("", 0))
            # what has no time may be of an attempt that is over
            if not field or not self._since <= number.time <= now + _AHEAD_S:
                continue
            if rank > self._best.setdefault(field, rank):
                continue
            self._best[field] = rank
            if said and (number.step != step or field in said):
                found.append(_step(step, time, said))
                said = {}
            step, time = number.step, number.time
            said[field] = number.value
        if said:
            found.append(_step(step, time, said))
        return found

    def _find(self) -> None:
        candidates = sorted(
            (found for folder in self._folders for found in _changed(folder, self._since - _SLACK_S)), reverse=True
        )
        for _, path, kind in candidates[:_MOST_FILES]:
            self._files.setdefault(path, kind(path))
        for path in list(self._files)[:-_MOST_FILES]:
            del self._files[path]


def _step(step: int, time: float, said: dict[str, float]) -> Step:
    return Step(step=step, count=step, time=time, loss=said.get("loss"), grad_norm=said.get("grad_norm"))


def _changed(folder: Path, since: float) -> Iterator[tuple[float, Path, type[RecordFile]]]:
    """Files of trackers in a folder, when they were changed, and how to read them; the wider part of a large folder."""
    looked = 0
    waiting: list[tuple[Path, int]] = [(folder, 0)]
    while waiting:
        current, depth = waiting.pop(0)
        try:
            entries = sorted(os.scandir(current), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            looked += 1
            if looked > _MOST_ENTRIES:
                return
            path = Path(entry.path)
            if _OF_EVALUATION.search(str(path.relative_to(folder))):
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth < _DEEPEST:
                        waiting.append((path, depth + 1))
                    continue
                kind = _kind(entry.name)
                if kind is not None and (changed := entry.stat().st_mtime) >= since:
                    yield changed, path, kind
            except OSError:
                continue


def _kind(name: str) -> type[RecordFile] | None:
    if ".tfevents." in name:
        return EventFile
    if name.endswith(".wandb"):
        return WandbFile
    return JsonLines if name in ("wandb-history.jsonl", "metrics.jsonl") else None
