"""A version folder as a node has it: the version's own files, and links back to all else."""

from __future__ import annotations

import os
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import Any

MADE_TIME = 946684800
"""All files of a version have the same time."""


def make(root: Path, folder: Path, held: dict[str, str], *, without: Collection[str] = (), version: int = 2) -> Any:
    """Make `folder` stand in for `root`, with the files `held` and without the root's files `without`.

    Comes back with what a keeper is told of it.
    """
    for name, text in held.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        os.utime(file, (MADE_TIME, MADE_TIME))
    _link_back(root, folder, {str(root / name) for name in without}, folder)
    digest = sha256(repr(sorted(held.items())).encode()).hexdigest()
    return {"version": version, "digest": digest, "root": str(root), "folder": str(folder)}


def _link_back(root: Path, folder: Path, without: Collection[str], top: Path) -> None:
    for entry in root.iterdir():
        inside = folder / entry.name
        if str(entry) in without or entry == top or top.is_relative_to(entry):
            continue
        if inside.is_dir() and entry.is_dir():
            _link_back(entry, inside, without, top)
        elif not inside.exists():
            inside.symlink_to(entry)
