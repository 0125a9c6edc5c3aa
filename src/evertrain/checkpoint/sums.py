"""The checksums of `evertrain.worker.sums` without torch: for agents, and for whoever looks at a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

from evertrain.worker.slots import PAGE_BYTES, Part, chunks, page_weights

_WORDS = PAGE_BYTES // 8


def of_chunk(raw: memoryview | bytes) -> int:
    """The checksum of a chunk: a whole number of pages, 1 to 256."""
    import numpy  # a tenth of a second that a node without checkpoints need not spend

    pages = numpy.frombuffer(raw, dtype="<u8").reshape(-1, _WORDS).sum(axis=1, dtype="<u8")
    return int((pages * _weights()[: len(pages)]).sum(dtype="<u8"))


def of_data(data: memoryview | bytes, parts: Sequence[Part]) -> list[int]:
    """The checksums of all chunks, in their order; `data` is the data section of a slot."""
    whole = memoryview(data)
    return [of_chunk(whole[offset : offset + length]) for offset, length in chunks(parts)]


def digest(packed: bytes | memoryview) -> str:
    """What a part's packed checksums come to: equal for equal content, whichever rank saved it."""
    return blake2b(packed, digest_size=16).hexdigest()


@cache
def _weights() -> Any:
    import numpy

    return numpy.array(page_weights(), dtype="<u8")
