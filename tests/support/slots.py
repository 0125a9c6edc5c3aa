"""Checkpoint slots without a rank that saves."""

from __future__ import annotations

import json
from pathlib import Path
from zlib import crc32

from evertrain.checkpoint import sums
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
    sealed: bool = False,
    directory: str = "",
) -> Path:
    """Rank `rank` of 2 has saved `step`, in its next slot or in the one of that number."""
    data += bytes(-len(data) % layout.PAGE_BYTES)
    metadata = b"metadata of %d" % step
    parts = (layout.Part("model", 0, len(data)),)
    listed = json.dumps({"parts": [{**part._asdict(), "tensors": []} for part in parts], "groups": []})
    described = (directory or listed).encode()
    found = layout.pack_sums(sums.of_data(data, parts)) if sealed else bytes(layout.sums_bytes(parts))
    header = layout.SlotHeader(
        state, "job", 1, attempt, rank, 2, step, 100.0 + step, len(data), len(metadata), crc32(metadata),
        len(described), crc32(described), len(found), crc32(found) if sealed else None,
    )  # fmt: skip
    path = slots_dir / f"r{rank}" / str(step % 3 if place is None else place)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = layout.pack(header).ljust(layout.HEADER_BYTES, b"\0") + data + metadata + described + found
    path.write_bytes(whole + b"slack")
    return path
