"""Does this node compute the very bits that others do? One training step of a small reference model, again and again.

Each node runs it alone; what came out is compared elsewhere (`locate.alignment`): nothing here knows what is right.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from evertrain.diagnose import fault, groups, mini_gpt
from evertrain.diagnose.bench import Bench, be_deterministic, dtype_of, setting
from evertrain.diagnose.mini_gpt import Part, Sizes

ON_EACH_RANK = True
KINDS = ("dense", "moe")
SMALL = Sizes(layers=4, width=64, heads=4, context=32, batch=4, vocabulary=64, experts=4, dtype="float32")
LARGE = Sizes(layers=8, width=1024, heads=16, context=512, batch=8, vocabulary=1024, experts=8, dtype="bfloat16")
"""On a GPU: products large enough for all of it."""
REPEATS = 50
"""A node that is wrong in one run of ten is found 99 times of 100."""
SHARE = 0.8
"""Of the time that is left, for repeats."""


def run(bench: Bench, *, kind: str = "dense", repeats: int = REPEATS, sizes: dict[str, Any] | None = None) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is none of {', '.join(KINDS)}")
    be_deterministic(bench.threads)
    base = LARGE if bench.is_cuda else SMALL
    chosen = Sizes(**{**base.__dict__, **(sizes or {})})
    dtype_of(chosen.dtype)
    if bench.ranks > 1:
        groups.join_local(bench)
    part = Part(kind, chosen, mini_gpt.Groups(bench.rank, bench.ranks), bench.device)
    order = mini_gpt.places(kind, chosen.layers)

    records: dict[str, list[tuple[int, str, str]]] = {}
    runs: list[str] = []
    seconds: list[float] = []
    reserve_s = (1 - SHARE) * bench.left_s
    while len(runs) < repeats and (not runs or _has_time(bench, seconds[-1], reserve_s)):
        began = time.perf_counter()
        with fault.during(bench.node, bench.rank, f"{bench.salt}:{len(runs)}"):
            record = part.step()
        entries = record.entries(order)
        name = hashlib.sha256(repr(entries).encode()).hexdigest()[:16]
        records.setdefault(name, entries)
        runs.append(name)
        seconds.append(time.perf_counter() - began)
    layouts = ", ".join(f"{one.shard}x{one.pp}x{one.dp}" for _, one in mini_gpt.blocks(bench.ranks))
    bench.say(
        "alignment", min(seconds), "s/step", ok=None, runs=runs, records=records,
        setting={**setting(bench.device, bench.threads), "model": f"{chosen.words(kind)}, {layouts}"},
    )  # fmt: skip


def _has_time(bench: Bench, step_s: float, reserve_s: float) -> bool:
    """Whether all ranks have the time for one more: all have to do the same number. A machine may become busy in the
    middle, which must not make its node late."""
    missing = reserve_s + step_s - bench.left_s
    return (missing if bench.ranks == 1 else groups.all_agree(bench, missing)) <= 0
