"""What tests/support/scripts/train.py leaves in its folder: which steps were done, and the bits that came out."""

from __future__ import annotations

import json
from pathlib import Path

RANKS = 3
"""Two ranks add up to the same bits in any order; from three on a wrong order shows."""


def digest(folder: Path, rank: int | None = None) -> str:
    """The parameters at the end, of one rank or, as they are the same, of all."""
    files = folder.glob(f"final-r{'*' if rank is None else rank}.json")
    (one,) = {json.loads(file.read_bytes())["digest"] for file in files}
    return str(one)


def steps_done(folder: Path, rank: int) -> list[int]:
    """Every step that a rank did, in any attempt; those done again as often as they were done."""
    return [json.loads(line)["step"] for line in (folder / f"losses-r{rank}.jsonl").read_text().splitlines()]


def losses(folder: Path, rank: int) -> dict[int, float]:
    """The loss of each step; where a step was done again, of the last time."""
    lines = map(json.loads, (folder / f"losses-r{rank}.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}
