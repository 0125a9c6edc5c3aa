"""What is this file, and what stands in it? Files, folders and standard input, read with bounds.

Whatever comes in is handed on in pieces of bounded size. What cannot be read is named in one line and stops nothing: a
bomb, a device, a folder without permission.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
MAX_FILES = 50_000
MAX_GROWTH = 200
"""Compressed logs shrink to a tenth, repeated ones to a hundredth; a bomb grows a thousandfold."""
FREE_GROWTH_BYTES = 64 << 20
"""Up to here any growth is believed."""

Refuse = Callable[[str, str], None]
"""Told of what cannot be read: its name, and why in one line."""

_COMPRESSED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}


class Document(Struct, frozen=True):
    """Something to be read once, now: its first piece is there, the others come when asked for."""

    path: str
    """`-` for standard input."""
    head: bytes
    rest: Iterator[bytes]


def read(paths: Iterable[str], refuse: Refuse) -> Iterator[Document]:
    """Everything below these paths, in order of their names."""
    for name in paths:
        if name == "-":
            yield _document("-", sys.stdin.buffer, None, refuse)
            continue
        for path in _files(Path(name), refuse):
            try:
                yield from _open(path, refuse)
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                refuse(str(path), _reason(error))


def _files(path: Path, refuse: Refuse) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    count = 0
    for folder, below, names in os.walk(path, onerror=lambda error: refuse(str(error.filename), _reason(error))):
        below.sort()
        for name in sorted(names):
            count += 1
            if count > MAX_FILES:
                refuse(str(path), f"more than {MAX_FILES} files: the rest is not read")
                return
            yield Path(folder, name)


def _open(path: Path, refuse: Refuse) -> Iterator[Document]:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        # a pipe or a device may never end
        refuse(str(path), "no regular file")
        return
    with path.open("rb") as raw:
        magic = raw.read(6)
    opened = next((opened for beginning, opened in _COMPRESSED.items() if magic.startswith(beginning)), None)
    with (opened or open)(path, "rb") as stream:
        yield _document(str(path), stream, status.st_size if opened else None, refuse)


def _document(name: str, stream: IO[bytes], compressed: int | None, refuse: Refuse) -> Document:
    head = stream.read(HEAD_BYTES)
    return Document(name, head, _rest(name, stream, len(head), compressed, refuse))


def _rest(name: str, stream: IO[bytes], size: int, compressed: int | None, refuse: Refuse) -> Iterator[bytes]:
    """`compressed`: size before unpacking, of a stream that grows."""
    while True:
        try:
            block = stream.read(BLOCK_BYTES)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            refuse(name, f"{_reason(error)}: read up to there")
            return
        size += len(block)
        if compressed is not None and size > FREE_GROWTH_BYTES and size > MAX_GROWTH * max(1, compressed):
            refuse(name, f"expands more than {MAX_GROWTH} times: read up to there")
            return
        if not block:
            return
        yield block


def _reason(error: BaseException) -> str:
    told = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(told.split())[:300] or type(error).__name__
