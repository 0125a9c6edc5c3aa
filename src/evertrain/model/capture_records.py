"""What does the event log say of looks at the processes? Which were asked for, and what they have shown.

The stacks themselves lie beside the log, in files of the newest captures: they are large, and nothing is decided by
them once it is said what follows from them.
"""

from __future__ import annotations

from typing import Literal

from evertrain.model.record import Record
from evertrain.model.stacks import Located

CaptureReason = Literal["hang", "slow", "user"]


class CaptureAsked(Record, frozen=True, kw_only=True):
    """All processes of an attempt are to be looked at."""

    capture: int
    """Its number, over all runs of the job."""
    attempt: int
    reason: CaptureReason
    looks: int = 1
    """How often each process is looked at;"""
    every_s: float = 0.0
    """... and how long after each other."""
    deep: tuple[int, ...] = ()
    """Ranks that are stopped or blamed already."""
    dumps: bool = False
    """The flight recorders' dumps are kept as they are, too."""
    series: int = 0
    """Of several rounds that are judged together: the number of the first; 0: it stands alone."""
    round: int = 0
    """Which of them it is, from 1."""


class HangLocated(Record, frozen=True, kw_only=True):
    """What a capture has shown, or the rounds of a slow job together."""

    attempt: int
    capture: int
    """The newest that it follows from."""
    located: Located
    standing: tuple[int, ...] = ()
    """Ranks that have waited for their device or the network at one and the same place in this capture and the one
    before: however much processor time that takes, they do not move."""
