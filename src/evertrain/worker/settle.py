"""Why does a restart of DDP not give the same bits, and what cures it?

DDP rebuilds its gradient buckets after its first backward pass. So the first step after a restart would add up in
another order than the same step of the undisturbed run did. `settle` gets that first pass over with: every start,
the first one included, then trains with the same buckets. FSDP2 has no such first pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from evertrain.worker import rng


def settle(model: torch.nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None) -> None:
    """Run one throw-away forward and backward pass, so that a restarted run trains bit for bit like an undisturbed one.

    Call it on all ranks, once at each start, when the model is wrapped and its state restored, before the first
    step. Afterwards parameters, buffers and random number generators are as they were, and there are no gradients.
    No optimizer step is made. Comm hooks that keep state (PowerSGD) see one pass more.

    It does its pass wherever `model` is, or contains, a DistributedDataParallel, also outside `evertrain run`: a
    plain `torchrun` of the same script then gives the same bits. Without one it does nothing.

    `batch` is what the model takes: a tensor, a tuple or list of positional arguments, or a dict of named ones. Its
    shapes should be those of training; the values do not matter. Gradients come from `loss(output)` if given, else
    from the output's `loss`, else from all the tensors in the output.
    """
    if not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return
    states = rng.capture()
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with torch.enable_grad():
            output = _call(model, batch)
            (_scalar(output) if loss is None else loss(output)).backward()  # type: ignore[no-untyped-call]
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        rng.restore(states)


def _call(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _scalar(output: Any) -> Tensor:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, Tensor) and named.requires_grad:
        return named.sum()
    parts = [tensor.float().mean() for tensor in _differentiable(output)]
    if not parts:
        raise ValueError(
            f"settle found nothing to differentiate in the model's output ({type(output).__name__}); "
            f"pass loss=, a function from the output to a scalar tensor"
        )
    return torch.stack(parts).sum()


def _differentiable(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad:
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _differentiable(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _differentiable(item)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from _differentiable(item)
