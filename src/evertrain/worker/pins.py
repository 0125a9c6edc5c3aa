"""Which saves must a rank leave alone? The node's agent says so in a file that its ranks read before each save.

A backup goes in rounds: all ranks keep one common step until it has been copied elsewhere. The agent cannot know how
far a rank has come, so it asks for the first save at or after a step that lies ahead (`wanted`), looks which one that
is, and names it (`kept`) until it is no longer needed.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

NAME = "pins"
"""The file in a node's slots folder."""
MOST = 4

_BODY = struct.Struct(f"@8s I I qq {2 * MOST}q")
_CRC = struct.Struct("@I")
_MAGIC = b"EVPINS\n\0"
_NONE = -1

Save = tuple[int, int]
"""Attempt and step."""


class Pins(NamedTuple):
    kept: tuple[Save, ...] = ()
    wanted: Save | None = None
    """The first save of this attempt at or after this step stays as well."""

    def of(self, saves: Iterable[Save]) -> frozenset[Save]:
        """Those of a rank's complete saves that must stay."""
        found = set(saves)
        pinned = found & set(self.kept)
        if self.wanted is not None:
            attempt, step = self.wanted
            later = [save for save in found if save[0] == attempt and save[1] >= step]
            pinned |= {min(later)} if later else set()
        return frozenset(pinned)


NOTHING = Pins()


def write(slots_dir: str, pins: Pins) -> None:
    """Replace what the ranks of a node must keep; at most four saves. A single small write: readers see old or new."""
    kept = [number for save in pins.kept[:MOST] for number in save]
    kept += [_NONE] * (2 * MOST - len(kept))
    body = _BODY.pack(_MAGIC, 1, 0, *(pins.wanted or (_NONE, _NONE)), *kept)
    descriptor = os.open(os.path.join(slots_dir, NAME), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, body + _CRC.pack(crc32(body)), 0)
    finally:
        os.close(descriptor)


def read(slots_dir: str) -> Pins | None:
    """What must be kept; nothing where no file is; None where it cannot be read just now."""
    try:
        with open(os.path.join(slots_dir, NAME), "rb", buffering=0) as file:
            raw = file.read(_BODY.size + _CRC.size)
    except FileNotFoundError:
        return NOTHING
    except OSError:
        return None
    if len(raw) != _BODY.size + _CRC.size or _CRC.unpack_from(raw, _BODY.size)[0] != crc32(raw[: _BODY.size]):
        return None
    magic, version, _, attempt, step, *kept = _BODY.unpack_from(raw)
    if (magic, version) != (_MAGIC, 1):
        return None
    saves = zip(kept[::2], kept[1::2], strict=True)
    return Pins(tuple(save for save in saves if save[0] != _NONE), None if attempt == _NONE else (attempt, step))
