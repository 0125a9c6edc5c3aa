"""What did the user give us to read? Sorts documents into lines, stacks, recordings, reports and facts.

Logs and kernel messages pass through a sieve block by block, whatever their size. Dumps of stacks, flight recorders and
NCCL RAS are small and read whole; of trace rings only what was written last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from evertrain.detect.prefixes import looks_like_host
from evertrain.detect.sieve import Sieve
from evertrain.locate import flight, ras, recorder
from evertrain.model.findings import Finding
from evertrain.model.recording import Recordings
from evertrain.model.signals import Signals
from evertrain.observe.documents import HEAD_BYTES, Document
from evertrain.trace import layout

MAX_DUMP_BYTES = 64 << 20
"""Of a file that is read whole."""
MAX_DUMPS_BYTES = 512 << 20
"""Of all of them together."""

_STACK = re.compile(
    rb"\s*(?:Process \d+: |(?:Current )?[Tt]hread (?:0x[0-9a-f]+|\d+) \(|Timeout \(\d|#0 +(?:0x[0-9a-f]+ in )?\w+ ?\("
    rb"|\[New LWP|\[\s*\{\s*\"pid\"|Error: Failed to suspend process)"
)
_PROCESS = re.compile(r"(?m)^(?=Process \d+: )")
_KERNEL_NAME = re.compile(
    r"(?:dmesg|kmsg|kern(?:el)?|syslog|messages|journal)[-_.](?P<after>[\w-]+)|(?P<before>[\w-]+?)[-_.](?:dmesg|kmsg|kern(?:el)?|syslog|messages|journal)\b"
)
_KERNEL_ONLY = re.compile(r"(?:dmesg|kmsg|kern(?:el)?|syslog|messages|journal)(?:\.\w+)*$")
_RANK_NAME = re.compile(r"rank[-_]?(\d{1,6})(?!\d)", re.IGNORECASE)


class Pile:
    """What was read, by kind. `host`: where lines that name none were collected."""

    def __init__(self, sieve: Sieve, *, host: str | None = None) -> None:
        self.sieve = sieve
        self._host = host
        self.kinds: Counter[str] = Counter()
        self.unreadable: list[str] = []
        self.findings: tuple[Finding, ...] = ()
        self._stacks: dict[str, str] = {}
        self._ras: list[str] = []
        self._metrics: dict[str, Any] = {}
        self._recordings: list[Recordings] = []
        self._rings: list[Path] = []
        self._dump_bytes = 0

    def take(self, documents: Iterable[Document]) -> None:
        """Read all of them, in order."""
        for document in documents:
            self._take(document)
        if self._recordings:
            self.findings = flight.judge(recorder.together(self._recordings))
        if self._rings:
            self.findings += self._remains()

    def _take(self, document: Document) -> None:
        name, head = document.path, document.head
        if not head:
            self.count("empty file")
            return
        if head.startswith(layout.MAGIC):
            self._rings.append(Path(name))
            self.count("trace ring")
            return
        if _may_be_dump(head):
            whole, size = [head], len(head)
            for block in document.rest:
                whole.append(block)
                size += len(block)
                if size > MAX_DUMP_BYTES:
                    break
            data = b"".join(whole)
            if recorder.is_pickle(head) and not self._has_room(name, size):
                return
            if size <= MAX_DUMP_BYTES and self._take_dump(name, data):
                return
            head = data
        elif _is_binary(head):
            self.refuse(name, "neither text nor a dump that we know")
            return
        self.count("log")
        file = Path(name)
        rank = _RANK_NAME.search(file.name)
        self.sieve.begin(
            "stdin" if name == "-" else file.name,
            host=_host_of(file) or self._host,
            rank=int(rank[1]) if rank else None,
        )
        self.sieve.feed(head)
        for block in document.rest:
            self.sieve.feed(block)
        self.sieve.end()

    @property
    def signals(self) -> Signals:
        """All but the lines, which the sieve has."""
        return Signals(stacks=self._stacks, ras=tuple(self._ras), metrics=self._metrics)

    def count(self, kind: str) -> None:
        self.kinds[kind] += 1

    def refuse(self, name: str, reason: object) -> None:
        self.unreadable.append(f"{name}: {' '.join(str(reason).split())[:300]}")

    def _remains(self) -> tuple[Finding, ...]:
        from evertrain.trace import remains, scene

        found = scene.of_files(self._rings)
        self.unreadable += found.problems
        return remains.judge(found)

    def _take_dump(self, name: str, data: bytes) -> bool:
        """Whether these bytes were a dump that is read whole."""
        head = data[:HEAD_BYTES]
        if recorder.is_pickle(data):
            self._take_recording(name, data)
        elif _STACK.match(head):
            self._take_stacks(name, data.decode(errors="replace"))
        elif ras.is_report(head.decode(errors="replace")):
            self._ras += data.decode(errors="replace").splitlines()
            self.count("RAS report")
        elif head.lstrip()[:1] in (b"{", b"[") and (content := _json(data)) is not None:
            return self._take_json(name, data, content)
        else:
            return False
        return True

    def _take_recording(self, name: str, data: bytes) -> None:
        try:
            self._recordings.append(recorder.read(data, recorder.rank_of(Path(name).name)))
            self.count("flight recorder dump")
        except ValueError as error:
            self.refuse(name, error)

    def _take_stacks(self, name: str, text: str) -> None:
        parts = [part for part in _PROCESS.split(text) if part.strip()]
        for part in parts:
            pid = re.match(r"Process (\d+)", part)
            self._stacks[f"{name}#{pid[1]}" if pid and len(parts) > 1 else name] = part
        self.count("stack dump")

    def _take_json(self, name: str, data: bytes, content: Any) -> bool:
        is_dump = isinstance(content, dict) and ("entries" in content or "per_rank" in content)
        is_list = isinstance(content, list) and content and isinstance(content[0], dict)
        if is_dump or (is_list and "collective_seq_id" in content[0]):
            self._take_recording(name, data)
        elif isinstance(content, dict) and not {"message", "msg", "log"} & content.keys():
            self._metrics.update(content.get("metrics", content))
            self.count("file of facts")
        else:
            return False
        return True

    def _has_room(self, name: str, size: int) -> bool:
        self._dump_bytes += size
        if size > MAX_DUMP_BYTES or self._dump_bytes > MAX_DUMPS_BYTES:
            self.refuse(name, f"a dump of {size >> 20} MiB: more than is read")
            return False
        return True


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


def _is_binary(head: bytes) -> bool:
    """Text has hardly any control characters; UTF-16 has a mark at its beginning."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return False
    odd = sum(map(head.count, (bytes([code]) for code in (*range(9), *range(14, 27), *range(28, 32)))))
    return odd * 20 > len(head)


def _host_of(path: Path) -> str | None:
    """Kernel messages are collected per host, and their files named after it."""
    if named := _KERNEL_NAME.match(path.name):
        name = named["after"] or named["before"]
        return name if looks_like_host(name) else None
    if _KERNEL_ONLY.match(path.name) and looks_like_host(path.parent.name):
        return path.parent.name
    return None
