"""In which folder does the code of a job lie, where the user has not named it?"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from evertrain.model.spec import Command

_SYSTEM_FOLDERS = ("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "sbin", "sys", "usr")


def root_of(command: Command, cwd: Path, home: Path) -> Path | None:
    """The working tree of what is run: the nearest folder upwards with .git, else the script's own folder.

    None where only a folder would do that holds much besides: the home folder, one that it lies in, or, for a program,
    a folder of the system.
    """
    must_be_repository = False
    if command.kind == "module":
        start = cwd
    elif command.kind == "program" and "/" not in command.target:
        found = shutil.which(command.target)
        if found is None:
            return None
        start, must_be_repository = Path(found).parent, True
    else:
        start = Path(os.path.abspath(cwd / command.target)).parent
        must_be_repository = command.kind == "program" and start.parts[1:2] != () and start.parts[1] in _SYSTEM_FOLDERS
    start, home = Path(os.path.abspath(start)), Path(os.path.abspath(home))
    too_wide = {home, *home.parents, home.resolve(), *home.resolve().parents}
    for folder in (start, *start.parents):
        if folder in too_wide or folder.resolve() in too_wide:
            break
        if os.path.lexists(folder / ".git"):
            return folder
    if must_be_repository or start in too_wide or start.resolve() in too_wide:
        return None
    return start
