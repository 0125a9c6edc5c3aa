"""What had the ranks of a dead job in flight, and who lagged behind? From the rings that they have left."""

from __future__ import annotations

from collections.abc import Iterable

from evertrain.model.findings import Culprit, Finding
from evertrain.trace import layout, progress
from evertrain.trace.scene import Scene, Track

_BLOCKED = layout.KINDS["blocked"]


def judge(scene: Scene) -> tuple[Finding, ...]:
    """One finding: times of different ranks are not compared, so that it says who is behind and not why."""
    tracks = sorted(scene.of("hook"), key=lambda one: one.rank)
    if not tracks:
        return ()
    lines = tuple(line(scene, track) for track in tracks)
    row = next((one for one in progress.rows(scene) if one.in_flight), None)
    if row is None:
        return (_finding("trace-idle", 0.1, Culprit(), lines, "no rank was inside an operation", is_benign=True),)
    what = f"{row.op or 'operation'} {row.most} of {row.name}"
    waiting = [rank for rank, place in row.places.items() if place.in_flight and rank not in row.lagging]
    if row.lagging and 2 * len(row.lagging) <= len(row.places):
        note = f"{_named(row.lagging)} had not begun {what}, which {_named(waiting)} waited in"
        first = [one for one in tracks if one.rank in row.lagging] + [one for one in tracks if one.rank in waiting]
        culprit = Culprit("rank", row.lagging[0] if len(row.lagging) == 1 else row.lagging)
        return (_finding("trace-behind", 0.5, culprit, tuple(line(scene, one) for one in first), note),)
    note = f"{_named(waiting)} were inside {what}, and all that have left a ring had come to it: no rank is accused"
    return (_finding("trace-all-arrived", 0.3, Culprit(), lines, note),)


def line(scene: Scene, track: Track) -> str:
    """What one rank was in."""
    where = f"rank {track.rank} on {track.node or '?'}"
    blocked = [one for one in track.table if one["kind"] == _BLOCKED]
    open_ = [one for one in track.table if one["kind"] != _BLOCKED and not one["flags"] & layout.POSTED_ONLY]
    if not blocked and not open_:
        return f"{where}: in no operation"
    (one, *_) = blocked or sorted(open_, key=lambda place: int(place["t_posted"]))
    op = layout.OPS[one["op"]] if one["op"] < len(layout.OPS) else "operation"
    since = int(one["t_wait"] or one["t_posted"])
    doing = "waited in" if blocked else "had begun"
    seconds = max(0, track.last_ns - since) / 1e9
    more = f", {len(open_)} in flight" if len(open_) > 1 else ""
    return f"{where}: {doing} {op} {int(one['seq'])} of {scene.group_name(int(one['comm']))} for {seconds:.1f} s{more}"


def _finding(
    rule: str, confidence: float, culprit: Culprit, evidence: tuple[str, ...], note: str, *, is_benign: bool = False
) -> Finding:
    return Finding(
        rule=rule,
        group="trace",
        category="unknown",
        action="human" if culprit == Culprit() else "retry",
        culprit=culprit,
        confidence=confidence,
        evidence=evidence,
        rank=culprit.id if isinstance(culprit.id, int) else None,
        note=note,
        is_benign=is_benign,
    )


def _named(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    words = ", ".join(map(str, found[:8])) + (", …" if len(found) > 8 else "")
    return f"rank {words}" if len(found) == 1 else f"ranks {words}"
