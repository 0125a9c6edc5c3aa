"""Where do the last seconds before an incident stay? `RUN_DIR/traces/incident-ID.window`; the oldest go first."""

from __future__ import annotations

from pathlib import Path

from evertrain.model import windows
from evertrain.model.windows import JobWindow

_PREFIX, _ENDING = "incident-", ".window"


def folder(run_dir: Path) -> Path:
    return run_dir / "traces"


def incidents(run_dir: Path) -> list[int]:
    """Those that something is kept of, oldest first."""
    numbers = (path.name[len(_PREFIX) : -len(_ENDING)] for path in _there(run_dir))
    return [int(number) for number in numbers if number.isdecimal()]


def write(run_dir: Path, incident: int, window: JobWindow, most_bytes: int) -> None:
    """Put it there, whole or not at all; what is too much together goes. Raises OSError."""
    content = windows.encode(window)
    if len(content) > most_bytes:
        return
    folder(run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
    path = _path(run_dir, incident)
    fresh = path.with_suffix(".new")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)
    there = _there(run_dir)
    total = sum(one.stat().st_size for one in there)
    for one in there:
        if total <= most_bytes:
            break
        total -= one.stat().st_size
        one.unlink(missing_ok=True)


def read(run_dir: Path, incident: int) -> JobWindow | None:
    """None: nothing is kept of it. Raises ValueError, in one line."""
    path = _path(run_dir, incident)
    try:
        return windows.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _there(run_dir: Path) -> list[Path]:
    try:
        found = [path for path in folder(run_dir).iterdir() if path.name.endswith(_ENDING)]
        return sorted(found, key=lambda path: path.stat().st_mtime_ns)
    except FileNotFoundError:
        return []


def _path(run_dir: Path, incident: int) -> Path:
    return folder(run_dir) / f"{_PREFIX}{incident}{_ENDING}"
