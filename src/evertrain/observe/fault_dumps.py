"""Where does a process stand that nobody may read? It writes that down itself, at a signal (`worker.aid`).

Python's faulthandler does it inside the signal handler: it needs no permission, and no interpreter that is free. A
process that has not registered it would be ended by the signal, so each is looked at just before: it has to catch the
signal, and to hold the file open that the answer goes to.
"""

from __future__ import annotations

import os
import select
import signal
import time
from pathlib import Path

from evertrain.observe import process_tree

_LOOK_S = 0.002
_BETWEEN_S = 0.05
"""Nothing more for so long, and the dump is at its end."""


def dump(pid: int, number: int, path: Path, limit_s: float) -> str:
    """The stack of `pid` as faulthandler writes it at signal `number`; raises OSError with the reason there is none.

    Nobody else may ask for one that goes to the same file meanwhile.
    """
    deadline = time.monotonic() + limit_s
    try:
        process = os.pidfd_open(pid)
    except OSError:
        raise OSError("it has ended") from None
    try:
        begin = path.stat().st_size
        if why := _why_not(pid, number, path):
            raise OSError(why)
        signal.pidfd_send_signal(process, number)
        return _answer(process, path, begin, deadline, limit_s)
    finally:
        os.close(process)


def _why_not(pid: int, number: int, path: Path) -> str:
    """Why it cannot be asked; empty: it can."""
    fields = process_tree.stat(pid)
    if fields is None:
        return "it has ended"
    if process_tree.state_of(pid, fields[0]):
        return "it heeds no signal"
    status = dict(
        line.partition(":")[::2] for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    )
    if not int(status.get("SigCgt", "0"), 16) >> (number - 1) & 1:
        return "it has registered no signal to be asked with"
    return "" if _holds_open(pid, path) else "it does not answer where it should"


def _holds_open(pid: int, path: Path) -> bool:
    # only the links: what they lead to may lie on a disk that never answers
    wanted, folder = os.path.realpath(path), f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{name}") == wanted:
                return True
        except OSError:
            continue
    return False


def _answer(process: int, path: Path, begin: int, deadline: float, limit_s: float) -> str:
    """What comes after `begin`, once it has come to an end."""
    size, changed = begin, time.monotonic()
    while (now := time.monotonic()) < deadline:
        if (there := path.stat().st_size) != size:
            size, changed = there, now
        elif size > begin and now - changed >= _BETWEEN_S:
            break
        if select.select([process], [], [], _LOOK_S)[0] and path.stat().st_size == size:
            break  # it has ended
    if size == begin:
        raise OSError(f"it has not answered a signal within {limit_s:.1f} s")
    with path.open("rb") as file:
        file.seek(begin)
        return file.read(size - begin).decode(errors="replace")
