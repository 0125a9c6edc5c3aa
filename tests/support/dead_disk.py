"""How does a test get a process that not even SIGKILL ends? A file system of its own, whose reads are never answered.

    with dead_disk.mounted(folder) as disk:
        ... open(disk.file).read() ...       # sleeps in the kernel (state D) and heeds nothing
        disk.free()                          # every such read fails; whoever was killed meanwhile dies now

What a dead network file system or a broken disk does to a rank, as the kernel's FUSE protocol has it: a request that
has reached the file system is waited for, whatever signals come. At the end the connection is aborted, so that nothing
can be left behind; the end of the test's own process closes its descriptor, which does the same.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# operations and structs of linux/fuse.h
LOOKUP, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, INTERRUPT = 1, 3, 14, 15, 18, 25, 26, 36
UNANSWERED = (2, 42, READ)
"""FORGET and BATCH_FORGET want no answer; READ gets none."""
ROOT, FILE = 1, 2
HEADER = struct.Struct("<IIQQ")
MINOR = 31
DIRECT_IO = 1
EINTR, ENOSYS = 4, 38
VALID_S = 3600
MS_NOSUID, MS_NODEV, MNT_FORCE, MNT_DETACH = 2, 4, 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


class DeadDisk:
    """A mounted folder with one file in it, named `file`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "file"
        self._device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
        if _libc.mount(b"dead", os.fsencode(folder), b"fuse", MS_NOSUID | MS_NODEV, options.encode()):
            number = ctypes.get_errno()
            os.close(self._device)
            raise OSError(number, f"mount: {os.strerror(number)}")
        self._server = threading.Thread(target=self._serve, daemon=True)
        self._server.start()
        # the first signal that ever meets a request teaches the kernel that there is no interrupting here
        subprocess.run(["timeout", "0.2", "cat", self.file], capture_output=True)

    def free(self) -> None:
        """Abort the connection: every request that waits fails."""
        if self._server.is_alive():
            _libc.umount2(os.fsencode(self._folder), MNT_FORCE | MNT_DETACH)
            self._server.join(10)
            os.close(self._device)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, 1 << 17)
            except OSError:
                return  # ENODEV: the connection is no more
            _, operation, unique, node = HEADER.unpack_from(request)
            if operation in UNANSWERED:
                continue
            found = _answer(operation, node)
            self._say(unique, -ENOSYS if found is None else 0, found or b"")
            if operation == INTERRUPT:
                self._say(struct.unpack_from("<Q", request, 40)[0], -EINTR)

    def _say(self, unique: int, status: int, body: bytes = b"") -> None:
        try:
            os.write(self._device, struct.pack("<IiQ", 16 + len(body), status, unique) + body)
        except OSError:
            pass  # whoever asked is gone


def _answer(operation: int, node: int) -> bytes | None:
    """The body of the answer; None for what this file system does not know."""
    if operation == INIT:
        return struct.pack("<IIIIHHIIHH28x", 7, MINOR, 0, 0, 1, 1, 4096, 1, 0, 0)
    if operation == LOOKUP:
        return struct.pack("<QQQQII", FILE, 0, VALID_S, VALID_S, 0, 0) + _attributes(FILE)
    if operation == GETATTR:
        return struct.pack("<QII", VALID_S, 0, 0) + _attributes(node)
    if operation == OPEN:
        return struct.pack("<QII", 1, DIRECT_IO, 0)
    return b"" if operation in (RELEASE, FLUSH) else None


def _attributes(node: int) -> bytes:
    mode = 0o40755 if node == ROOT else 0o100644
    return struct.pack("<QQQQQQIIIIIIIIII", node, 4096, 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


@contextmanager
def mounted(folder: Path) -> Iterator[DeadDisk]:
    """Raises OSError where this machine or this user has no FUSE."""
    disk = DeadDisk(folder)
    try:
        yield disk
    finally:
        disk.free()
