"""What does a rank's output say while it is being written? The streaming form of the sieve, one for each log.

Pieces go in as they are read, findings come out: once each, at most a few of a rule in a minute. Memory and work are
bounded whatever comes: a rank that prints a hundred megabytes, or one line without an end, or the same error in a loop,
costs as much as any other. What has been skipped is counted, and said.

Pure: time comes in as an argument, in seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from evertrain.detect.catalogue import Catalogue
from evertrain.detect.sieve import Sieve
from evertrain.model.findings import Finding

_BLOCK = 16_384
"""Bytes after which is counted what they cost."""


class StreamConfig(msgspec.Struct, frozen=True, kw_only=True):
    bytes_per_s: int = 4_000_000
    """What is looked at; of more, the end, where failures stand."""
    burst_bytes: int = 16_000_000
    lines_per_s: int = 50
    """Lines that some rule may want, which are looked at closely; an error in a loop is known after a few."""
    burst_lines: int = 1_000
    tail_bytes: int = 8_192
    """What is looked at of a piece that came when nothing was left to spend."""
    settle_s: float = 1.0
    """A line without an end is taken as it stands after this silence: the last words of a process have none."""
    judge_every_s: float = 0.5
    """Findings are drawn at most this often."""
    same_rule: int = 5
    """Findings of one rule within `window_s`; more are counted only."""
    window_s: float = 60.0
    lines_kept: int = 1_000
    """Lines that mattered, after which they are forgotten: a traceback may be cut there, no more."""


class Stream:
    """The output of one rank. `feed` what was read, and call `settle` now and then, also when nothing came."""

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        rank: int | None = None,
        host: str | None = None,
        source: str = "",
        config: StreamConfig | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._rank, self._host, self._source = rank, host, source
        self._config = config or StreamConfig()
        self._sieve = self._new_sieve()
        self._bytes_left = float(self._config.burst_bytes)
        self._lines_left = float(self._config.burst_lines)
        self._earned_at: float | None = None
        self._fed_at = 0.0
        self._has_open_line = False
        self._ended_with_return = False
        self._judged_at = float("-inf")
        self._judged_lines = 0
        self._told: OrderedDict[object, None] = OrderedDict()
        self._recent: dict[str, list[float]] = {}
        self._held_back: dict[str, int] = {}
        self.skipped_bytes = 0
        """Output that was not looked at because there was too much of it."""

    def feed(self, piece: bytes, now: float) -> tuple[Finding, ...]:
        """The next bytes of the log; they may end anywhere. What they show that was not said before."""
        if piece:
            self._fed_at = now
            self._earn(now)
            self._spend(piece)
        return self._judge(now)

    def settle(self, now: float) -> tuple[Finding, ...]:
        """Time has passed: what waits for its line's end, or its turn, is looked at if it has waited long enough."""
        if self._has_open_line and now - self._fed_at >= self._config.settle_s:
            self._end_line()
        return self._judge(now)

    def rotated(self, now: float) -> tuple[Finding, ...]:
        """The log begins anew: another file, or the same one cut to nothing."""
        self._end_line()
        found = self._judge(now, at_once=True)
        self._renew()
        return found

    def end(self, now: float) -> tuple[Finding, ...]:
        """The process is gone, nothing more will come."""
        self._end_line()
        return self._judge(now, at_once=True)

    def _earn(self, now: float) -> None:
        config, since = self._config, self._earned_at
        self._earned_at = now
        if since is not None and now > since:
            self._bytes_left = min(float(config.burst_bytes), self._bytes_left + (now - since) * config.bytes_per_s)
            self._lines_left = min(float(config.burst_lines), self._lines_left + (now - since) * config.lines_per_s)

    def _spend(self, piece: bytes) -> None:
        """Look at the beginning of a piece while there is something to spend, and at its end in any case."""
        at = 0
        while at < len(piece) and self._bytes_left > 0 and self._lines_left > 0:
            block = piece[at : at + _BLOCK]
            looked = self._sieve.looked
            self._take(block)
            self._bytes_left -= len(block)
            self._lines_left -= self._sieve.looked - looked
            at += len(block)
        if at < len(piece):
            start = max(at, len(piece) - self._config.tail_bytes)
            if start > at:
                self.skipped_bytes += start - at
                self._end_line()
            self._take(piece[start:])

    def _take(self, piece: bytes) -> None:
        # progress bars go back to the line's beginning instead of ending it, and an error is written on the same line;
        # "\r\n", also in two pieces, is one end
        if self._ended_with_return and piece.startswith(b"\n"):
            piece = piece[1:]
        self._ended_with_return = piece.endswith(b"\r")
        piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if piece:
            self._sieve.feed(piece)
            self._has_open_line = not piece.endswith(b"\n")

    def _end_line(self) -> None:
        if self._has_open_line:
            self._sieve.end()
        self._has_open_line = False

    def _judge(self, now: float, *, at_once: bool = False) -> tuple[Finding, ...]:
        config = self._config
        if self._sieve.looked == self._judged_lines or (not at_once and now - self._judged_at < config.judge_every_s):
            return ()
        self._judged_at, self._judged_lines = now, self._sieve.looked
        found = [self._admitted(one, now) for one in self._sieve.findings(exitcode=None, host=self._host)]
        if self._sieve.looked >= config.lines_kept:
            self._renew()
        return tuple(one for one in found if one is not None)

    def _admitted(self, one: Finding, now: float) -> Finding | None:
        """The finding, unless it was said already or its rule has said enough for now."""
        key = (one.rule, one.category, one.action, one.culprit, one.evidence[:1])
        if key in self._told:
            self._told.move_to_end(key)
            return None
        self._told[key] = None
        if len(self._told) > self._config.lines_kept:
            self._told.popitem(last=False)
        recent = [at for at in self._recent.get(one.rule, ()) if now - at < self._config.window_s]
        if len(recent) >= self._config.same_rule:
            self._recent[one.rule] = recent
            self._held_back[one.rule] = self._held_back.get(one.rule, 0) + 1
            return None
        self._recent[one.rule] = [*recent, now]
        if more := self._held_back.pop(one.rule, 0):
            note = f"{more} more like it before"
            one = msgspec.structs.replace(one, note=f"{one.note}; {note}" if one.note else note)
        return one

    def _renew(self) -> None:
        self._sieve = self._new_sieve()
        self._judged_lines = 0

    def _new_sieve(self) -> Sieve:
        sieve = Sieve(self._catalogue)
        sieve.begin(self._source, host=self._host, rank=self._rank)
        return sieve
