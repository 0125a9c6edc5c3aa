"""What does a version folder take from the original place?

All that is no code there: what the rules exclude (today's of the original folder, or the version's own), what cannot be
captured, and files without code that are newer than the capture, such as results. Not code that the version does not
have: a module that came with a later version could take the place of another one in an earlier version.

A folder that the archive does not have is one link, so that whatever the job writes there lands in the original. One
that the archive has is a folder of its own with links in it: what a job writes there stays in the version folder.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from evertrain.versions import names
from evertrain.versions.ignore import Rules, why_no_code
from evertrain.versions.manifest import Manifest

CODE = (".py", ".pyi", ".pyx", ".pxd", ".pyd", ".so", ".pth")
"""What Python imports, or is made from."""
LOOKED_AT = 2000
"""A folder with more names than this and no code among them is data."""
_OURS = (".evertrain", "__pycache__")


def refresh(folder: Path, manifest: Manifest, root: Path, code_dir: Path, exclude: Iterable[str] = ()) -> None:
    """Make the links that are missing, and take away those to what is no more. Without a root: nothing to link to."""
    if not os.path.isdir(root):
        return
    _Refresh(folder, manifest, root, os.path.realpath(code_dir)).all(tuple(exclude))


class _Refresh:
    def __init__(self, folder: Path, manifest: Manifest, root: Path, code_dir: str) -> None:
        self._folder = folder
        self._root = root
        self._real_root = os.path.realpath(root)
        self._code_dir = code_dir
        self._folders = set(manifest.folders)
        self._leaves = {file.path for file in manifest.files} | {link.path for link in manifest.links}

    def all(self, exclude: tuple[str, ...]) -> None:
        waiting = [("", Rules.of(self._root, exclude), Rules.of(self._folder, exclude))]
        while waiting:
            path, today, then = waiting.pop()
            self._drop_dangling(path)
            for name, is_folder in _listed(self._root / path):
                child = f"{path}/{name}" if path else name
                if child in self._leaves or name in _OURS or name.endswith(".pyc"):
                    continue
                original = self._root / child
                if child not in self._folders:
                    if not is_folder or not self._holds_code_dir(original):
                        excluded = today.excludes(name, is_folder) or then.excludes(name, is_folder)
                        if excluded or not self._is_code(child, is_folder, today):
                            self._link(child)
                        continue
                    if os.path.realpath(original) == self._code_dir:
                        continue
                    # a link would lead back to where it lies: everything beside that way is linked one by one
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(self._folder / child)
                if os.path.isdir(original):
                    waiting.append((child, today.inside(child, original), then.inside(child, self._folder / child)))

    def _link(self, path: str) -> None:
        with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
            os.symlink(self._root / path, self._folder / path)

    def _holds_code_dir(self, original: Path) -> bool:
        return f"{self._code_dir}/".startswith(f"{os.path.realpath(original)}/")

    def _is_code(self, path: str, is_folder: bool, rules: Rules) -> bool:
        """Whether a version could have it: code, or a folder with some in it."""
        if names.problem(path):
            return False
        original = str(self._root / path)
        if not is_folder:
            return original.endswith(CODE) and f"{os.path.realpath(original)}/".startswith(f"{self._real_root}/")
        looked_at = 0
        waiting = [(path, rules)]
        while waiting:
            folder, outer = waiting.pop()
            place = self._root / folder
            if why_no_code(place):
                continue
            own = outer.inside(folder, place)
            for name, is_inner in _listed(place):
                looked_at += 1
                if looked_at > LOOKED_AT:
                    return False
                if own.excludes(name, is_inner):
                    continue
                if is_inner:
                    waiting.append((f"{folder}/{name}", own))
                elif name.endswith(CODE):
                    return True
        return False

    def _drop_dangling(self, path: str) -> None:
        for name, _ in _listed(self._folder / path):
            child = f"{path}/{name}" if path else name
            with contextlib.suppress(OSError):
                target = os.readlink(self._folder / child)
                if child not in self._leaves and target == str(self._root / child) and not os.path.lexists(target):
                    os.unlink(self._folder / child)


def _listed(folder: Path) -> list[tuple[str, bool]]:
    """Names, and whether each is a folder itself; nothing where that cannot be read."""
    try:
        with os.scandir(folder) as listing:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in listing]
    except OSError:
        return []
