"""Which files are nobody's to edit while a job runs? Python's, what has been installed, and this package."""

from __future__ import annotations

import os
import sysconfig

LIBRARIES = (
    *(sysconfig.get_path(place) for place in ("stdlib", "platstdlib", "purelib", "platlib")),
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Of whichever environment: one may lie in the folder of the code."""


def is_library(path: str) -> bool:
    """Whether a file or folder is one of them."""
    inside = os.path.join(path, "")
    return inside.startswith(_FOLDERS) or any(part in inside for part in _INSTALLED)


_FOLDERS = tuple(os.path.join(folder, "") for folder in LIBRARIES)
