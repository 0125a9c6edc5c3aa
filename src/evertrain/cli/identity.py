"""Which job is this? The same script in the same folder is the same job, unless the user names it."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from evertrain.model.errors import UsageError
from evertrain.model.spec import Command

NAME_LIMIT = 100


def default(command: Command) -> str:
    """Name of the script and a short hash of its folder."""
    if command.kind == "module":
        name, folder = command.target, Path.cwd()
    else:
        script = Path(command.target)
        name, folder = script.stem if script.stem != "__main__" else script.parent.name, script.parent.resolve()
    readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "job"
    return f"{readable[:NAME_LIMIT]}-{hashlib.sha256(str(folder).encode()).hexdigest()[:6]}"


def checked(name: str) -> str:
    """A name that can be a folder's name."""
    if not name or name.startswith(".") or len(name) > NAME_LIMIT or not all(_is_plain(letter) for letter in name):
        raise UsageError(f"--job {name!r}: up to {NAME_LIMIT} letters without / that do not begin with a dot")
    return name


def _is_plain(letter: str) -> bool:
    return letter.isprintable() and letter != "/"


def new_run_id(job: str) -> str:
    """One call of `evertrain run`; cut short, because a socket's path may have 107 bytes only."""
    short = job.encode()[:40].decode(errors="ignore")
    return f"{short}-{os.urandom(3).hex()}"
