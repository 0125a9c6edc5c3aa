"""Which files of a folder are a job's code?

What is left out of a tree (`evertrain.versions.ignore`), a version folder takes from the original place.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from evertrain.model.config import CodeConfig
from evertrain.versions import names
from evertrain.versions.errors import TreeError
from evertrain.versions.ignore import Rules, why_no_code

SCAN_LIMIT_S = 20.0
ENTRIES_PER_FILE = 10
"""So many names may be looked at for each file that a tree may have."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    """From the root, with `/` between names, as everywhere here."""
    bytes: int
    executable: bool = False


class Link(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    target: str
    """Relative to the link's folder; what it leads to is in the tree and is no link."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    reason: str


class Tree(msgspec.Struct, frozen=True, kw_only=True):
    """What is code in a folder; each part sorted by path."""

    root: Path
    files: tuple[File, ...]
    links: tuple[Link, ...]
    folders: tuple[str, ...]
    """Those that a file or link lies in; another one is no part of the code."""
    left_out: tuple[LeftOut, ...]
    most_bytes: int
    """Of all files, when they are read."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def scan(root: Path, config: CodeConfig, skip: Iterable[Path] = (), limit_s: float = SCAN_LIMIT_S) -> Tree:
    """All code below `root`, without `skip`; refuses what is too large to be code before it has seen all of it."""
    root = Path(os.path.abspath(root))
    if not os.path.isdir(root):
        raise TreeError(f"{names.shown(root)} is not a folder; name the folder of the code with --code DIR")
    walk = _Scan(root, config, {os.path.realpath(path) for path in skip}, limit_s)
    walk.folder("", Rules.of(root, config.exclude))
    folders = {parent for path in (*walk.files, *walk.links) for parent in _folders_of(path)}
    if len(folders) > config.most_files:
        raise walk.too_large(f"more than {config.most_files:,} folders")
    return Tree(
        root=root,
        files=tuple(walk.files[path] for path in sorted(walk.files)),
        links=tuple(walk.links[path] for path in sorted(walk.links)),
        folders=tuple(sorted(folders)),
        left_out=tuple(LeftOut(path=path, reason=walk.left_out[path]) for path in sorted(walk.left_out)),
        most_bytes=config.most_bytes,
    )


class _Scan:
    def __init__(self, root: Path, config: CodeConfig, skip: set[str], limit_s: float) -> None:
        self.files: dict[str, File] = {}
        self.links: dict[str, Link] = {}
        self.left_out: dict[str, str] = {}
        self._root = root
        self._real_root = os.path.realpath(root)
        self._config = config
        self._skip = skip
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._entries = 0
        self._bytes = 0

    def folder(self, top: str, rules: Rules) -> None:
        waiting = [(top, rules)]
        while waiting:
            path, own = waiting.pop()
            try:
                with os.scandir(self._root / path) as listing:
                    for entry in listing:
                        self._count()
                        if (child := self._entry(entry, path, own)) is not None:
                            waiting.append((child, own.inside(child, entry.path)))
            except OSError as error:
                if not path:
                    raise TreeError(f"{names.shown(self._root)} cannot be read: {error.strerror}") from None
                self.left_out[path] = f"cannot be read: {error.strerror}"

    def _count(self) -> None:
        self._entries += 1
        most = ENTRIES_PER_FILE * self._config.most_files
        if self._entries > most:
            raise self.too_large(f"more than {most:,} files, whether code or not")
        if self._entries % 64 == 0 and time.monotonic() > self._deadline:
            raise self.too_large(f"more than can be looked at in {self._limit_s:g} s")

    def _entry(self, entry: os.DirEntry[str], folder: str, rules: Rules) -> str | None:
        """Returns its path if it is a folder to go on with."""
        path = f"{folder}/{entry.name}" if folder else entry.name
        try:
            is_folder = entry.is_dir(follow_symlinks=False)
            reason = rules.excludes(entry.name, is_folder) or names.problem(path)
            if not reason and self._skip and os.path.join(self._real_root, path) in self._skip:
                reason = "not part of the code"
            if not reason and is_folder:
                reason = why_no_code(entry.path)
            if not reason and is_folder:
                return path
            reason = reason or self._leaf(entry, path)
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        if reason:
            self.left_out[path] = reason
        return None

    def _leaf(self, entry: os.DirEntry[str], path: str) -> str:
        if entry.is_symlink():
            return self._link(entry, path)
        status = entry.stat(follow_symlinks=False)
        if not stat.S_ISREG(status.st_mode):
            return "not a regular file"
        if not os.access(entry.path, os.R_OK):
            return "cannot be read: no permission"
        self.files[path] = File(path=path, bytes=status.st_size, executable=bool(status.st_mode & stat.S_IXUSR))
        self._bytes += status.st_size
        if self._bytes > self._config.most_bytes:
            largest = max(self.files.values(), key=lambda file: file.bytes)
            raise self.too_large(
                f"more than {self._config.most_bytes / (1 << 20):,.0f} MiB of what may be code, "
                f"the largest {names.shown(largest.path)} with {largest.bytes / (1 << 20):,.1f} MiB"
            )
        self._count_leaf()
        return ""

    def _link(self, entry: os.DirEntry[str], path: str) -> str:
        target = os.path.realpath(entry.path)
        if target != self._real_root and not target.startswith(self._real_root.rstrip("/") + "/"):
            return "a link that leads out of the tree"
        if os.path.islink(target):
            return "a link that leads to itself"
        relative = os.path.relpath(target, os.path.dirname(os.path.join(self._real_root, path)))
        inside = os.path.relpath(target, self._real_root)
        if inside != "." and (reason := names.problem(inside)):
            return f"a link to a file that is left out: {reason}"
        self.links[path] = Link(path=path, target=relative)
        self._count_leaf()
        return ""

    def _count_leaf(self) -> None:
        if len(self.files) + len(self.links) > self._config.most_files:
            raise self.too_large(f"more than {self._config.most_files:,} files that may be code")

    def too_large(self, what: str) -> TreeError:
        return TreeError(
            f"{names.shown(self._root)} holds {what}: name the folder of the code with --code DIR, or what is "
            "none in .gitignore or code.exclude of the config"
        )


def _folders_of(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: at + 1]) for at in range(len(parts))]
