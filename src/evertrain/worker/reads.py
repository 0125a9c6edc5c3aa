"""Does a rank that runs from a version folder read a file of the code at its old place? Then it says so.

A script that opens `configs/base.yaml` relative to the working directory gets the user's file, not the version's. That
is its right, and may be what is wanted; where the two differ it is said once for each file, on standard error. What is
opened by other means than Python's own (a library in C, a program) is not seen.
"""

from __future__ import annotations

import mmap
import os
import sys
from zlib import crc32

from evertrain.worker.version import Version

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Hook = Callable[[str, Any], None]

_NOTED_BITS = 1 << 15
_LARGEST = 64 << 20
"""Bytes of files that are compared; above, their size tells."""


def watch(version: Version, who: str) -> None:
    """Look at every file that this process opens from now on, and at those of the processes that it forks."""
    sys.addaudithook(hook(version, who))


def hook(version: Version, who: str) -> Hook:
    """The audit hook: called with every event of the interpreter, it leaves all but a few at once."""
    # shared with forked children: a data loader's workers come anew in each epoch, and what was said is known to them
    noted = mmap.mmap(-1, _NOTED_BITS)
    linked: set[str] = set()
    """Folders under the root that are not the version's; there may be a million files of data in there."""

    def see(event: str, args: Any) -> None:
        if event != "open":
            return
        try:
            path, _, flags = args
            # a descriptor or bytes: what opens those is not a script's `open("config")`
            if type(path) is not str or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            if path.startswith("/") and not path.startswith(version.roots):
                return
            path = os.path.abspath(path)
            folder, _ = os.path.split(path)
            bit = crc32(path.encode(errors="surrogateescape")) % _NOTED_BITS
            if folder in linked or noted[bit] or (inside := version.inside(path)) is None:
                return
            if not version.holds(os.path.dirname(inside)):
                linked.add(folder)
                return
            if not (version.holds(inside) and os.path.isfile(path)):
                return
            noted[bit] = 1
            if not _same(path, inside):
                text = (
                    f"evertrain: {who} reads {path}, of which the version that it runs has another: to read that one "
                    f"({inside}), use a path made from __file__, or give it as an argument of the script\n"
                )
                os.write(2, text.encode(errors="surrogateescape"))
        except (OSError, ValueError, TypeError):  # gone meanwhile; whoever opens it will say so
            pass

    return see


def _same(one: str, other: str) -> bool:
    size = os.path.getsize(one)
    if size != os.path.getsize(other):
        return False
    if size > _LARGEST:
        return True
    with open(one, "rb") as left, open(other, "rb") as right:
        return left.read() == right.read()
