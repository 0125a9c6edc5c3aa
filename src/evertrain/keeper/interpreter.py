"""How is a Python process started that can later pass for `python -u script.py args`?

With the bootstrap on its standard input (`python -u - …`), so that the interpreter is in exactly the state in which
it begins a script: no `-c`, no `-I`, the user's own environment and site. A padding argument makes its argument area as
long as the real command line, which is written over it when the process becomes a rank (worker/disguise.py).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
PADDING = "evertrain: becomes a rank at go "

BOOTSTRAP = """\
import sys
startup = frozenset(sys.modules)
if not sys.flags.safe_path: del sys.path[0]
sys.path.insert(0, {parent})
import evertrain
del sys.path[0]
from evertrain.worker.{role} import main
main({given}, startup)
"""


def command_line(python: str, command: dict[str, Any]) -> list[str]:
    """What torchrun would have started for this command."""
    words = [command["target"], *command["args"]]
    if command["kind"] == "program":
        return words
    return [python, "-u", *(["-m"] if command["kind"] == "module" else []), *words]


def moved(command: dict[str, Any], code: dict[str, Any]) -> dict[str, Any]:
    """The command with the names that it will show when it runs from a version folder (worker/version.py).

    Only to know how long they are: a name that is not moved in the end leaves a little room.
    """
    root, folder = os.path.join(code["root"], ""), code["folder"]

    def place(word: str) -> str:
        name, is_option, value = word.partition("=") if "=" in word else ("", "", word)
        path = os.path.abspath(value) if value else ""
        inside = os.path.join(folder, path.removeprefix(root))
        return f"{name}{is_option}{inside}" if path.startswith(root) and os.path.lexists(inside) else word

    target = command["target"] if command["kind"] == "module" else place(command["target"])
    return {**command, "target": target, "args": [place(word) for word in command["args"]]}


def disguised(words: Sequence[str]) -> list[str]:
    """`python -u - padding` of the length in bytes of the command line that it is going to show."""
    python, *real = words
    room = sum(len(os.fsencode(word)) + 1 for word in real) - len("-u\0-\0") - 1
    if room < 0:
        return [python, "-u", "-"]
    return [python, "-u", "-", (PADDING * (room // len(PADDING) + 1))[:room]]


def start(
    role: str,
    argv: list[str],
    given: dict[str, Any],
    *,
    shared: dict[str, int],
    environ: dict[str, str],
    log: int,
) -> int:
    """Start an interpreter, in a session of its own, that runs `evertrain.worker.<role>.main(given, …)`; its pid.

    It gets the `shared` descriptors under the numbers that they have here, and `given` says which is which.
    """
    text = BOOTSTRAP.format(parent=ascii(PACKAGE_PARENT), role=role, given=ascii({**given, **shared}))
    bootstrap = os.memfd_create("bootstrap")
    try:
        os.write(bootstrap, text.encode())
        os.lseek(bootstrap, 0, os.SEEK_SET)
        # as torchrun does it; posix_spawn would leave two of the C library's own signals ignored
        process = subprocess.Popen(
            argv,
            env=environ,
            stdin=bootstrap,
            stdout=log,
            stderr=log,
            pass_fds=tuple(shared.values()),
            start_new_session=True,
        )
    finally:
        os.close(bootstrap)
    process.returncode = 0  # or `subprocess` would reap it and keep its exit status to itself
    return process.pid
