"""Is what was imported ahead still what is on disk? A rank must never run old code because a zygote remembers it.

Only modules from the script's own folder count: they are what people edit while a job runs. An environment that lies in
there is not.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from hashlib import blake2b

from evertrain.worker import script

LIBRARIES = (
    *(sysconfig.get_path(place) for place in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)
"""Python's and what has been installed, and this package."""

Stamp = tuple[int, int]
"""Size and time of the last change: while they stand there is no need to read the file."""


class Imported:
    """The user's files that this process has loaded, as they were."""

    def __init__(self, command: script.Command) -> None:
        folder = script.first_path(command)
        files = [str(getattr(module, "__file__", None)) for module in list(sys.modules.values())] if folder else []
        inside = os.path.join(folder or "", "")
        own = [file for file in files if file.startswith(inside) and not file.startswith(LIBRARIES)]
        self._files = {file: (_stamp(file), _digest(file)) for file in own}

    def changed(self) -> str | None:
        """The first of them that is another one now."""
        for file, (stamp, digest) in self._files.items():
            if (now := _stamp(file)) != stamp:
                if _digest(file) != digest:
                    return file
                self._files[file] = now, digest
        return None


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
