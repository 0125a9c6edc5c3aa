"""What does training report about itself, and what was found odd about it? Steps go in, events come out."""

from __future__ import annotations

from typing import Literal

import msgspec

MetricKind = Literal[
    "loss_not_finite", "grad_norm_not_finite", "loss_jump", "grad_norm_jump",
    "slow", "hot_and_slow", "no_traffic", "tensor_idle",
]  # fmt: skip


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One finished step of a rank. None: it has not said so."""

    step: int
    """As the script names it; names may be left out, and may come again."""
    count: int
    """Grows by one with every step of the attempt, however they are named: speed is measured by it."""
    time: float
    """When it was finished."""
    declared_s: float = 0.0
    """All time of the attempt until then that was spent inside declared phases."""
    stage: int = 0
    """Another number: in between the script was in a phase of its own, neither evaluation nor save."""
    loss: float | None = None
    grad_norm: float | None = None
    tokens: float | None = None
    """Of the whole attempt until then."""


class MetricEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something out of the ordinary, told once when it begins and, where it lasts, once when it is over."""

    kind: MetricKind
    step: int
    """The first of those that are out of the ordinary."""
    time: float
    value: float
    baseline: float | None = None
    """What the value was compared with."""
    evidence: str
    confidence: float
    """0 to 1."""
    is_warning: bool = False
    """It may be nothing yet: nobody is to act on it."""
    is_over: bool = False
    device: str = ""
