"""Is what was imported ahead still what is on disk? A rank must never run old code because a zygote remembers it.

Only modules from the folder of the code count (the version's folder, or the script's own where none is known): they are
what people edit while a job runs. An environment that lies in there is not.
"""

from __future__ import annotations

import os
import sys
from hashlib import blake2b

from evertrain.worker import script, version
from evertrain.worker.libraries import is_library

Stamp = tuple[int, int]
"""Size and time of the last change: while they stand there is no need to read the file."""


class Imported:
    """The user's files that this process has loaded, as they were."""

    def __init__(self, command: script.Command, code_root: str = "") -> None:
        """`code_root`: the folder of the code; empty: the script's own."""
        folders = _folders(command, code_root)
        files = [str(getattr(module, "__file__", None)) for module in list(sys.modules.values())] if folders else []
        own = [file for file in files if file.startswith(folders) and not is_library(file)]
        self._files = {file: (_stamp(file), _digest(file)) for file in own}

    def changed(self) -> str | None:
        """The first of them that is another one now."""
        for file, (stamp, digest) in self._files.items():
            if (now := _stamp(file)) != stamp:
                if _digest(file) != digest:
                    return file
                self._files[file] = now, digest
        return None


def _folders(command: script.Command, code_root: str) -> tuple[str, ...]:
    if version.current is not None:
        # what it does not hold is imported from the root
        return (*version.current.folders, *version.current.roots)
    folders = {script.first_path(command), code_root, code_root and os.path.realpath(code_root)}
    return tuple(os.path.join(folder, "") for folder in folders if folder)


def _stamp(file: str) -> Stamp | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _digest(file: str) -> bytes | None:
    try:
        with open(file, "rb") as content:
            return blake2b(content.read()).digest()
    except OSError:
        return None
