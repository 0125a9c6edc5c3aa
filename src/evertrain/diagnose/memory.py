"""Does memory keep what was written? All that is to be tested is held at once, filled, and read back."""

from __future__ import annotations

import torch
from torch import Tensor

from evertrain.diagnose.bench import Bench

ON_EACH_RANK = True
CPU_BYTES = 64 << 20
SHARE = 0.8
"""Of a GPU's free memory."""
CHUNK_BYTES = 256 << 20
PATTERNS = {"zeros": 0, "ones": -1, "odd bits": 0x5555555555555555, "even bits": -0x5555555555555556, "addresses": None}


def run(bench: Bench, *, size_bytes: int = 0, rounds: int = 1) -> None:
    size_bytes = size_bytes or _default(bench)
    chunks = [
        torch.empty(min(CHUNK_BYTES, size_bytes - at) // 8, dtype=torch.int64, device=bench.device)
        for at in range(0, size_bytes, CHUNK_BYTES)
    ]
    for _ in range(rounds):
        for name, pattern in PATTERNS.items():
            seconds, (count, first) = _one(bench, chunks, pattern)
            because = f"{count} words of {size_bytes // 8} changed, the first at byte {8 * first}" if count else ""
            bench.say(
                f"pattern {name}", 2 * size_bytes / seconds, "bytes/s", ok=not count, because=because,
                wrong=count, size_bytes=size_bytes,
            )  # fmt: skip
            if bench.left_s < 0:
                return


def _one(bench: Bench, chunks: list[Tensor], pattern: int | None) -> tuple[float, tuple[int, int]]:
    found: list[tuple[int, int]] = []
    seconds = bench.timed(lambda: write(chunks, pattern)) + bench.timed(lambda: found.append(check(chunks, pattern)))
    return seconds, found[0]


def _default(bench: Bench) -> int:
    if not bench.is_cuda:
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(bench.device)
    return int(SHARE * free) // 8 * 8


def write(chunks: list[Tensor], pattern: int | None) -> None:
    at = 0
    for chunk in chunks:
        if pattern is None:
            torch.arange(at, at + chunk.numel(), out=chunk)
        else:
            chunk.fill_(pattern)
        at += chunk.numel()


def check(chunks: list[Tensor], pattern: int | None) -> tuple[int, int]:
    """How many words differ from what was written, and the number of the first that does."""
    wrong, first, at = 0, -1, 0
    for chunk in chunks:
        expected = torch.arange(at, at + chunk.numel(), device=chunk.device) if pattern is None else pattern
        differs = chunk != expected
        count = int(differs.sum())
        if count and not wrong:
            first = at + int(differs.to(torch.uint8).argmax())
        wrong += count
        at += chunk.numel()
    return wrong, first
