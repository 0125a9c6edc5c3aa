"""A torch that the tests do not run is mentioned, and read without importing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.cli import torch_version


def interpreter(folder: Path, version: str) -> str:
    package = folder / "lib" / "python3.11" / "site-packages" / "torch"
    package.mkdir(parents=True)
    (package / "version.py").write_text(f"__all__ = ['__version__']\n__version__ = '{version}'\ndebug = False\n")
    return str(folder / "bin" / "python")


@pytest.mark.parametrize("version", ["2.13.0", "2.13.1+cu130"])
def test_the_tested_version_needs_no_word(tmp_path: Path, version: str) -> None:
    assert torch_version.of(interpreter(tmp_path, version)) == version
    assert torch_version.note(str(tmp_path / "bin" / "python")) is None


@pytest.mark.parametrize("version", ["2.14.1+cu130", "2.130.0"])
def test_another_version_is_named(tmp_path: Path, version: str) -> None:
    note = torch_version.note(interpreter(tmp_path, version))
    assert note is not None and f"torch {version} is expected to work" in note


def test_no_torch_is_left_to_whoever_imports_it(tmp_path: Path) -> None:
    assert torch_version.note(str(tmp_path / "bin" / "python")) is None
