"""Code as tests capture it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evertrain.model.code import Code
from evertrain.model.config import CodeConfig
from evertrain.versions import archive, tree

FILES = {"train.py": "import model\n", "model/__init__.py": "SIZE = 4\n"}


def written(folder: Path, files: Mapping[str, str] = FILES) -> Path:
    """A working tree."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def packed(root: Path, target: Path) -> Code:
    """The archive of a working tree."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return archive.pack(tree.scan(root, CodeConfig()), target)


def another(folder: Path) -> tuple[Code, bytes]:
    """Another version, and its archive as a command brings it."""
    root = written(folder / "another", {"train.py": "import model\nprint()\n", "new.py": ""})
    code = packed(root, folder / "another.tar.gz")
    return code, (folder / "another.tar.gz").read_bytes()
