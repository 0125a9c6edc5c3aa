"""What do agents and controller do with the shared store? They read what the script wants of it, list, commit, verify.

The layout and all work on files are in `evertrain.worker.store_files`, which ranks outside `evertrain run` use as well.
"""

from __future__ import annotations

import os

import msgspec

from evertrain.model.copies import StoreSettings
from evertrain.worker import slots as layout
from evertrain.worker import store_files
from evertrain.worker.store_files import Folder, Manifest, StoreError

__all__ = ["Manifest", "StoreError", "commit", "list", "root", "settings_in", "verify"]


class _Directory(msgspec.Struct):
    store: StoreSettings | None = None


def settings_in(path: str | os.PathLike[str]) -> StoreSettings | None:
    """What a checkpoint of a rank says of the store; None: nothing, or it was overwritten while it was read."""
    name = os.fspath(path)
    header = layout.read(name)
    if header is None or header.state != layout.COMPLETE:
        return None
    try:
        with open(name, "rb") as file:
            file.seek(header.directory_at)
            return msgspec.json.decode(file.read(header.directory_bytes), type=_Directory).store
    except (OSError, msgspec.DecodeError):
        return None


def root(url: str, job: str) -> str:
    """The URL of the job's part of a store."""
    return store_files.root_of(url, job)


def list(url: str, job: str, since: float = 0.0) -> tuple[tuple[str, Manifest], ...]:
    """Folder and manifest of each step that exists, oldest first; raises StoreError."""
    place = Folder(root(url, job))
    return tuple(
        (store_files.step_folder(place, one.attempt, one.step).url, one) for one in store_files.committed(place, since)
    )


def commit(url: str, manifest: Manifest, *, keep: int, one_a_day: bool) -> tuple[Manifest, tuple[str, ...]]:
    """Make a step exist that all nodes have written, and remove what is not needed any more; raises StoreError."""
    place = Folder(root(url, manifest.job))
    committed, problems = store_files.commit(place, manifest, keep=keep, one_a_day=one_a_day, alone=True)
    return committed, tuple(problems)


def verify(folder: str) -> tuple[str, ...]:
    """Read a whole step; what is wrong with it. Raises StoreError."""
    return tuple(store_files.verify(Folder(folder)))
