"""What dead runs left behind goes; what anybody still uses stays."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from evertrain.cli import clean, places, processes


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(places, "SHARED_MEMORY", tmp_path)
    places.user_folder().mkdir()
    return places.user_folder()


def owned_by(pid: int, start_ticks: int, boot: str | None = None, **others: dict[str, int]) -> str:
    owner = {"pid": pid, "start_ticks": start_ticks, "boot_id": boot or processes.boot_id(), "processes": others}
    return json.dumps(owner)


def run_folder(runs: Path, name: str, owner: str) -> Path:
    (runs / name / "node-0" / "pages").mkdir(parents=True)
    (runs / name / "node-0" / "pages" / "a1-r0").write_bytes(b"x" * 1000)
    (runs / name / "owner.json").write_text(owner)
    return runs / name


def test_only_what_nobody_owns_is_removed(runs: Path) -> None:
    me = processes.identify(os.getpid())
    assert me is not None
    child = subprocess.Popen(["true"])
    child.wait()
    kept = run_folder(runs, "alive", owned_by(*me))
    adopted = run_folder(runs, "adopted", owned_by(child.pid, 1, keeper=me._asdict()))
    dead = run_folder(runs, "dead", owned_by(child.pid, 1))
    reused = run_folder(runs, "reused", owned_by(me.pid, me.start_ticks - 1))
    rebooted = run_folder(runs, "rebooted", owned_by(*me, boot="another"))
    removed = {folder for folder, _ in clean.remove_dead_runs(print)}
    assert removed == {dead, reused, rebooted}
    assert kept.exists() and adopted.exists() and not dead.exists()


def test_a_folder_without_owner_may_be_just_being_made(runs: Path) -> None:
    young, old = runs / "young", runs / "old"
    young.mkdir()
    old.mkdir()
    os.utime(old, (1, 1))
    assert [folder for folder, _ in clean.remove_dead_runs(print)] == [old]


def test_it_says_what_it_removed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = run_folder(runs, "dead", owned_by(1, 12345678))
    assert clean.main([]) == 0
    assert capsys.readouterr().out.startswith(f"removed {dead} (1.")
    assert clean.main([]) == 0
    assert capsys.readouterr().out == f"nothing to clean in {runs}\n"
