"""Checkpoint slots without a rank that saves."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

from evertrain.worker import slots as layout


def slot(
    slots_dir: Path,
    rank: int,
    step: int,
    data: bytes = b"tensors" * 1000,
    *,
    state: int = layout.COMPLETE,
    attempt: int = 1,
    place: int | None = None,
) -> Path:
    """Rank `rank` of 2 has saved `step`, in its next slot or in the one of that number."""
    metadata = b"metadata of %d" % step
    header = layout.SlotHeader(
        state, "job", 1, attempt, rank, 2, step, 100.0 + step, len(data), len(metadata), crc32(metadata)
    )  # fmt: skip
    path = slots_dir / f"r{rank}" / str(step % 3 if place is None else place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(layout.pack(header).ljust(layout.HEADER_BYTES, b"\0") + data + metadata + b"slack")
    return path
