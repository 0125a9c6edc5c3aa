"""Has a part of a checkpoint changed since it was saved? One number for each chunk, at the speed of memory.

A chunk is a whole number of pages. Its checksum is the sum of its pages' sums, each times an odd number of its own,
where a page's sum is that of its 64-bit words, all modulo 2**64. A flipped bit, a lost or an older page, pages that
have changed places: all of them change it. CRC-32 costs six times as much where torch is all there is.

The same numbers without torch: `evertrain.checkpoint.sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from evertrain.worker.slots import CHUNK_BYTES, PAGE_BYTES, Part, page_weights

_WORDS = PAGE_BYTES // 8
_MASK = (1 << 64) - 1


_WEIGHTS: list[Tensor] = []
_AT_ONCE = 8
"""Chunks; as long as it takes to sum them up does a save wait that is in a hurry."""


def of_chunk(raw: Tensor) -> int:
    """The checksum of a chunk: a whole number of pages as `uint8`, one after another in memory."""
    pages = raw.view(torch.int64).view(-1, _WORDS).sum(1)
    return int((pages * _weights()[: len(pages)]).sum()) & _MASK


def of_data(data: Tensor, parts: Sequence[Part], hurry: Callable[[], bool] = lambda: False) -> list[int] | None:
    """The checksums of all chunks, in their order; `data` is the data section of a slot as `uint8`. None: in a hurry.

    Many chunks at once: a call costs as much as the interpreter's lock does, which others wait for.
    """
    found: list[int] = []
    for part in parts:
        whole = part.bytes - part.bytes % CHUNK_BYTES
        for begin in range(0, part.bytes, _AT_ONCE * CHUNK_BYTES):
            if hurry():
                return None
            end = begin + _AT_ONCE * CHUNK_BYTES
            if begin < whole:
                found += _of_chunks(data[part.offset + begin : part.offset + min(whole, end)])
            if whole < part.bytes <= end:
                found.append(of_chunk(data[part.offset + whole : part.offset + part.bytes]))
    return found


def _of_chunks(raw: Tensor) -> list[int]:
    pages = raw.view(torch.int64).view(-1, CHUNK_BYTES // PAGE_BYTES, _WORDS).sum(2)
    return [number & _MASK for number in (pages * _weights()).sum(1).tolist()]


def _weights() -> Tensor:
    if not _WEIGHTS:
        signed = [weight - (1 << 64) if weight >> 63 else weight for weight in page_weights()]
        _WEIGHTS.append(torch.tensor(signed, dtype=torch.int64))
    return _WEIGHTS[0]
