"""Which file does a rank mean that runs from a version folder? The one in there, wherever it was asked for.

A version folder stands in for the folder of the code, the root. What the version holds lies in it as real files; all
else (data, secrets, what is ignored) is a link back to where it was. The working directory stays the user's: what a
script writes lands where it always did.

    root/train.py      held by the version        folder/train.py
    root/data/         not held: a link back      root/data/ or folder/data/, which are the same
    root/old.py        the version has none       must not be run, unless it is younger than the folder

Whatever a rank finds by itself is mapped here: script, arguments, import path. Imports go through finder.py, and what
is opened at the old place is seen in reads.py.
"""

from __future__ import annotations

import os
import sys

from evertrain.worker.libraries import is_library, may_be_linked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Any


class WrongCode(Exception):
    """A module was loaded from the root that should have come from the version folder."""


class Version:
    """The root, and the folder that stands in for it."""

    def __init__(self, root: str, folder: str) -> None:
        self.root, self.folder = os.path.abspath(root), os.path.abspath(folder)
        # by every name that they may be met under
        self.roots = _beginnings(self.root)
        self.folders = _beginnings(self.folder)
        self._made_ns = os.stat(self.folder).st_ctime_ns
        # the folder itself is changed again by the byte code that is kept in it, what describes it is not
        if os.path.exists(manifest := f"{self.folder}.json"):
            self._made_ns = os.stat(manifest).st_ctime_ns

    def inside(self, path: str) -> str | None:
        """Where an absolute path would lie in the folder; None where it is not under the root, or in there already."""
        whole = os.path.join(path, "")
        # a job's own folder, and the version folder in it, may lie under the root
        if whole.startswith(self.folders):
            return None
        for beginning in self.roots:
            if whole.startswith(beginning):
                return os.path.join(self.folder, whole[len(beginning) :]).rstrip(os.sep)
        return None

    def is_inside(self, path: str) -> bool:
        """Whether a path leads through the folder; through one of its links back, maybe."""
        return any(os.path.join(name, "").startswith(self.folders) for name in _names(path))

    def holds(self, inside: str) -> bool:
        """Whether a path in the folder is one of the version's own files or folders, or leads to one of them."""
        return os.path.join(os.path.realpath(inside), "").startswith(self.folders) and os.path.exists(inside)

    def held(self, path: str) -> str | None:
        """What stands in for a path under the root; None where the version does not hold it. Never for a library.

        A link from a library's place to the root is no library: that is one way to install what is being worked on.
        """
        return next((inside for inside in self._places(path) if self.holds(inside)), None)

    def lacks(self, path: str) -> bool:
        """Whether a file under the root is none of the version's, nor linked back to, nor younger than its folder."""
        places = list(self._places(path))
        if not places or any(os.path.lexists(inside) for inside in places):
            return False
        try:
            return os.stat(path).st_ctime_ns < self._made_ns
        except OSError:
            return False

    def _places(self, path: str) -> Iterator[str]:
        return (inside for name in _names(path) if not is_library(name) and (inside := self.inside(name)))

    def script(self, target: str) -> str:
        """The path of a script or program; the version's own even where it has none, so that the loss is noticed."""
        inside = self.held(target) or next(self._places(target), None)
        if inside is None or (os.path.exists(inside) and not self.holds(inside)):
            return target
        return inside

    def argument(self, word: str) -> str:
        """A word of the command line: `path` and `--name=path` get the path in the folder if the version holds it."""
        name, is_option, value = word.partition("=") if "=" in word else ("", "", word)
        inside = self.held(value) if value and not _is_no_path(value) else None
        # a folder that the process is in says where, not what: outputs stay where they are
        if inside is None or _is_above_here(value) or (os.sep not in value and _is_a_word_too(inside)):
            return word
        if os.path.isdir(inside) and self._is_written_to(value, inside):
            return word
        return f"{name}{is_option}{inside}"

    def _is_written_to(self, original: str, inside: str) -> bool:
        """Whether a folder is there for more than code: results, data. What is kept empty waits for them."""
        try:
            names = os.listdir(original)
        except OSError:
            return False
        mine = [name for name in names if name != "__pycache__"]
        return all(name.startswith(".") for name in mine) or not all(
            self.holds(os.path.join(inside, name)) for name in mine
        )

    def misplaced(self) -> Iterator[tuple[str, str, str]]:
        """Name, file and right place of each module that was loaded from the root although the version has another."""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if not isinstance(file, str) or not os.path.isabs(file):
                continue
            if is_library(file) and not may_be_linked(name, file):
                continue
            if inside := self.held(file):
                yield name, file, inside
            elif self.lacks(file):
                yield name, file, next(self._places(file))


current: Version | None = None
"""What this process runs; None: the user's own files."""


def enter(given: dict[str, Any]) -> dict[str, Any]:
    """Run from the version folder that the keeper has named, if any. Comes back with the command as it is to be run."""
    global current
    code = given.get("code")
    if code is None:
        return given
    try:
        current = version = Version(code["root"], code["folder"])
    except OSError as error:
        sys.exit(f"evertrain: no code to run in {code['folder']}: {error.strerror}; `evertrain update` sends it again")
    command = given["command"]
    if command["kind"] != "module":
        is_looked_up = command["kind"] == "program" and os.sep not in command["target"]
        command = command if is_looked_up else {**command, "target": version.script(command["target"])}
    if command["kind"] != "program":
        # both now: later a module of the standard library that they import may have a namesake beside the script
        from evertrain.worker import finder, reads

        assert reads
        sys.path[:] = [version.held(entry) or entry if entry else entry for entry in sys.path]
        finder.install(version)
    return {**given, "command": command}


def arguments(words: Sequence[str]) -> list[str]:
    """The script's arguments, as they are to be given."""
    return [current.argument(word) for word in words] if current is not None else list(words)


def first_path(folder: str) -> str:
    """What comes first on `sys.path`, for the folder that Python would put there."""
    return (current.held(folder) if current is not None else None) or folder


def digest(given: Mapping[str, Any]) -> str:
    return str(given["code"]["digest"]) if given.get("code") else ""


def problem() -> str | None:
    """Which module of this process is not the version's."""
    for name, file, inside in current.misplaced() if current is not None else ():
        has = f"its version is {inside}" if os.path.exists(inside) else f"the version has no {inside}"
        return f"module {name} was loaded from {file}, but {has}"
    return None


def check(rank: int) -> None:
    """Raise where a module of this process is not the version's: no step may be made with code of another one."""
    if found := problem():
        raise WrongCode(
            f"rank {rank} runs code of two versions: {found}. Import it in the usual way, or by a path made from "
            "__file__; where the import is not yours to change, run this code in place: a new `evertrain run`"
        )


def _beginnings(folder: str) -> tuple[str, ...]:
    return tuple({os.path.join(folder, ""), os.path.join(os.path.realpath(folder), "")})


def _names(path: str) -> Iterator[str]:
    """The absolute names of a path: as it was given, and with all links followed."""
    # what is above a link is not what its name says
    if os.pardir not in path.split(os.sep):
        yield os.path.abspath(path)
    else:
        yield os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    yield os.path.realpath(path)


def _is_no_path(value: str) -> bool:
    return "\0" in value or "://" in value or len(value) > 4096


def _is_above_here(value: str) -> bool:
    return os.path.join(os.getcwd(), "").startswith(os.path.join(os.path.abspath(value), ""))


def _is_a_word_too(inside: str) -> bool:
    """Whether a name without a slash is more likely not meant as the folder that it names.

    `--model gpt` beside a package `gpt`.
    """
    return os.path.exists(os.path.join(inside, "__init__.py"))
