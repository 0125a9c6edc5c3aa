"""Paths, clashes and the files that make up a script, without running any."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from evertrain.worker import script
from evertrain.worker.freshness import Imported


def command(target: str, kind: str = "script", *args: str) -> script.Command:
    return {"kind": kind, "target": target, "args": args}


def test_the_scripts_real_folder_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "train.py").touch()
    (tmp_path / "link.py").symlink_to("real/train.py")
    assert script.first_path(command("real/train.py")) == str(tmp_path / "real")
    assert script.first_path(command("./link.py")) == str(tmp_path / "real")
    assert script.first_path(command("real")) == str(tmp_path / "real"), "a folder is run with itself first"
    assert script.first_path(command("package.tool", "module")) == str(tmp_path)
    assert script.first_path(command("sh", "program")) is None


def test_only_what_the_script_could_not_import_is_a_clash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("profile.py", "own.py", "os.py", "evertrain.py", "notes.txt"):
        (tmp_path / name).touch()
    for package in ("json", "namespace", "deep"):
        (tmp_path / package).mkdir()
    (tmp_path / "json" / "__init__.py").touch()
    for name, file in {"own": tmp_path / "own.py", "namespace": "/elsewhere/namespace.py", "profile": "/x.py"}.items():
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
    run = command(str(tmp_path / "train.py"))
    assert script.clashes(run, startup={"os"}) == ["json", "profile"]
    assert script.clashes(run, startup={"os", "profile"}) == ["json"]


def test_a_library_below_the_scripts_folder_is_not_the_scripts_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("tool")
    module.__file__ = str(tmp_path / ".venv" / "lib" / "tool.py")
    monkeypatch.setitem(sys.modules, "tool", module)
    (tmp_path / "tool.py").touch()
    assert script.clashes(command(str(tmp_path / "train.py")), startup=()) == ["tool"]


def test_clashes_are_forgotten_with_their_submodules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "clash.py").touch()
    for name in ("clash", "clash.part", "clasher"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    script.forget_clashes(command(str(tmp_path / "train.py")), startup=frozenset())
    assert "clash" not in sys.modules and "clash.part" not in sys.modules
    assert "clasher" in sys.modules


@pytest.mark.parametrize(
    ("word", "filled"),
    [("${local_rank}", "3"), ("a$local_rank.b", "a3.b"), ("$$HOME", "$HOME"), ("$other ${x", "$other ${x"), ("", "")],
)
def test_arguments_are_filled_in_as_torchrun_does(word: str, filled: str) -> None:
    assert script.arguments(command("train.py", "script", word), "3") == [filled]


def test_changed_files_are_noticed_by_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("a = 1")
    module = types.ModuleType("mine")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "mine", module)
    imported = Imported(command(str(tmp_path / "train.py")))
    assert imported.changed() is None
    os.utime(file, ns=(1, 1))
    assert imported.changed() is None, "touched, not changed"
    file.write_text("a = 2")
    assert imported.changed() == str(file)
    file.unlink()
    assert imported.changed() == str(file)
