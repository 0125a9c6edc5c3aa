"""Folders of code as users have them, and archives of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evertrain.model.code import Code
from evertrain.model.config import CodeConfig
from evertrain.versions import archive, tree

SCRIPT = {"train.py": "print(1)\n", "model/__init__.py": "", "model/net.py": "class Net: ...\n"}


def plant(root: Path, files: Mapping[str, str | bytes]) -> Path:
    """Files with parents; names that end with `/` are empty folders."""
    root.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def packed(root: Path, target: Path, config: CodeConfig | None = None) -> Code:
    return archive.pack(tree.scan(root, config or CodeConfig()), target)


def kept(root: Path, config: CodeConfig | None = None) -> set[str]:
    """The files and links of the tree, links with what they lead to."""
    found = tree.scan(root, config or CodeConfig())
    return {file.path for file in found.files} | {f"{link.path} -> {link.target}" for link in found.links}
