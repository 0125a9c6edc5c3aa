"""How do imports find the version's modules, whoever points to the root? By asking all others first.

Editable installs point there by a finder of their own or by an entry of `sys.path`, and so do scripts that add a folder
to `sys.path`. What the others have found under the root is found in the version folder instead; what the version does
not have is not found. Processes that `multiprocessing` spawns do the same; those that a script starts by itself
(`subprocess`) import what they would without us.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys

from evertrain.worker.libraries import is_library, may_be_linked
from evertrain.worker.version import Version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_SPAWN = "multiprocessing.spawn"
_IN_CHILD = """\
import sys
sys.path.append({parent!r})
try:
    from evertrain.worker import finder, version
finally:
    sys.path.remove({parent!r})
finder.install(version.Version({root!r}, {folder!r}))
"""


def install(version: Version) -> None:
    """Have every import of this process, and of those that it spawns, go to the version."""
    sys.meta_path.insert(0, _Finder(version))
    if _SPAWN in sys.modules:
        _tell_children(sys.modules[_SPAWN], version)


class _Finder:
    """The first of the finders."""

    def __init__(self, version: Version) -> None:
        self._version = version

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(name, path, target)) is not None:
                return self._moved(spec)
        return None

    def invalidate_caches(self) -> None:
        """There are none; the others are told by whoever tells this one."""

    def _moved(self, spec: ModuleSpec) -> ModuleSpec:
        """What was found, or what the version has in its place."""
        version, origin = self._version, spec.origin if spec.has_location else None
        is_plain = origin is not None and is_library(origin) and not may_be_linked(spec.name, origin)
        if is_plain and spec.name != _SPAWN:
            return spec  # thousands of them
        places = spec.submodule_search_locations
        if origin is not None and version.lacks(origin):
            raise ModuleNotFoundError(
                f"No module named {spec.name!r}: {origin} is none of this version", name=spec.name
            )
        if origin is not None and (inside := version.held(origin)):
            loader = _loader(spec.name, inside)
            if loader is not None:
                spec = importlib.machinery.ModuleSpec(spec.name, loader, origin=inside, is_package=places is not None)
                spec.has_location = True
                spec.submodule_search_locations = places
        if places is not None and any(version.held(place) for place in places):
            spec.submodule_search_locations = [version.held(place) or place for place in places]
        if type(spec.loader) is importlib.machinery.SourceFileLoader and _has_foreign_cache(version, spec.origin):
            spec.loader = _Uncached(spec.name, spec.loader.path)
        if spec.name == _SPAWN and spec.loader is not None:
            spec.loader = _Then(spec.loader, lambda module: _tell_children(module, version))  # type: ignore[assignment]
        return spec


def _loader(name: str, path: str) -> Any:
    for loader, suffixes in (
        (importlib.machinery.SourceFileLoader, importlib.machinery.SOURCE_SUFFIXES),
        (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
    ):
        if path.endswith(tuple(suffixes)):
            return loader(name, path)
    return None


def _has_foreign_cache(version: Version, source: str | None) -> bool:
    """Whether the byte code of a module in the folder would be kept where that of other versions is.

    All files of a version have the same time, so byte code of another one may pass for its own.
    """
    if source is None or not version.is_inside(source):
        return False
    folder = os.path.join(os.path.dirname(source), "__pycache__")
    return version.holds(source) and os.path.exists(folder) and not version.holds(folder)


class _Uncached(importlib.machinery.SourceFileLoader):
    """Neither reads byte code nor writes it: a source without a time has none."""

    def path_stats(self, path: Any) -> Any:
        raise OSError(f"the byte code of {path} is not its own")


class _Then:
    """A loader after which something is done to the module."""

    def __init__(self, real: Any, then: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._real.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._real
        self._real.exec_module(module)
        self._then(module)


def _tell_children(spawn: Any, version: Version) -> None:
    """Send what `install` needs along with what a spawned process is told before it imports anything of the user's."""
    original = spawn.get_preparation_data
    parent = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    text = _IN_CHILD.format(parent=parent, root=version.root, folder=version.folder)

    def get_preparation_data(name: str) -> dict[str, Any]:
        return {"evertrain": _Run(text), **original(name)}

    spawn.get_preparation_data = get_preparation_data


class _Run:
    """Statements that are run where this is unpickled; nothing of ours need be importable there."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (self._text, {})
