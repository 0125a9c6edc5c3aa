"""How far has each rank come in each of its groups, and who lags behind?

A group is behind where its members are at different operations; it is stuck where somebody waits inside one. Counts of
operations are compared, never times of two ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from evertrain.trace import layout
from evertrain.trace.scene import Scene, Track

_BLOCKED = layout.KINDS["blocked"]


@dataclass(frozen=True)
class Place:
    """Where one rank is in one group."""

    done: int = 0
    """Number of the newest collective that has ended; 0: not seen."""
    posted: int = 0
    """... and of the newest that it has begun,"""
    op: str = ""
    """... and what that is."""
    in_flight: int = 0
    blocked_s: float | None = None
    """For so long it has waited inside one of them; None: it does not wait there."""

    @property
    def reached(self) -> int:
        return max(self.done, self.posted)


@dataclass(frozen=True)
class Row:
    """One group."""

    comm: int
    name: str
    members: tuple[int, ...]
    places: dict[int, Place]
    """By rank; of a member that is missing nothing is known."""

    @property
    def least(self) -> int:
        return min((one.reached for one in self.places.values()), default=0)

    @property
    def most(self) -> int:
        return max((one.reached for one in self.places.values()), default=0)

    @property
    def lagging(self) -> tuple[int, ...]:
        """Members that have not begun what others have; of those nothing is known of, nothing is said."""
        return tuple(rank for rank, place in sorted(self.places.items()) if place.reached < self.most)

    @property
    def unseen(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.members) - self.places.keys()))

    @property
    def op(self) -> str:
        return next((place.op for place in self.places.values() if place.reached == self.most and place.op), "")

    @property
    def in_flight(self) -> int:
        return sum(place.in_flight for place in self.places.values())

    @property
    def blocked_s(self) -> float | None:
        return max((one.blocked_s for one in self.places.values() if one.blocked_s is not None), default=None)


def rows(scene: Scene) -> list[Row]:
    """The groups that something is known of; those that somebody waits in for longest first."""
    found: dict[int, dict[int, Place]] = {}
    for track in scene.of("hook"):
        for comm, place in _places(track).items():
            found.setdefault(comm, {})[track.rank] = place
    made = [
        Row(
            comm,
            scene.group_name(comm),
            scene.groups[comm].ranks if comm in scene.groups else tuple(sorted(places)),
            places,
        )
        for comm, places in found.items()
    ]
    return sorted(made, key=lambda row: (-(row.blocked_s or 0.0), -len(row.members), row.name))


def _places(track: Track) -> dict[int, Place]:
    found: dict[int, Place] = {}
    done = track.records.operations
    done = done[(done["kind"] == layout.KINDS["done"]) & (done["flags"] & layout.POINT_TO_POINT == 0)]
    for comm, seq, order, op in zip(*(done[name].tolist() for name in ("comm", "seq", "order", "op")), strict=True):
        at = order or seq
        if at >= found.get(comm, Place()).done:
            found[comm] = Place(done=at, posted=0, op=layout.OPS[op])
    for one in track.table:
        comm, at = int(one["comm"]), int(one["order"]) or int(one["seq"])
        before = found.get(comm, Place())
        if one["kind"] == _BLOCKED:
            waited_s = max(0, track.last_ns - int(one["t_wait"] or one["t"])) / 1e9
            found[comm] = Place(before.done, before.posted, before.op, before.in_flight, waited_s)
        elif not one["flags"] & layout.POSTED_ONLY:
            is_newer = not one["flags"] & layout.POINT_TO_POINT and at >= before.posted
            posted, op_name = (at, layout.OPS[one["op"]]) if is_newer else (before.posted, before.op)
            found[comm] = Place(before.done, posted, op_name, before.in_flight + 1, before.blocked_s)
    return found
