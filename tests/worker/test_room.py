"""How much memory is left is the least that anybody says."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.worker import room


def cgroup(folder: Path, limit: str, used: int, cached: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


def left(root: Path, path: str) -> list[int]:
    return room._walk(str(root), path, "memory.max", "memory.current", "inactive_file")


def test_each_limit_up_to_the_root_counts(tmp_path: Path) -> None:
    cgroup(tmp_path / "a" / "b", "1000", 400, cached=100)
    cgroup(tmp_path / "a", "max", 500)
    cgroup(tmp_path, "5000", 600)
    assert left(tmp_path, "/a/b") == [700, 4400]


def test_no_limits(tmp_path: Path) -> None:
    assert left(tmp_path, "/nowhere") == []


def test_the_least_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert room.free_bytes(str(tmp_path)) > 0
    monkeypatch.setattr(room, "cgroup_left", lambda: 1234)
    assert room.free_bytes(str(tmp_path)) == 1234
    monkeypatch.setattr(room, "cgroup_left", lambda: -5)
    assert room.free_bytes(str(tmp_path)) == 0
