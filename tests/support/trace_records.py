"""Records whose every field follows from their number, so that a reader's copy can be compared byte by byte."""

from __future__ import annotations

from evertrain.trace import layout

CAPACITY, TABLE = 37, 5
_M = 0xFFFFFFFF


def body(number: int, kind: str) -> bytes:
    """All of a record but its tail."""
    return layout.OPERATION_STRUCT.pack(
        number, layout.KINDS[kind], 1, 2, 3, number & 0xFFFF, -3, number & 0x7FFF, -(number & 0x7FFF), number * 3,
        number * 5, number * 7, number * 11, number * 13, number * 17, number * 19, number * 23,
        *[(number * factor) & _M for factor in (1, 29, 31, 37, 41, 43, 47)], 5, 6, number & 0xFFFF,
    )  # fmt: skip
