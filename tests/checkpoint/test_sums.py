"""One checksum, computed with torch in a rank and with NumPy elsewhere; and what it notices."""

from __future__ import annotations

import os

import pytest
import torch

from evertrain.checkpoint import sums
from evertrain.worker import slots
from evertrain.worker import sums as in_rank
from evertrain.worker.slots import CHUNK_BYTES, PAGE_BYTES, Part

PARTS = (Part("a", 0, 2 * CHUNK_BYTES + PAGE_BYTES), Part("b", 2 * CHUNK_BYTES + PAGE_BYTES, 3 * PAGE_BYTES))
DATA = os.urandom(sum(part.bytes for part in PARTS))


def test_torch_and_numpy_agree() -> None:
    found = in_rank.of_data(torch.frombuffer(bytearray(DATA), dtype=torch.uint8), PARTS)
    assert found == sums.of_data(DATA, PARTS) and len(set(found)) == 4
    assert slots.unpack_sums(slots.pack_sums(found)) == tuple(found)
    assert len(slots.pack_sums(found)) == slots.sums_bytes(PARTS)


def test_the_sum_of_a_part_does_not_depend_on_where_it_lies() -> None:
    assert sums.of_data(DATA[PARTS[1].offset :], [Part("b", 0, PARTS[1].bytes)]) == sums.of_data(DATA, PARTS)[3:]


@pytest.mark.parametrize("bit", [0, 7, 8 * PAGE_BYTES + 63, 8 * CHUNK_BYTES - 1])
def test_every_flipped_bit_shows(bit: int) -> None:
    chunk = bytearray(DATA[:CHUNK_BYTES])
    chunk[bit // 8] ^= 1 << bit % 8
    assert sums.of_chunk(chunk) != sums.of_chunk(DATA[:CHUNK_BYTES])


def test_pages_that_have_changed_places_show() -> None:
    first, second = DATA[:PAGE_BYTES], DATA[PAGE_BYTES : 2 * PAGE_BYTES]
    assert sums.of_chunk(first + second) != sums.of_chunk(second + first)
    assert sums.of_chunk(first + bytes(PAGE_BYTES)) != sums.of_chunk(bytes(PAGE_BYTES) + first)
