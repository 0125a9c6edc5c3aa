"""Did a rank that did the same steps again report the same losses? The rings of two pages, compared bit by bit."""

from __future__ import annotations

import math
import os
import struct

from evertrain.model.report import Compare, Comparison, Difference
from evertrain.observe import pages

Path = str | os.PathLike[str]


def compare(order: Compare, rank: int, node: str, earlier: Path, later: Path, *, is_over: bool) -> Comparison | None:
    """What came out; None while the rank has not done again what it had done. `is_over`: it will not come further."""
    wanted = {step: loss for step, loss in pages.losses(earlier).items() if order.after < step <= order.last}
    view, _ = pages.read(later)
    again = pages.losses(later)
    done = view.abs_step if view is not None else -1
    # a script may name a step as finished before it reports its loss: only the step after it says that none will come
    if not is_over and done <= order.last and (done < order.last or not wanted.keys() <= again.keys()):
        return None
    both = sorted(wanted.keys() & again.keys())
    differs = next((step for step in both if _bits(wanted[step]) != _bits(again[step])), None)
    return Comparison(
        rank=rank,
        later=order.later,
        first_step=both[0] if both else None,
        last_step=both[-1] if both else None,
        difference=None
        if differs is None
        else Difference(step=differs, rank=rank, node=node, before=_text(wanted[differs]), again=_text(again[differs])),
    )


def _bits(loss: float) -> bytes:
    return struct.pack("@d", loss)


def _text(loss: float) -> str:
    """In full precision; what prints alike is told apart by its bits."""
    return f"{loss!r} (bits {struct.pack('>d', loss).hex()})" if math.isnan(loss) else repr(loss)
