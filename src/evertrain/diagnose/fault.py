"""How is a node that computes wrongly tried out without one? One bit of one matrix product is flipped: a drill.

    EVERTRAIN_DIAGNOSE_FAULT="flip:node=node-3,p=0.1,rank=1,matmul=7,bit=2,seed=5"
    EVERTRAIN_REPLAY_FAULT="flip:node=node-3,p=0.1"

On that node and local rank (0), in a fraction p (1) of the runs, the largest element of one product has one bit of its
mantissa flipped (counted from the highest, 2). Which product: the one so many after the first of the run (0); those of
batches do not count, since their largest element may be masked. With a seed the draws are the same again. Several
faults are separated by `;`. Only test programs read the first variable, and only ranks of the job the second one: there
a run is one start of the script, be it an attempt or a replay, and the bit is flipped in each of its steps. Nothing is
hooked where no fault is drawn.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

VARIABLE = "EVERTRAIN_DIAGNOSE_FAULT"
_HIGHEST = {"float64": 51, "float32": 22, "float16": 9, "bfloat16": 6}
"""Number of the mantissa's highest bit."""
_WIDTH = {8: "int64", 4: "int32", 2: "int16"}


@dataclass(frozen=True, kw_only=True)
class Fault:
    node: str
    p: float = 1.0
    rank: int = 0
    matmul: int = 0
    bit: int = 2
    seed: int | None = None

    def is_drawn(self, run: str) -> bool:
        if self.p >= 1.0:
            return True
        if self.seed is None:
            return random.SystemRandom().random() < self.p
        drawn = hashlib.sha256(f"{self.seed}:{self.node}:{self.rank}:{run}".encode()).digest()
        return int.from_bytes(drawn[:8], "big") < self.p * 2**64


def parse(text: str, variable: str = VARIABLE) -> tuple[Fault, ...]:
    """Raises ValueError with one line that says what is wrong."""
    return tuple(_one(part.strip(), variable) for part in text.split(";") if part.strip())


def _one(text: str, variable: str) -> Fault:
    kind, _, listed = text.partition(":")
    if kind != "flip":
        raise ValueError(f"{variable}: unknown fault {kind!r} in {text!r}; known is flip")
    options: dict[str, Any] = {}
    for item in filter(None, listed.split(",")):
        name, _, value = item.strip().partition("=")
        try:
            options[name] = value if name == "node" else float(value) if name == "p" else int(value)
        except ValueError:
            raise ValueError(f"{variable}: {name}={value!r} is no number, in {text!r}") from None
    unknown = options.keys() - Fault.__dataclass_fields__.keys()
    if unknown or not options.get("node"):
        known = ", ".join(Fault.__dataclass_fields__)
        raise ValueError(f"{variable}: flip takes {known}, of which node is needed, in {text!r}")
    return Fault(**options)


def during(node: str, rank: int, run: str, environ: Mapping[str, str] = os.environ) -> AbstractContextManager[object]:
    """Around one run of something that computes; `run` tells it from other runs."""
    for fault in parse(environ.get(VARIABLE, "")):
        if fault.node == node and fault.rank == rank and fault.is_drawn(run):
            return flipping(fault)
    return nullcontext()


def flipping(fault: Fault) -> AbstractContextManager[object]:
    """While it is entered, one product is spoilt; its attribute `seen` counts them."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default}

    class Flipping(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Sees all products below autograd, those of the backward pass too."""

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # nothing is compiled here, and to say so would import the compiler

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func in products:
                local = getattr(result, "_local_tensor", result)  # of a DTensor
                # what only works out shapes computes nothing
                if self.seen == fault.matmul and type(local) is torch.Tensor and local.device.type != "meta":
                    flip(local, fault.bit)
                self.seen += 1
            return result

    return Flipping()


def flip(tensor: Any, bit: int) -> None:
    """Flip one mantissa bit, counted from the highest, of the largest element."""
    import torch

    assert tensor.is_contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    bits = tensor.view(getattr(torch, _WIDTH[tensor.element_size()])).view(-1)
    largest = int(tensor.abs().view(-1).argmax())
    bits[largest] ^= 1 << max(0, _HIGHEST[name] - bit)
