"""How does a tree become one file that travels, and is such a file what it should be?

The tar is written in one way only: names in order, each folder before what lies in it, no owners, one time for all, and
of the mode only whether the owner may execute. So equal trees have equal digests. And whoever reads an archive writes
each header anew and compares: whatever differs, and so may mean something else to somebody else, is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from posixpath import dirname, normpath
from typing import BinaryIO

from evertrain.model.code import Code
from evertrain.model.config import CodeConfig
from evertrain.versions import names, stream
from evertrain.versions.errors import ArchiveError, TreeError
from evertrain.versions.manifest import KeptFile, Manifest
from evertrain.versions.stream import Inflated, StreamError
from evertrain.versions.tree import File, Link, Tree

TIME = 946684800
"""Of all files: 2000-01-01 UTC; some tools refuse what is older than 1980."""
_LEVEL = 3
_BLOCK = tarfile.BLOCKSIZE
_END = b"\0" * (2 * _BLOCK)
_LONGEST_NAMES = 4096
"""Of an extended header, which holds the path and the target of one file."""
_PER_ENTRY = _LONGEST_NAMES + 4 * _BLOCK
_AT_ONCE = 1 << 24
"""A file up to this size is read in one go, and again if it has changed meanwhile."""
_TRIES = 3

Entry = File | Link | str
"""The last: a folder."""
Take = Callable[[Entry, Iterator[bytes]], None]


def pack(tree: Tree, target: Path) -> Code:
    """Write the archive of a tree; there is nothing at `target` until it is whole."""
    target.parent.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Entry] = {folder: folder for folder in tree.folders}
    entries |= {link.path: link for link in tree.links}
    entries |= {file.path: file for file in tree.files}
    descriptor, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=target.parent)
    try:
        with open(descriptor, "wb") as out:
            writer = _Writer(out)
            room = tree.most_bytes
            for path in sorted(entries):
                entry = entries[path]
                room -= writer.file(tree.root / path, entry, room) if isinstance(entry, File) else writer.plain(entry)
            writer.end()
            out.flush()
            os.fsync(descriptor)
        if stream.too_dense(writer.plain_bytes, writer.bytes):
            raise TreeError(
                f"{names.shown(tree.root)} holds large files with next to nothing in them, which are no code; name "
                "them in .gitignore or in code.exclude of the config"
            )
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return Code(
        digest=writer.digest(),
        files=writer.files,
        bytes=tree.most_bytes - room,
        archive_bytes=writer.bytes,
    )


def check(path: Path, digest: str, config: CodeConfig) -> Manifest:
    """Read all of an archive, unpack nothing; returns what it holds if it is the one and holds only what it may."""
    return walk(path, digest, config, lambda entry, content: None)


def walk(path: Path, digest: str | None, config: CodeConfig, take: Take) -> Manifest:
    """`check`, with each entry and its content passed on before the whole archive is known to be good."""
    name = f"archive {names.shown((digest or path.name)[:12])}"
    try:
        descriptor = _at_once(os.fspath(path), os.O_RDONLY)
    except OSError as error:
        raise ArchiveError(f"{name} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ArchiveError(f"{name} is not a file")
    with open(descriptor, "rb", buffering=0) as source:
        try:
            found = _Reader(source, config, take).manifest()
        except StreamError as error:
            raise ArchiveError(f"{name} {error}") from None
    if digest is not None and found.digest != digest:
        raise ArchiveError(f"{name} has another digest: {found.digest[:12]}")
    return found


class _Writer:
    def __init__(self, out: BinaryIO) -> None:
        self.bytes = 0
        self.plain_bytes = 0
        self.files = 0
        self._out = out
        self._hash = hashlib.sha256()
        # the header that zlib writes has no time and no name
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def plain(self, entry: Link | str) -> int:
        self._write(_header(entry))
        return 0

    def file(self, path: Path, entry: File, room: int) -> int:
        """Returns its size, which may have changed since the scan; what has vanished since then is left out."""
        try:
            with open(path, "rb", opener=_no_link) as source:
                return self._content(source, entry, room)
        except OSError as error:
            if error.filename is None:
                raise
            if error.errno == errno.ENOENT:
                return 0
            raise TreeError(f"{names.shown(path)} cannot be read: {error.strerror}") from None

    def end(self) -> None:
        self._write(_END)
        self._put(self._deflate.flush())

    def _content(self, source: BinaryIO, entry: File, room: int) -> int:
        """What is in a file; of a log that grows all the time, what there was at one moment."""
        for tries_left in reversed(range(_TRIES)):
            status = os.fstat(source.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise TreeError(f"{names.shown(entry.path)} was replaced while it was captured; try again")
            size = status.st_size
            if size > room:
                raise TreeError(f"{names.shown(entry.path)} grew beyond what code may have while it was captured")
            head = partial(_header_of, entry.path, status.st_mode)
            if size > _AT_ONCE:
                self._write(head(size))
                left = size
                while left and (chunk := source.read(min(left, 1 << 20))):
                    self._write(chunk)
                    left -= len(chunk)
                if left:
                    break  # it has become shorter, and its length is written already
                self._write(_padding(size))
                self.files += 1
                return size
            source.seek(0)
            content = source.read(size)
            if not tries_left or (len(content) == size and not _changed(source, status)):
                self._write(head(len(content)) + content + _padding(len(content)))
                self.files += 1
                return len(content)
        raise TreeError(
            f"{names.shown(entry.path)} changes while it is captured: try again when it is finished, or name it in "
            ".gitignore or in code.exclude of the config"
        )

    def _write(self, plain: bytes) -> None:
        self.plain_bytes += len(plain)
        self._hash.update(plain)
        self._put(self._deflate.compress(plain))

    def _put(self, compressed: bytes) -> None:
        self.bytes += len(compressed)
        self._out.write(compressed)


class _Reader:
    def __init__(self, source: FileIO, config: CodeConfig, take: Take) -> None:
        self._stream = Inflated(source, config.most_bytes + 2 * config.most_files * _PER_ENTRY + tarfile.RECORDSIZE)
        self._config = config
        self._take = take
        self._files: dict[str, KeptFile] = {}
        self._links: dict[str, Link] = {}
        self._folders: dict[str, None] = {}
        self._room = config.most_bytes

    def manifest(self) -> Manifest:
        last = ""
        while (entry := self._next()) is not None:
            path = entry if isinstance(entry, str) else entry.path
            self._place(path, last)
            self._enter(path, entry)
            last = path
        if self._stream.rest(tarfile.RECORDSIZE).strip(b"\0"):
            raise StreamError("has something after its end")
        for link in self._links.values():
            self._leads_inside(link)
        return Manifest(
            digest=self._stream.digest(),
            archive_bytes=self._stream.compressed_bytes,
            files=tuple(self._files.values()),
            links=tuple(self._links.values()),
            folders=tuple(self._folders),
        )

    def _next(self) -> Entry | None:
        block = self._stream.exactly(_BLOCK)
        if block == _END[:_BLOCK]:
            if self._stream.exactly(_BLOCK) != block:
                raise StreamError("is damaged")
            return None
        info, head, names_of = _parsed(block), block, {}
        if info.type == tarfile.XHDTYPE:
            if not 0 < info.size <= _LONGEST_NAMES:
                raise StreamError("has an extended header that is too large")
            extended = self._stream.exactly(info.size + len(_padding(info.size)))
            names_of = _records(extended[: info.size])
            block = self._stream.exactly(_BLOCK)
            info, head = _parsed(block), head + extended + block
        path = names_of.get("path", info.name)
        if info.type == tarfile.DIRTYPE:
            path = path.removesuffix("/")
        if reason := names.problem(path):
            raise StreamError(f"holds a file that no version may have: {reason} ({names.shown(path)})")
        entry = _entry(info, path, names_of.get("linkpath", info.linkname))
        if head != _header(entry):
            raise StreamError(f"has a header that evertrain does not write, of {names.shown(path)}")
        return entry

    def _place(self, path: str, last: str) -> None:
        if path in self._files or path in self._links or path in self._folders:
            raise StreamError(f"holds {names.shown(path)} twice")
        parent = dirname(path)
        if parent and parent not in self._folders:
            what = "a link" if parent in self._links else "a file" if parent in self._files else "no folder of it"
            raise StreamError(f"holds {names.shown(path)}, but {names.shown(parent)} is {what}")
        if path < last:
            raise StreamError(f"holds {names.shown(path)} out of order")

    def _enter(self, path: str, entry: Entry) -> None:
        leaves = len(self._files) + len(self._links)
        if max(leaves + (entry != path), len(self._folders) + (entry == path)) > self._config.most_files:
            raise StreamError(f"holds more than {self._config.most_files:,} files")
        if isinstance(entry, str):
            self._folders[entry] = None
            self._take(entry, iter(()))
        elif isinstance(entry, Link):
            self._links[path] = entry
            self._take(entry, iter(()))
        else:
            self._room -= entry.bytes
            if self._room < 0:
                raise StreamError(f"holds more than {self._config.most_bytes:,} bytes")
            content = _Hashed(self._stream.chunks(entry.bytes))
            self._take(entry, content)
            for _ in content:
                pass
            if self._stream.exactly(-entry.bytes % _BLOCK).strip(b"\0"):
                raise StreamError("is damaged")
            self._files[path] = KeptFile(
                path=path, bytes=entry.bytes, executable=entry.executable, sha256=content.hash.hexdigest()
            )

    def _leads_inside(self, link: Link) -> None:
        where = f"{names.shown(link.path)} -> {names.shown(link.target)}"
        folder = dirname(link.path)
        # `..` only at the beginning, out of folders of the archive: after another name it depends on what that is
        if link.target.startswith("/") or normpath(link.target) != link.target:
            raise StreamError(f"holds a link that does not simply lead into it: {where}")
        reached = normpath(f"{folder}/{link.target}") if folder else link.target
        if reached == ".." or reached.startswith("../"):
            raise StreamError(f"holds a link that leads out of it: {where}")
        if reached != "." and (reason := names.problem(reached)):
            raise StreamError(f"holds a link to what no version may have: {reason} ({where})")
        while reached not in ("", "."):
            if reached in self._links:
                raise StreamError(f"holds a link that leads through another: {where}")
            reached = dirname(reached)


class _Hashed:
    def __init__(self, chunks: Iterator[bytes]) -> None:
        self.hash = hashlib.sha256()
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        chunk = next(self._chunks)
        self.hash.update(chunk)
        return chunk


def info_of(entry: Entry) -> tarfile.TarInfo:
    """How the entry stands in an archive."""
    info = tarfile.TarInfo(entry if isinstance(entry, str) else entry.path)
    info.mtime = TIME
    info.mode = 0o755
    if isinstance(entry, str):
        info.type = tarfile.DIRTYPE
    elif isinstance(entry, Link):
        info.type, info.linkname = tarfile.SYMTYPE, entry.target
    else:
        info.size = entry.bytes
        info.mode = 0o755 if entry.executable else 0o644
    return info


def _header(entry: Entry) -> bytes:
    return info_of(entry).tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


def _parsed(block: bytes) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        raise StreamError("is damaged") from None


def _records(extended: bytes) -> dict[str, str]:
    """`length key=value`, each with a newline at its end; the length counts the whole record."""
    found: dict[str, str] = {}
    while extended:
        length, space, _ = extended[:8].partition(b" ")
        if not space or not length.isdigit() or not len(length) + 3 < int(length) <= len(extended):
            raise StreamError("has an extended header that is damaged")
        record, extended = extended[len(length) + 1 : int(length)], extended[int(length) :]
        key, _, value = record.removesuffix(b"\n").partition(b"=")
        if key not in (b"path", b"linkpath") or key.decode() in found:
            raise StreamError(f"has an extended header with {names.shown(key.decode('ascii', 'replace'), 40)!r} in it")
        found[key.decode()] = value.decode("utf-8", "surrogateescape")
    return found


def _entry(info: tarfile.TarInfo, path: str, target: str) -> Entry:
    shown = names.shown(path)
    if info.mode & ~0o777:
        raise StreamError(f"holds {shown} with setuid, setgid or sticky bits")
    if info.type == tarfile.DIRTYPE:
        return path
    if info.type == tarfile.SYMTYPE:
        return Link(path=path, target=target)
    if info.type != tarfile.REGTYPE:
        what = {
            tarfile.LNKTYPE: "a hard link",
            tarfile.CHRTYPE: "a device",
            tarfile.BLKTYPE: "a device",
            tarfile.FIFOTYPE: "a named pipe",
            tarfile.GNUTYPE_SPARSE: "a sparse file",
        }.get(info.type, f"an entry of the unknown type {info.type!r}")
        raise StreamError(f"holds {what}: {shown}")
    if info.size < 0:
        raise StreamError("is damaged")
    return File(path=path, bytes=info.size, executable=info.mode == 0o755)


def _header_of(path: str, mode: int, size: int) -> bytes:
    return _header(File(path=path, bytes=size, executable=bool(mode & stat.S_IXUSR)))


def _changed(source: BinaryIO, before: os.stat_result) -> bool:
    after = os.fstat(source.fileno())
    return (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns)


def _at_once(path: str, flags: int) -> int:
    # never waits for the other end of a named pipe
    return os.open(path, flags | os.O_NONBLOCK)


def _no_link(path: str, flags: int) -> int:
    return _at_once(path, flags | os.O_NOFOLLOW)
