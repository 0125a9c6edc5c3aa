"""How are the user's own files captured while ranks start? By a process of its own, which gives way to all others.

A thread would not do: one that gives way keeps Python's lock while it waits for a processor, and with it the controller
waits, for up to half a second on a busy machine. The process gets what it is asked for as a line of its input; when the
input ends the controller has, and so does the process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import msgspec

from evertrain.model.code import Code
from evertrain.model.config import CodeConfig
from evertrain.versions import archive, tree
from evertrain.versions.errors import ArchiveError, TreeError

_NICE = 10
_SCAN_LIMIT_S = 120.0
"""Longer than where somebody waits: with all processors busy, what gives way takes several times as long."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the process is to do."""

    root: str
    skip: tuple[str, ...]
    config: CodeConfig
    target: str
    """Where the archive is to be written."""


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """What has come of it."""

    code: Code | None = None
    problem: str = ""


async def capture(asked: Asked) -> Captured:
    """Have a process do it. Raises OSError where none can be started."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(asked) + b"\n")
        said = await process.stdout.read()
        status = await process.wait()
    except BaseException:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    finally:
        process.stdin.close()
    try:
        return msgspec.json.decode(said, type=Captured)
    except msgspec.DecodeError:
        line = f"the code is not captured: the process for that ended with status {status}; see the controller's log"
        return Captured(problem=line)


def perform(asked: Asked) -> Captured:
    """Do it here."""
    try:
        found = tree.scan(Path(asked.root), asked.config, map(Path, asked.skip), _SCAN_LIMIT_S)
        return Captured(code=archive.pack(found, Path(asked.target)))
    except (TreeError, ArchiveError) as error:
        return Captured(problem=str(error))
    except OSError as error:
        where = error.filename or asked.target
        return Captured(problem=f"the code is not captured: {where}: {error.strerror or error}")


def main() -> None:
    os.nice(_NICE)
    asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=Asked)
    threading.Thread(target=_end_with_the_controller, daemon=True).start()
    sys.stdout.buffer.write(msgspec.json.encode(perform(asked)))
    sys.stdout.buffer.flush()


def _end_with_the_controller() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    main()
