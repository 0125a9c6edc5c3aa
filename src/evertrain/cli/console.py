"""What of the ranks' output comes to the console? torchrun's `--redirects`, `--tee` and `--local-ranks-filter`.

Every rank writes to files. A stream reaches the console as it is, with a prefix (teed), or not at all (redirected, or
its local rank filtered out).
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from string import Template
from typing import Literal

from evertrain.model.errors import UsageError

Stream = Literal["stdout", "stderr"]
_BIT = {"stdout": 1, "stderr": 2}
_ONE = re.compile(r"[0-3]")
_EACH = re.compile(r"(\d+:[0-3],)*\d+:[0-3]")


class Show(Enum):
    PLAIN = "bytes as they come"
    PREFIXED = "whole lines, each with the rank's prefix"
    HIDDEN = "in the file only"


@dataclass(frozen=True)
class Streams:
    """The value of `--redirects` or `--tee`: which streams of which local ranks."""

    everywhere: int = 0
    by_rank: Mapping[int, int] | None = None

    def holds(self, local_rank: int, stream: Stream) -> bool:
        bits = self.everywhere if self.by_rank is None else self.by_rank.get(local_rank, 0)
        return bool(bits & _BIT[stream])


@dataclass(frozen=True)
class Console:
    """What is shown, and how."""

    redirects: Streams = Streams()
    tee: Streams = Streams()
    only: frozenset[int] | None = None
    """Local ranks that are shown; None: all."""
    role: str = "default"
    template: str | None = None
    """`TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE`."""
    keep_stdout: tuple[str, ...] = ()
    """Teed lines that hold one of these go to filtered_stdout.log as well."""
    keep_stderr: tuple[str, ...] = ()

    def show(self, local_rank: int, stream: Stream) -> Show:
        if self.only is not None and local_rank not in self.only:
            return Show.HIDDEN
        if self.tee.holds(local_rank, stream):
            return Show.PREFIXED
        return Show.HIDDEN if self.redirects.holds(local_rank, stream) else Show.PLAIN

    def prefix(self, rank: int, local_rank: int) -> bytes:
        if self.template is None:
            return f"[{self.role}{local_rank}]:".encode()
        names = {"role_name": self.role, "rank": str(rank), "local_rank": str(local_rank)}
        return Template(self.template).safe_substitute(names).encode()

    def kept(self, stream: Stream) -> tuple[bytes, ...]:
        return tuple(text.encode() for text in (self.keep_stdout if stream == "stdout" else self.keep_stderr))


def from_flags(args: Namespace, environ: Mapping[str, str]) -> Console:
    return Console(
        redirects=_streams("--redirects", args.redirects),
        tee=_streams("--tee", args.tee),
        only=_only(args.local_ranks_filter),
        role=args.role,
        template=environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or None,
        keep_stdout=tuple(args.duplicate_stdout_filters),
        keep_stderr=tuple(args.duplicate_stderr_filters),
    )


def _streams(flag: str, text: str) -> Streams:
    if _ONE.fullmatch(text):
        return Streams(int(text))
    if _EACH.fullmatch(text):
        pairs = (part.split(":") for part in text.split(","))
        return Streams(by_rank={int(rank): int(bits) for rank, bits in pairs})
    raise UsageError(f"{flag} {text!r}: 0 to 3 (1 stdout, 2 stderr, 3 both), or LOCAL_RANK:STREAMS as 0:1,1:3")


def _only(text: str) -> frozenset[int] | None:
    if not text:
        return None
    try:
        return frozenset(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--local-ranks-filter {text!r}: local ranks, as 0,1,2") from None
