"""Limits of processor time and freezers for tests, by control groups of version 1 or 2, whichever is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


def why_not() -> str:
    """Why no quota can be set; empty where it can."""
    if os.getuid() != 0:
        return "control groups need root"
    return "" if _parent("cpu") is not None else "no control group of processor time here"


def why_not_frozen() -> str:
    if os.getuid() != 0:
        return "control groups need root"
    return "" if _parent("freezer") is not None else "no freezer here"


@contextmanager
def quota(pid: int, *, fraction: float) -> Iterator[None]:
    """The process gets no more than this part of a core."""
    with _group("cpu", pid) as folder:
        limit = max(1000, int(fraction * _PERIOD_US))
        if _is_first(folder):
            (folder / "cpu.cfs_quota_us").write_text(str(limit))
        else:
            (folder / "cpu.max").write_text(f"{limit} {_PERIOD_US}")
        yield


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    with _group("freezer", pid) as folder:
        name, on, off = ("freezer.state", "FROZEN", "THAWED") if _is_first(folder) else ("cgroup.freeze", "1", "0")
        (folder / name).write_text(on)
        try:
            yield
        finally:
            (folder / name).write_text(off)


def _parent(controller: str) -> Path | None:
    if (_ROOT / controller / "cgroup.procs").exists():
        return _ROOT / controller
    controllers = _ROOT / "cgroup.controllers"
    if controllers.exists() and (controller == "freezer" or controller in controllers.read_text().split()):
        return _ROOT
    return None


def _is_first(folder: Path) -> bool:
    return folder.parent != _ROOT


@contextmanager
def _group(controller: str, pid: int) -> Iterator[Path]:
    parent = _parent(controller)
    assert parent is not None
    if parent == _ROOT and controller != "freezer":
        (parent / "cgroup.subtree_control").write_text(f"+{controller}")
    folder = parent / f"evertrain-test-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(pid))
        try:
            yield folder
        finally:
            (parent / "cgroup.procs").write_text(str(pid))
    finally:
        folder.rmdir()
