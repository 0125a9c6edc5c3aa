"""What do the flight recorders of a capture add? Their findings, in the words of `Located`."""

from __future__ import annotations

from typing import cast, get_args

import msgspec

from evertrain.locate import flight, recorder
from evertrain.locate.grouping import Merged
from evertrain.model.recording import Recordings
from evertrain.model.stacks import LocatedKind


class Judged(msgspec.Struct, frozen=True):
    kind: LocatedKind
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]


_KINDS: dict[str, LocatedKind] = {"passed": "device", "unstarted": "device", "empty": "held"}


def waits(now: Merged) -> dict[int, tuple[int, ...]]:
    """For each rank that stands in a recorded operation: the ranks it waits for there."""
    found = _recordings(now)
    return flight.waits(found) if found.ranks else {}


def judge(now: Merged) -> Judged | None:
    found = _recordings(now)
    for one in flight.judge(found) if found.ranks else ():
        told = one.rule.removeprefix("flight-")
        if told == "mismatch" and "different operations" in one.note:
            told = "order"
        is_known = told in get_args(LocatedKind)
        kind = _KINDS.get(told, cast(LocatedKind, told) if is_known else "unknown")
        who = one.culprit.id if one.culprit.type == "rank" else ()
        ranks = (who,) if isinstance(who, int) else tuple(rank for rank in who if isinstance(rank, int))
        return Judged(kind, ranks, (one.note, *one.evidence))
    return None


def _recordings(now: Merged) -> Recordings:
    found = Recordings(dict(now.recordings), dict(now.groups))
    return recorder.with_activities(found, now.activities.values()) if found.ranks else found
