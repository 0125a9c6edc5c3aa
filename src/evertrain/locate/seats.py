"""Whose dump is it? What the names of dumps and files say about rank and host."""

from __future__ import annotations

import re

import msgspec

from evertrain.detect.prefixes import looks_like_host


class Seat(msgspec.Struct, frozen=True):
    """Whose dump it is, as far as its name tells."""

    label: str
    rank: int | None = None
    local: int | None = None
    host: str | None = None
    is_helper: bool = False
    """A data loader's worker, a checkpoint writer: not a rank itself."""

    @property
    def culprit(self) -> int | str:
        if self.rank is not None:
            return self.rank
        return f"{self.host}/local{self.local}" if self.host and self.local is not None else self.label

    @property
    def name(self) -> str:
        return f"rank {self.rank}" if self.rank is not None else str(self.culprit)


_RANK = re.compile(r"(?:^|[^a-z])(?:global[_ -]?)?rank[ _=:#-]*(\d{1,6})", re.IGNORECASE)
_LOCAL = re.compile(r"local(?:[_ -]?rank)?[ _=:#-]*(\d{1,6})", re.IGNORECASE)
_HELPER = re.compile(
    r"worker(?!s?[-_]?\d+[/:_-](?:rank|local))|loader|writer|child|helper|pin[_ ]?memory", re.IGNORECASE
)
_PROCESS = re.compile(r"#\d+$")
_EXTENSION = re.compile(r"\.(?:txt|log|out|err|json|dump|stack|stacks|trace|pyspy|bt|gdb|gz|bz2|xz)$", re.IGNORECASE)
_ABOUT_DUMPS = re.compile(
    r"\b(?:py-?spy|stacks?(?:trace)?|dump(?:ed)?|trace(?:back)?s?|gdb|faulthandler|pid[ _=:-]*\d+|\d{6,})\b",
    re.IGNORECASE,
)


def seat(label: str) -> Seat:
    """What a dump's name says: `rank0`, `node-06/rank0`, `node-03/local0`, `dumps/node-7_rank3.txt`, `12`, or nothing.

    One of several processes of a file may have its number behind: `node-7.txt#4711`.
    """
    stem, is_path = _PROCESS.sub("", label), label.startswith(("/", "."))
    while found := _EXTENSION.search(stem):
        stem, is_path = stem[: found.start()], True
    above, _, stem = stem.rpartition("/")
    above = above.rpartition("/")[2]
    local = _LOCAL.search(stem)
    without_local = f"{stem[: local.start()]} {stem[local.end() :]}" if local else stem
    rank = _RANK.search(without_local) or (_RANK.search(above) if local is None else None)
    number = re.fullmatch(r"\s*(\d{1,5})\s*", stem)
    rest = re.sub(r"[_\s]+", " ", _RANK.sub(" ", without_local))
    rest = _ABOUT_DUMPS.sub(" ", rest).strip(" -_.:/=,")
    host = rest if looks_like_host(rest) and not number else None
    if host is None and above and not _RANK.search(above) and (not is_path or looks_like_host(above)):
        host = above
    return Seat(
        stem if is_path else label,
        int(rank[1]) if rank else int(number[1]) if number else None,
        int(local[1]) if local else None,
        host,
        bool(_HELPER.search(stem)),
    )
