"""What does the event log say of collectives that are stuck or slow? Episodes, and what looks at all ranks showed."""

from __future__ import annotations

from typing import Literal

from evertrain.model.collectives import RootCause, Symptom
from evertrain.model.record import Record

SeenBy = Literal["trigger", "hang", "slow"]
"""`hang`, `slow`: somebody else has noticed that the job makes no steps, or fewer."""


class CollectivesOdd(Record, frozen=True, kw_only=True):
    """An episode has begun, or what seemed slow is stuck."""

    attempt: int
    episode: int
    """Numbers go on over all runs."""
    symptom: Symptom
    seen_by: SeenBy
    for_s: float
    """It had lasted for so long."""
    evidence: str


class CauseFound(Record, frozen=True, kw_only=True):
    """What a look at all ranks has shown."""

    attempt: int
    episode: int
    cause: RootCause
    seconds: float
    """From the order to look to this."""


class CollectivesWell(Record, frozen=True, kw_only=True):
    """The episode is over."""

    attempt: int
    episode: int
