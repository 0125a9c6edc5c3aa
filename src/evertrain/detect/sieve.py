"""What matters in a pile of lines? Reads blocks of any size in one pass and keeps only what some rule may want.

Memory is bounded whatever comes in: each rule keeps its first findings and counts the rest, lines are cut, and lines
that no rule names are never made into objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from evertrain.detect import launcher, nic, prefixes, timeouts, tracebacks, xid
from evertrain.detect.catalogue import Catalogue
from evertrain.detect.gate import gate
from evertrain.model.findings import Finding
from evertrain.model.signals import Line

MAX_LINE = 8192
"""Bytes of a line that are looked at: what a failure says stands at its beginning."""
MAX_EACH = 2000
"""Findings that one rule keeps."""
MAX_ALIKE = 4000
"""Lines with the same text but for their numbers: a failing kernel can print millions."""
MAX_SHAPES = 50_000
_WORDS = frozenset(word for reader in (launcher, nic, timeouts, tracebacks, xid) for word in reader.WORDS)


class Sieve:
    """Feed blocks or lines, source after source; then ask for `findings`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._gate = gate(catalogue.words | _WORDS)
        self._nic_words, self._timeout_words, self._xid_words = nic.WORDS, timeouts.WORDS, xid.WORDS
        self._kernel = xid.Kernel()
        self._ends = launcher.Ends()
        self._tracebacks = tracebacks.Tracebacks()
        self._nic_lines: list[Line] = []
        self._timeout_lines: list[Line] = []
        self._found: list[Finding] = []
        self._count: Counter[str] = Counter()
        self._source, self._host, self._rank = "", None, None
        self._first = 0
        self._alike: dict[int, int] = {}
        self._rest = b""
        self._skipping = False
        self.lines = 0
        self.looked = 0

    _host: str | None
    _rank: int | None

    def begin(self, source: str, *, host: str | None = None, rank: int | None = None) -> None:
        """What is fed now comes from here; `host` and `rank` are of lines that name none."""
        self._source, self._host, self._rank, self._first = source, host, rank, self.lines

    def feed_lines(self, lines: Iterable[str], *, host: str | None = None) -> None:
        """Lines that are in memory."""
        self.begin("", host=host)
        for raw in lines:
            self.lines += 1
            if self._gate.search(raw.lower().encode(errors="replace")):
                self._look(raw[:MAX_LINE], self.lines)

    def feed(self, block: bytes) -> None:
        """A piece of the source; pieces may end anywhere."""
        if self._skipping:
            _, newline, block = block.partition(b"\n")
            self.lines += bool(newline)
            self._skipping = not newline
            if not newline:
                return
        data = self._rest + block
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        if len(self._rest) > 4 * MAX_LINE:
            # a line without an end: its beginning is enough
            self._block(data[:end] + self._rest[:MAX_LINE] + b"\n")
            self.lines -= 1
            self._rest, self._skipping = b"", True
        else:
            self._block(data[:end])

    def end(self) -> None:
        """The source is over; its last line may have no end."""
        if self._rest:
            self._block(self._rest + b"\n")
        self._rest, self._skipping = b"", False

    def _block(self, data: bytes) -> None:
        low = data.lower()
        at, counted, number = 0, 0, self.lines
        while found := self._gate.search(low, at):
            start = low.rfind(b"\n", 0, found.start()) + 1
            end = low.find(b"\n", found.end())
            end = len(low) if end < 0 else end
            number += low.count(b"\n", counted, start)
            counted = start
            line = data[start : min(end, start + MAX_LINE)]
            if self._is_news(line):
                self._look(line.decode(errors="replace"), number + 1)
            at = end + 1
        self.lines = number + low.count(b"\n", counted)

    def _is_news(self, line: bytes) -> bool:
        """Lines that differ in numbers only are looked at so often, and then no more."""
        shape = hash(line.translate(None, b"0123456789"))
        seen = self._alike.get(shape, 0) + 1
        if seen > 1 or len(self._alike) < MAX_SHAPES:
            self._alike[shape] = seen
        return seen <= MAX_ALIKE

    def _look(self, raw: str, order: int) -> None:
        self.looked += 1
        raw = raw.rstrip("\r\n")
        origin = prefixes.origin(raw)
        line = Line(
            text=origin.text, raw=raw, order=order,
            place=f"{self._source}:{order - self._first}" if self._source else "",
            host=origin.host or self._host, rank=origin.rank if origin.rank is not None else self._rank,
            clock=prefixes.clock(raw), stream=f"{self._source}|{prefixes.stream(raw, origin.text)}",
        )  # fmt: skip
        low = raw.lower()
        if any(word in low for word in self._xid_words) and self._room("xid"):
            self._kernel.read(line)
        if any(word in low for word in self._nic_words) and self._room("nic"):
            self._nic_lines.append(line)
        if any(word in low for word in self._timeout_words) and self._room("timeouts"):
            self._timeout_lines.append(line)
        if self._room("ends"):
            self._ends.read(line)
        if len(self._tracebacks.found) < MAX_EACH:
            self._tracebacks.read(line)
        for finding in self._catalogue.look_at(line):
            if self._room(finding.rule):
                self._found.append(finding)

    def _room(self, name: str) -> bool:
        self._count[name] += 1
        return self._count[name] <= MAX_EACH if name != "ends" else len(self._ends.ends) < MAX_EACH

    def ends(self) -> tuple[launcher.End, ...]:
        return tuple(self._ends.ends)

    def findings(self, *, exitcode: int | None, host: str | None) -> tuple[Finding, ...]:
        """All that the lines say. `host`: where lines of the kernel that name none were collected."""
        ends = self.ends()
        died = bool(ends) or bool(exitcode) or bool(self._tracebacks.found)
        died = died or any(not finding.is_benign for finding in self._found)
        return (
            *self._found,
            *xid.judge(self._kernel.events, job_died=died, host=host),
            *nic.judge(self._nic_lines, host=host),
            *timeouts.judge(self._timeout_lines),
            *tracebacks.judge(self._tracebacks.found),
            *launcher.judge(ends, exitcode),
        )
