"""What is known of an episode in which collectives are stuck or slow?"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from evertrain.model.collective_records import CauseFound, CollectivesOdd, CollectivesWell


class Communication(msgspec.Struct, frozen=True, kw_only=True):
    """The episode that lasts, or the last one of a hang."""

    odd: CollectivesOdd
    since: float
    """When it was noticed first."""
    looks: int = 0
    """Of which something is known."""
    found: CauseFound | None = None
    """The best of what they have shown."""
    incident: int | None = None
    """That was opened for it."""


def better(found: CauseFound, before: CauseFound | None) -> CauseFound:
    """The one that holds: a later look has more to say, unless it could name nobody, or is less certain; what has
    begun it may be over by then. Of the same ranks a little less certain will do."""
    if before is None:
        return found
    new, old = found.cause, before.cause
    if not new.is_named:
        return found if not old.is_named else before
    changed = new.symptom != old.symptom
    enough = old.confidence - (0.1 if set(new.ranks) <= set(old.ranks) else 0.0)
    return found if changed or not old.is_named or new.confidence >= enough else before


def after(seen: Communication | None, record: CollectivesOdd | CauseFound | CollectivesWell) -> Communication | None:
    """What is known after one more record; what is about an episode that is over changes nothing."""
    is_it = seen is not None and seen.odd.episode == record.episode
    if isinstance(record, CollectivesOdd):
        # what is stuck now is looked at anew
        known = Communication(odd=record, since=record.time)
        return replace(seen, odd=record, since=record.time, looks=0) if seen is not None and is_it else known
    if seen is None or not is_it:
        return seen
    if isinstance(record, CollectivesWell):
        return None
    return replace(seen, looks=seen.looks + 1, found=better(record, seen.found))
