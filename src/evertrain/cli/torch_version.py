"""Which torch will the ranks use? Read from its installation: the command line never imports torch."""

from __future__ import annotations

import re
from pathlib import Path

TESTED = "2.13"

_VERSION = re.compile(r"^__version__ = ['\"](?P<version>[^'\"]+)", re.MULTILINE)


def note(python: str) -> str | None:
    """A line for the user where the ranks' torch is not the one that the tests run; None too where none is found."""
    version = of(python)
    if version is None or version == TESTED or version.startswith(f"{TESTED}."):
        return None
    return f"torch {version} is expected to work, but the tests run {TESTED} only"


def of(python: str) -> str | None:
    """The version of torch beside this interpreter; None where it lies elsewhere or nowhere."""
    prefix = Path(python).parent.parent
    for file in sorted(prefix.glob("lib/python3*/*-packages/torch/version.py")):
        try:
            found = _VERSION.search(file.read_text())
        except OSError:
            continue
        if found is not None:
            return found["version"]
    return None
