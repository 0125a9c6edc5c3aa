"""Which folder holds the job's code? `--code DIR`, else the working tree that the script lies in.

Nothing is read here: that would cost time before the start. The controller captures what lies there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from evertrain.model.errors import UsageError

if TYPE_CHECKING:
    from evertrain.model.spec import Command


def root(asked: str | None, command: Command, cwd: Path) -> Path | None:
    """None: there is no folder that could be meant, as where a script lies in the home folder itself."""
    if asked is not None:
        return folder(asked)
    from evertrain.versions import roots

    return roots.root_of(command, cwd, _home())


def folder(asked: str) -> Path:
    """What `--code` names; raises `UsageError` where that cannot be."""
    found = Path(os.path.abspath(asked))
    if not asked or not found.exists():
        raise UsageError(f"--code {asked}: no such folder")
    if not found.is_dir():
        raise UsageError(f"--code {asked}: a file; the folder that holds the code is needed")
    if found == Path("/"):
        raise UsageError("--code /: the whole machine is no code; a folder is needed")
    return found


def notes(asked: str | None, command: Command, found: Path | None) -> list[str]:
    """Lines for the user where update and rollback will not do what one might think."""
    script = _file(command)
    if found is None:
        why = f"{command.target} does not lie in a folder of its own"
        return [f"there is no code for `evertrain update` to take the place of: {why}; --code DIR names one"]
    if asked is not None and script is not None and not _holds(found, script):
        return [f"--code {asked} does not hold {command.target}: the script itself is not part of a version"]
    return []


def _file(command: Command) -> Path | None:
    """The script or program; of a module nobody knows before it is imported."""
    if command.kind == "module":
        return None
    path = command.target if command.kind == "script" else shutil.which(command.target)
    return Path(path) if path is not None else None


def _holds(found: Path, file: Path) -> bool:
    # either may be named through links
    return Path(os.path.realpath(file)).is_relative_to(os.path.realpath(found))


def _home() -> Path:
    return Path(os.path.expanduser("~"))
