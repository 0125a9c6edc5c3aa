"""How does shared memory get into a rank without leaving a descriptor behind?

A rank must not differ from one that torchrun started, open descriptors included, and `mmap.mmap` keeps one until
Python 3.13. So files are mapped with the C library's `mmap` and the descriptor is closed. Nothing here is ever
sparse: a full tmpfs must be an error at allocation, not a SIGBUS in the middle of training.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22  # Linux 5.14; older kernels answer EINVAL and pages fault in one by one
_MADV_POPULATE_WRITE = 23
_HUGE_BYTES = 2 << 20
_MAP_FAILED = ctypes.c_void_p(-1).value


def allocate(path: str, size: int) -> None:
    """Make `path` a file of at least `size` bytes with every byte backed by memory or disk; content is kept.

    When there is no room the file is removed again if it was new, and the error says how much was needed.
    """
    existed = os.path.exists(path)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if not existed:
            os.unlink(path)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        folder = os.path.dirname(path)
        free = os.statvfs(folder)
        raise OSError(
            error.errno,
            f"no room for {path}: {size:,} bytes are needed, {free.f_bavail * free.f_frsize:,} are free in {folder}",
        ) from None
    finally:
        os.close(descriptor)


def map_file(path: str) -> memoryview:
    """Map the whole file, shared and writable, for the rest of this process's life; no descriptor stays open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    finally:
        os.close(descriptor)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map {path} ({size:,} bytes)")
    return view(address, size)


def view(address: int, size: int) -> memoryview:
    """The bytes at an address, writable. The caller keeps the mapping alive."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


def prefault(address: int, size: int, *, write: bool = True) -> None:
    """Have the pages of a mapping ready, so that the first copy into it (or from it) is as fast as every other."""
    start = address - address % mmap.PAGESIZE
    _libc.madvise(start, size + address - start, _MADV_POPULATE_WRITE if write else _MADV_POPULATE_READ)


def prefer_huge_pages(address: int, size: int) -> None:
    """Memory that nobody has touched yet comes in pages of 2 MiB, where it can: half the time for the first copy."""
    first, last = -(-address // _HUGE_BYTES) * _HUGE_BYTES, (address + size) // _HUGE_BYTES * _HUGE_BYTES
    if first < last:
        _libc.madvise(first, last - first, _MADV_HUGEPAGE)
