"""Reads the pickles that PyTorch's flight recorder writes, and nothing else that a pickle can hold.

A pickle is a program: it may call anything, and even one that calls nothing may ask for all memory there is. So the
program is checked before it is run: dictionaries, lists, pairs, numbers and strings only, none of it longer or deeper
than a dump can be. What passes has no operation left that could import or call.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

# operations of fixed length, in the bytes in which they stand; a memo index above 2^22 would make the reader allocate
# a table for it, a tuple other than a pair occurs in no dump
_FIXED = re.compile(
    rb"(?:q.|h.|K.|M..|[}\](N\x88\x89suea\x94\x86]|[rj]..[\x00-\x3f]\x00|J....|G........|\x8a\x08........|\x80[\x02-\x05]"
    rb"|\x95........)++",
    re.DOTALL,
)
_MOST_PAIRS = 20_000
"""A dump holds one for each of its operations, 2,000 by default. Hashing a deep enough nest of them would overflow the
stack; this many do not."""
_LONGEST_NUMBER = 16


def loads(data: bytes) -> Any:
    """The content of a pickle. Raises ValueError, with the reason in one line, for all that is no plain data."""
    _check(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"a damaged pickle: {str(error)[:200]}") from None
    except (MemoryError, RecursionError, OverflowError):
        raise ValueError("a pickle that asks for more than it holds") from None


class _Plain(pickle.Unpickler):
    """`_check` lets no operation through that would come here; twice is safer than once."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("names an object outside")


def _check(data: bytes) -> None:
    if data.count(b"\x86") > _MOST_PAIRS:
        raise ValueError("a pickle of pairs within pairs")
    at, end = 0, len(data)
    while at < end:
        if run := _FIXED.match(data, at):
            at = run.end()
            if at >= end:
                break
        opcode = data[at : at + 1]
        if opcode == b".":
            return
        # strings and numbers that say how long they are
        if opcode == b"X":
            size, head = int.from_bytes(data[at + 1 : at + 5], "little"), 5
        elif opcode in (b"\x8c", b"\x8a", b"U"):
            size, head = int.from_bytes(data[at + 1 : at + 2], "little"), 2
            if opcode == b"\x8a" and size > _LONGEST_NUMBER:
                raise ValueError("a pickle with a number of absurd length")
        else:
            raise ValueError(f"a pickle that is more than data (operation {opcode!r} at byte {at}): not read")
        at += head + size
    raise ValueError("a truncated pickle")
