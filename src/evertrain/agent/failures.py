"""What did a failed rank leave behind? The exception its launcher or torch wrote down, and the tail of its stderr."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from evertrain.model.report import RankError

_TAIL_BYTES = 16 << 10
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_LAST_LINE = re.compile(r"^(?P<type>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$")


def error_of(exception: Path, folder: Path, stderr_tail: str) -> RankError | None:
    """The exception that ended the rank whose logs lie in `folder`; None when it left none.

    Sources, best first: the record of our launcher (`exception`), torch's `error.json` (the `record` decorator), and a
    traceback at the end of stderr.
    """
    if (ours := _json(exception)) is not None:
        return RankError(
            type=str(ours.get("type", "")),
            message=str(ours.get("message", "")),
            traceback=str(ours.get("traceback", "")),
            file=str(ours.get("file", "")),
            line=int(ours.get("line") or 0),
            step=ours.get("step"),
            time=ours.get("time"),
        )
    if (torchs := _json(folder / "error.json")) is not None:
        return _from_torch(torchs)
    return from_traceback(stderr_tail)


def stderr_tail(folder: Path) -> str:
    """The last few kilobytes of the rank's stderr, as text whatever the bytes are."""
    try:
        with open(folder / "stderr.log", "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read().decode("utf-8", "backslashreplace")
    except OSError:
        return ""


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _from_torch(found: dict[str, Any]) -> RankError | None:
    message = found.get("message")
    if isinstance(message, str):
        return RankError(type="Error", message=message)
    if not isinstance(message, dict):
        return None
    extra = message.get("extraInfo")
    callstack = str(extra.get("py_callstack", "")) if isinstance(extra, dict) else ""
    kind, _, rest = str(message.get("message", "")).partition(": ")
    file, line = _where(callstack)
    return RankError(type=kind, message=rest, traceback=callstack, file=file, line=line)


def from_traceback(text: str) -> RankError | None:
    """The last traceback that Python printed into `text`."""
    start = text.rfind("Traceback (most recent call last):")
    if start < 0:
        return None
    block = text[start:]
    for line in block.splitlines()[1:]:
        if line and not line.startswith(" "):
            if (match := _LAST_LINE.match(line)) is None:
                return None
            traceback = block[: block.index(line) + len(line)]
            file, number = _where(traceback)
            return RankError(
                type=match["type"], message=match["message"] or "", traceback=traceback, file=file, line=number
            )
    return None


def _where(traceback: str) -> tuple[str, int]:
    frames = list(_FRAME.finditer(traceback))
    return (frames[-1]["file"], int(frames[-1]["line"])) if frames else ("", 0)
