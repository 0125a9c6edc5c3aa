"""What is this file, and what stands in it? Files, folders and standard input, read with bounds.

Logs and kernel messages pass through a sieve block by block, whatever their size. Dumps of stacks, flight recorders and
NCCL RAS are small and read whole. What cannot be read is named in one line and stops nothing.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import stat
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from evertrain.detect.prefixes import looks_like_host
from evertrain.detect.sieve import Sieve
from evertrain.locate import flight, ras, recorder
from evertrain.model.findings import Finding
from evertrain.model.signals import Signals

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
MAX_DUMP_BYTES = 64 << 20
"""Of a file that is read whole."""
MAX_DUMPS_BYTES = 512 << 20
"""Of all of them together."""
MAX_FILES = 50_000
MAX_GROWTH = 200
"""Compressed logs shrink to a tenth, repeated ones to a hundredth; a bomb grows a thousandfold."""
FREE_GROWTH_BYTES = 64 << 20
"""Up to here any growth is believed."""

_COMPRESSED = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_STACK = re.compile(
    rb"\s*(?:Process \d+: |(?:Current )?[Tt]hread (?:0x[0-9a-f]+|\d+) \(|Timeout \(\d|#0 +(?:0x[0-9a-f]+ in )?\w+ ?\(|\[New LWP|\[\s*\{\s*\"pid\"|Error: Failed to suspend process)"
)
_PROCESS = re.compile(r"(?m)^(?=Process \d+: )")
_KERNEL_NAME = re.compile(
    r"(?:dmesg|kmsg|kern(?:el)?|syslog|messages|journal)[-_.](?P<after>[\w-]+)|(?P<before>[\w-]+?)[-_.](?:dmesg|kmsg|kern(?:el)?|syslog|messages|journal)\b"
)
_KERNEL_ONLY = re.compile(r"(?:dmesg|kmsg|kern(?:el)?|syslog|messages|journal)(?:\.\w+)*$")
_RANK_NAME = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)


class Found:
    """What was read, by kind."""

    def __init__(self, sieve: Sieve) -> None:
        self.sieve = sieve
        self.kinds: Counter[str] = Counter()
        self.unreadable: list[str] = []
        self.findings: tuple[Finding, ...] = ()
        self._stacks: dict[str, str] = {}
        self._ras: list[str] = []
        self._metrics: dict[str, Any] = {}
        self._recordings: list[recorder.Recordings] = []
        self._dump_bytes = 0

    @property
    def signals(self) -> Signals:
        """All but the lines, which the sieve has."""
        return Signals(stacks=self._stacks, ras=tuple(self._ras), metrics=self._metrics)

    def count(self, kind: str) -> None:
        self.kinds[kind] += 1

    def refuse(self, name: str, reason: object) -> None:
        self.unreadable.append(f"{name}: {' '.join(str(reason).split())[:300]}")

    def take_dump(self, name: str, data: bytes) -> bool:
        """Whether these bytes were a dump that is read whole."""
        head = data[:HEAD_BYTES]
        if recorder.is_pickle(data):
            self._take_recording(name, data)
        elif _STACK.match(head):
            self._take_stacks(name, data.decode(errors="replace"))
        elif ras.is_report(head.decode(errors="replace")):
            self._ras += data.decode(errors="replace").splitlines()
            self.count("RAS reports")
        elif head.lstrip()[:1] in (b"{", b"[") and (content := _json(data)) is not None:
            return self._take_json(name, data, content)
        else:
            return False
        return True

    def _take_recording(self, name: str, data: bytes) -> None:
        try:
            self._recordings.append(recorder.read(data, recorder.rank_of(Path(name).name)))
            self.count("flight recorder dumps")
        except ValueError as error:
            self.refuse(name, error)

    def _take_stacks(self, name: str, text: str) -> None:
        parts = [part for part in _PROCESS.split(text) if part.strip()]
        for part in parts:
            pid = re.match(r"Process (\d+)", part)
            self._stacks[f"{name}#{pid[1]}" if pid and len(parts) > 1 else name] = part
        self.count("stack dumps")

    def _take_json(self, name: str, data: bytes, content: Any) -> bool:
        is_dump = isinstance(content, dict) and ("entries" in content or "per_rank" in content)
        is_list = isinstance(content, list) and content and isinstance(content[0], dict)
        if is_dump or (is_list and "collective_seq_id" in content[0]):
            self._take_recording(name, data)
        elif isinstance(content, dict) and not {"message", "msg", "log"} & content.keys():
            self._metrics.update(content.get("metrics", content))
            self.count("files of facts")
        else:
            return False
        return True

    def has_room(self, name: str, size: int) -> bool:
        self._dump_bytes += size
        if size > MAX_DUMP_BYTES or self._dump_bytes > MAX_DUMPS_BYTES:
            self.refuse(name, f"a dump of {size >> 20} MiB: more than is read")
            return False
        return True

    def finish(self) -> None:
        if self._recordings:
            self.findings = flight.judge(recorder.together(self._recordings))


def read(paths: Iterable[str], sieve: Sieve, *, host: str | None = None) -> Found:
    """Everything below these paths; `-` is standard input. `host`: where lines that name none were collected."""
    found = Found(sieve)
    for name in paths:
        if name == "-":
            _read_stream(found, "-", sys.stdin.buffer, None, host)
            continue
        for path in _files(found, Path(name)):
            try:
                _read_file(found, path, host)
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else error
                found.refuse(str(path), reason or type(error).__name__)
    found.finish()
    return found


def _files(found: Found, path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    count = 0
    for folder, below, names in os.walk(path, onerror=lambda error: found.refuse(str(error.filename), error.strerror)):
        below.sort()
        for name in sorted(names):
            count += 1
            if count > MAX_FILES:
                found.refuse(str(path), f"more than {MAX_FILES} files: the rest is not read")
                return
            yield Path(folder, name)


def _read_file(found: Found, path: Path, host: str | None) -> None:
    if not stat.S_ISREG(path.stat().st_mode):
        # a pipe or a device may never end
        found.refuse(str(path), "no regular file")
        return
    host = _host_of(path) or host
    with path.open("rb") as raw:
        magic = raw.read(6)
    for beginning, opened in _COMPRESSED.items():
        if magic.startswith(beginning):
            with opened(path, "rb") as stream:
                _read_stream(found, str(path), stream, path.stat().st_size, host)
            return
    with path.open("rb") as stream:
        _read_stream(found, str(path), stream, None, host)


def _read_stream(found: Found, name: str, stream: IO[bytes], compressed: int | None, host: str | None) -> None:
    """`compressed`: size before unpacking, for streams that grow."""
    head = stream.read(HEAD_BYTES)
    if not head:
        found.count("empty files")
        return
    if _may_be_dump(head):
        rest = stream.read(MAX_DUMP_BYTES)
        if _grows_too_much(len(head) + len(rest), compressed):
            found.refuse(name, f"expands more than {MAX_GROWTH} times: not read")
            return
        if recorder.is_pickle(head) and not found.has_room(name, len(head) + len(rest)):
            return
        head += rest
        if found.take_dump(name, head):
            return
    elif head.count(0) * 10 > len(head) and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        found.refuse(name, "neither text nor a dump that we know")
        return
    found.count("logs")
    rank = _RANK_NAME.search(Path(name).name)
    mark = Path(name).name if name != "-" else "stdin"
    found.sieve.begin(mark, host=host, rank=int(rank[1]) if rank else None)
    size = 0
    block = head
    while block:
        size += len(block)
        if _grows_too_much(size, compressed):
            found.refuse(name, f"expands more than {MAX_GROWTH} times: read up to there")
            break
        found.sieve.feed(block)
        block = stream.read(BLOCK_BYTES)
    found.sieve.end()


def _may_be_dump(head: bytes) -> bool:
    return (
        recorder.is_pickle(head)
        or bool(_STACK.match(head))
        or head.lstrip()[:1] in (b"{", b"[")
        or ras.is_report(head.decode(errors="replace"))
    )


def _json(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None


def _grows_too_much(size: int, compressed: int | None) -> bool:
    return compressed is not None and size > FREE_GROWTH_BYTES and size > MAX_GROWTH * max(1, compressed)


def _host_of(path: Path) -> str | None:
    """Kernel messages are collected per host, and their files named after it."""
    if named := _KERNEL_NAME.match(path.name):
        name = named["after"] or named["before"]
        return name if looks_like_host(name) else None
    if _KERNEL_ONLY.match(path.name) and looks_like_host(path.parent.name):
        return path.parent.name
    return None
