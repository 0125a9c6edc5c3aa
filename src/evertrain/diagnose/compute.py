"""Does this device multiply matrices right, and the same way twice?

Whole numbers give one exact result, whatever the order of summation: it must come out to the bit. Fractions use all
bits of the mantissa: they must come out the same each time, and as near to the float64 result as rounding allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from evertrain.diagnose import fault
from evertrain.diagnose.bench import Bench, be_deterministic, digest, dtype_of, fractions, setting, whole_numbers

ON_EACH_RANK = True
DTYPES = ("float32", "bfloat16", "float16")


def run(bench: Bench, *, size: int = 0, dtypes: Sequence[str] = DTYPES, rounds: int = 3) -> None:
    be_deterministic(bench.threads)
    size = size or (4096 if bench.is_cuda else 256)
    inputs = {
        # sums of so few whole numbers stay below 2^11, which float16 still holds exactly
        "whole": (whole_numbers((size, size), -2, 3, "compute a"), whole_numbers((size, size), -2, 3, "compute b")),
        "fraction": (fractions((size, size), 1.0, "compute c"), fractions((size, size), 1.0, "compute d")),
    }
    for name in dtypes:
        for kind, (left, right) in inputs.items():
            _measure(bench, name, kind, left, right, rounds)


def _measure(bench: Bench, name: str, kind: str, left: Tensor, right: Tensor, rounds: int) -> None:
    dtype = dtype_of(name)
    a, b = left.to(dtype).to(bench.device), right.to(dtype).to(bench.device)
    results: list[Tensor] = []
    seconds = []
    for number in range(max(rounds, 1)):
        with fault.during(bench.node, bench.rank, f"{bench.salt}:{name}:{kind}:{number}"):
            seconds.append(bench.timed(lambda: results.append(a @ b)))
        if number and bench.left_s < 0:
            break
    wrong, error = _compare(results, a, b, kind)
    digests = list(dict.fromkeys(map(digest, results)))
    because = [
        f"{wrong} of {len(results) * a.shape[0] * b.shape[1]} elements are wrong" if wrong else "",
        f"{len(results)} runs gave {len(digests)} results" if len(digests) > 1 else "",
    ]
    bench.say(
        f"matmul {name} {kind}", 2 * a.shape[0] ** 3 / min(seconds) / 1e9, "GFLOP/s", ok=not any(because),
        because=", ".join(filter(None, because)), wrong=wrong, largest_error=error, digests=digests,
        runs=len(results), size=a.shape[0], setting=setting(bench.device, bench.threads),
    )  # fmt: skip


def _compare(results: Sequence[Tensor], a: Tensor, b: Tensor, kind: str) -> tuple[int, float]:
    """Elements that are wrong, of all results, and the largest error in units of what is allowed or exact."""
    dtype = a.dtype
    exact = a.double() @ b.double()
    if kind == "whole":
        allowed = torch.zeros_like(exact)
        expected = exact.to(dtype).double()
    else:
        # each sum is rounded so often, by products of this size, and at the end once more
        steps = a.shape[1] * torch.finfo(torch.float32 if dtype.itemsize < 4 else dtype).eps
        allowed = (a.double().abs() @ b.double().abs()) * steps + exact.abs() * torch.finfo(dtype).eps
        expected = exact
    wrong, worst = 0, 0.0
    for result in results:
        error = (result.double() - expected).abs()
        # not a number is never within limits
        wrong += int((~(error <= allowed)).sum())
        worst = max(worst, float(error.nan_to_num(nan=1e300, posinf=1e300).max()))
    return wrong, worst
