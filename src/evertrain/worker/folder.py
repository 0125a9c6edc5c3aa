"""Where do checkpoints go outside `evertrain run`? Into a plain folder, one file a rank and step, the last three kept.

    <store>/step-000000000040/rank-0-of-4.pt

A step counts once all its ranks' files are there; each appears by renaming, so it is whole or absent.
"""

from __future__ import annotations

import os
import re
import shutil

import torch
from torch import Tensor

from evertrain.worker.snapshot import Snapshot

_KEPT = 3
_STEP = re.compile(r"step-(\d{12})")


class Folder:
    """The checkpoints of one job in one folder, as one of its ranks sees them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._rank = int(os.environ.get("RANK", "0"))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))

    def save(self, step: int, taken: Snapshot) -> None:
        """Write this rank's file of `step`, then remove what is older than the last three complete steps."""
        path = self._file(step, self._rank)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.partial", "wb") as file:
            torch.save((taken.entries, taken.tensors), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.partial", path)
        complete = self._complete()
        if step in complete:  # this rank was the last one to write it
            for old in complete[:-_KEPT]:
                shutil.rmtree(os.path.dirname(self._file(old, 0)), ignore_errors=True)

    def newest(self) -> tuple[int, dict[str, bytes], list[Tensor]] | None:
        """The newest step that all ranks have, and this rank's state in it."""
        complete = self._complete()
        if not complete:
            return None
        step = complete[-1]
        entries, tensors = torch.load(self._file(step, self._rank), map_location="cpu", weights_only=False)
        return step, entries, tensors

    def _complete(self) -> list[int]:
        if not os.path.isdir(self._path):
            return []
        steps = [int(found[1]) for name in os.listdir(self._path) if (found := _STEP.fullmatch(name))]
        ranks = range(self._world_size)
        return sorted(step for step in steps if all(os.path.exists(self._file(step, rank)) for rank in ranks))

    def _file(self, step: int, rank: int) -> str:
        return os.path.join(self._path, f"step-{step:012d}", f"rank-{rank}-of-{self._world_size}.pt")
