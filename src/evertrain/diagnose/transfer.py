"""Do data reach the device, and come back, unchanged and fast? Without a GPU: from one place in memory to another."""

from __future__ import annotations

import torch

from evertrain.diagnose.bench import Bench, digest, whole_numbers

ON_EACH_RANK = True


def run(bench: Bench, *, size_bytes: int = 0, rounds: int = 3) -> None:
    size_bytes = size_bytes or (1 << 30 if bench.is_cuda else 32 << 20)
    block = whole_numbers((min(size_bytes, 1 << 20),), 0, 256, "transfer").to(torch.uint8)
    sent = block.repeat(-(-size_bytes // block.numel()))[:size_bytes].contiguous()
    if bench.is_cuda:
        sent = sent.pin_memory()
    there = torch.empty_like(sent, device=bench.device)
    back = torch.empty_like(sent)
    content = digest(sent)
    for name, source, target in (("to device", sent, there), ("from device", there, back)):
        seconds = [
            bench.timed(lambda source=source, target=target: target.copy_(source))  # type: ignore[misc]
            for _ in range(rounds)
        ]
        is_same = digest(target) == content
        bench.say(
            name, size_bytes / min(seconds), "bytes/s", ok=is_same, because="" if is_same else "the content changed",
            size_bytes=size_bytes, slowest=size_bytes / max(seconds),
        )  # fmt: skip
