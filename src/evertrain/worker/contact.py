"""How does a rank answer that hangs? By what runs without its interpreter, from when torch.distributed begins.

    PAGE.sock      torch's own server, in C++: gives out the flight recorder while native code holds the interpreter
    PAGE.stacks    faulthandler writes all stacks there at a real-time signal; the page names it once it is registered
    PAGE.groups    the process groups (`worker.groups`), and one line for each of the two above that there is not

Until somebody asks, this costs threads that sleep and two descriptors. It begins no earlier, so that a script finds the
process at its start as torchrun would have made it.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from evertrain.worker.session import Session

LONGEST_SOCKET = 107
"""Bytes of a path that the kernel takes for a unix socket."""
_FIRST_SIGNAL = 13
"""Counted from SIGRTMIN: debuggers, Go and C libraries use the first and the last few."""
_DESCRIPTOR = 200
"""The lowest number that we take: scripts may expect small ones to follow each other."""
_QUIET = 2
"""Of torch's log levels: errors only."""

_opened: int | None = None
"""The process that has."""


def socket_path(page_path: str) -> str:
    return f"{page_path}.sock"


def stacks_path(page_path: str) -> str:
    return f"{page_path}.stacks"


def groups_path(page_path: str) -> str:
    return f"{page_path}.groups"


def open_up(current: Session) -> None:
    """Be there to be asked, once a process. Nothing that goes wrong here hurts the job."""
    global _opened
    if _opened == os.getpid():
        return
    _opened = os.getpid()
    for what, begin in (("stacks by a signal", _register), ("flight recorder", _serve)):
        try:
            begin(current)
        except Exception as error:
            explain(current, f"{what}: {error}")


def append(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def explain(current: Session, why: str) -> None:
    """Say why something of this rank is not seen."""
    import json

    try:
        append(groups_path(current.page_path), json.dumps({"blind": " ".join(why.split())[:300]}) + "\n")
    except OSError:
        pass


def _register(current: Session) -> None:
    import faulthandler
    import fcntl

    number = _free_signal()
    path = stacks_path(current.page_path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    descriptor = low = os.open(path, flags, 0o600)
    try:
        descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, _DESCRIPTOR)
        os.close(low)
    except OSError:
        pass  # this process may have no so many
    try:
        faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
    except BaseException:
        os.close(descriptor)
        raise
    current.page.dump_signal = number


def _free_signal() -> int:
    """By the kernel's word: what C code has registered, Python does not know of."""
    import signal

    with open("/proc/self/status", encoding="utf-8") as file:
        said = dict(line.rstrip().split(":", 1) for line in file)
    taken = int(said["SigCgt"], 16) | int(said["SigIgn"], 16) | int(said["SigBlk"], 16)
    for number in range(signal.SIGRTMIN + _FIRST_SIGNAL, signal.SIGRTMAX - _FIRST_SIGNAL):
        if not taken >> (number - 1) & 1:
            return number
    raise OSError("all real-time signals are taken")


def _serve(current: Session) -> None:
    import ctypes

    from torch._C import _distributed_c10d

    path = socket_path(current.page_path)
    if len(os.fsencode(path)) > LONGEST_SOCKET:
        raise OSError(f"no socket can have a path of more than {LONGEST_SOCKET} bytes: {path}")
    serve: Any = getattr(_distributed_c10d, "_WorkerServer", None)
    if serve is None:
        raise OSError("this version of torch has no server for it")
    if os.path.exists(path):
        os.unlink(path)
    level = _log_level()
    said = level.value if level is not None else 0
    if level is not None:
        level.value = max(said, _QUIET)  # it would tell on stderr that it listens
    try:
        server = serve(path)
    finally:
        if level is not None:
            level.value = said
    # it runs until the process ends: to stop it is to wait for its thread, which a fork of ours does not have
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))
    os.chmod(path, 0o600)


def _log_level() -> Any:
    import ctypes

    import torch

    try:
        library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        return ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):
        return None
