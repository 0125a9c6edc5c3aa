"""What does the event log say of the code that ranks run? Its versions, changes between them, and who wanted them."""

from __future__ import annotations

from typing import Literal

from evertrain.model.code import ChangeKind, Diff, Version
from evertrain.model.record import Record


class VersionKept(Record, frozen=True, kw_only=True):
    """A version has come to be known."""

    version: Version
    is_own: bool = False
    """It is the files that `evertrain run` was called for, which run in place until there is a change."""


class ChangeAsked(Record, frozen=True, kw_only=True):
    """Ranks are to run another version."""

    change: str
    """Its name, given by who asked: asking twice for one change is asking once."""
    act: ChangeKind
    version: int
    parent: int | None
    """The version that was to run before."""
    latest: float
    """It comes with the next restart, by then at the latest; `time`: at once."""
    author: str = ""
    reason: str = ""
    goes_back: bool = False
    """Training goes on from the newest checkpoint that this version has saved; else from the newest of all."""
    incident: int | None = None
    """That led to it; None: the user asked."""
    diff: Diff = Diff()

    @property
    def is_urgent(self) -> bool:
        return self.latest <= self.time


class ChangeDropped(Record, frozen=True, kw_only=True):
    """A change will not be carried out; training goes on as it is."""

    change: str
    because: str


class VersionProven(Record, frozen=True, kw_only=True):
    """Training has come so far with a version that it is fit to be gone back to."""

    version: int
    because: str


class Audited(Record, frozen=True, kw_only=True):
    """Somebody has tried to have other code run, well or not."""

    act: Literal["upload", "update", "rollback", "restart"]
    author: str
    """As they call themselves; whoever has the token can say anything."""
    address: str
    outcome: Literal["done", "refused"]
    detail: str = ""
