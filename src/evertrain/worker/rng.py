"""Where do random numbers come from in this process? All four sources, to be saved and put back together."""

from __future__ import annotations

import pickle
import random
import sys
from typing import Any

import torch


def capture() -> dict[str, Any]:
    """The states of `random`, NumPy (if the script uses it), torch on the CPU and on GPUs (if initialised)."""
    # pickled at once, so that a snapshot need not look at each of the hundreds of numbers
    states: dict[str, Any] = {"random": pickle.dumps(random.getstate()), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = pickle.dumps(numpy.random.get_state())
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore(states: dict[str, Any]) -> None:
    """Put back what `capture` gave, so that the next draw is the one that would have come then."""
    random.setstate(pickle.loads(states["random"]))
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(pickle.loads(states["numpy"]))
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])
