"""Has a part of a checkpoint changed since it was saved? One number for each chunk, at the speed of memory.

A chunk is a whole number of pages. Its checksum is the sum of its pages' sums, each times an odd number of its own,
where a page's sum is that of its 64-bit words, all modulo 2**64. A flipped bit, a lost or an older page, pages that
have changed places: all of them change it. CRC-32 costs six times as much where torch is all there is.

The same numbers without torch: `evertrain.checkpoint.sums`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evertrain.worker.slots import PAGE_BYTES, Part, chunks, page_weights

_WORDS = PAGE_BYTES // 8
_MASK = (1 << 64) - 1


_WEIGHTS: list[Tensor] = []


def of_chunk(raw: Tensor) -> int:
    """The checksum of a chunk: a whole number of pages as `uint8`, one after another in memory."""
    if not _WEIGHTS:
        signed = [weight - (1 << 64) if weight >> 63 else weight for weight in page_weights()]
        _WEIGHTS.append(torch.tensor(signed, dtype=torch.int64))
    pages = raw.view(torch.int64).view(-1, _WORDS).sum(1)
    return int((pages * _WEIGHTS[0][: len(pages)]).sum()) & _MASK


def of_data(data: Tensor, parts: Sequence[Part]) -> list[int]:
    """The checksums of all chunks, in their order; `data` is the data section of a slot as `uint8`."""
    return [of_chunk(data[offset : offset + length]) for offset, length in chunks(parts)]
