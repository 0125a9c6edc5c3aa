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
    return os.path.join(path, "").startswith(_FOLDERS) or is_installed(path)


def is_installed(path: str) -> bool:
    """Whether it lies where packages are installed, maybe as a link to somewhere else."""
    inside = os.path.join(path, "")
    return any(part in inside for part in _INSTALLED)


def may_be_linked(name: str, path: str) -> bool:
    """Whether a module's file may be a link from there: links are made of whole packages."""
    return "." not in name and is_installed(path)


_FOLDERS = tuple(os.path.join(folder, "") for folder in LIBRARIES)
