"""A collective did not finish: did the ranks call the same one? What the watchdogs of several ranks say together.

One watchdog proves nothing: its rank waited. Two that name different operations, sizes or sequence numbers in one
group prove that the ranks went different ways.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

from msgspec import Struct

from evertrain.model.findings import Culprit, Finding
from evertrain.model.signals import Line

WORDS = ("watchdog caught", "last enqueued", "but didn't join", "finished collective")

_CAUGHT = re.compile(
    r"(?:\[PG (?:ID )?(?P<pg>[^\]]*?) ?Rank \d+\] ?)?Watchdog caught collective operation timeout: WorkNCCL\("
    r"(?:SeqNum=(?P<seq>\d+), )?OpType=(?P<op>\w+)(?:, NumelIn=(?P<n_in>\d+), NumelOut=(?P<n_out>\d+))?"
)
_DESYNC = re.compile(
    r"\[(?P<rank>\d+)\] finished collective #(?P<done>\d+).*but didn't join collective #(?P<missing>\d+)"
)


class Work(Struct, frozen=True):
    rank: int
    group: str
    seq: int
    op: str
    sizes: tuple[int, int]
    line: Line


def judge(lines: Sequence[Line]) -> tuple[Finding, ...]:
    """The watchdogs' lines, in order."""
    works: dict[str, dict[int, Work]] = defaultdict(dict)
    absent: list[tuple[int, Line]] = []
    for line in lines:
        if found := _CAUGHT.search(line.raw):
            if line.rank is not None and found["seq"]:
                group = re.sub(r"\s+", " ", found["pg"] or "")
                works[group].setdefault(
                    line.rank,
                    Work(line.rank, group, int(found["seq"]), found["op"],
                         (int(found["n_in"] or 0), int(found["n_out"] or 0)), line),
                )  # fmt: skip
        elif found := _DESYNC.search(line.raw):
            absent.append((int(found["rank"]), line))
    findings = [finding for ranks in works.values() if (finding := _compare(list(ranks.values()))) is not None]
    if absent:
        rank, line = absent[0]
        findings.append(
            Finding(
                rule="desync-report",
                group="timeouts",
                category="unknown",
                action="human",
                culprit=Culprit("rank", rank),
                confidence=0.4,
                evidence=(line.quoted(),),
                order=line.order,
                rank=rank,
                is_symptom=True,
                note=f"rank {rank} did not join a collective that others wait in; why is not said",
            )
        )
    return tuple(findings)


def _compare(works: Sequence[Work]) -> Finding | None:
    for one in works:
        for other in works:
            if one.seq == other.seq and (one.op != other.op or one.sizes != other.sizes):
                what = "operation" if one.op != other.op else "size"
                return _mismatch(
                    one, other, 0.9, f"collective {one.seq} differs in {what} between ranks: they went different ways"
                )
    first, last = min(works, key=lambda work: work.seq), max(works, key=lambda work: work.seq)
    if first.seq != last.seq and first.op != last.op:
        told = f"rank {first.rank} is at {first.seq}, rank {last.rank} at {last.seq}, in different operations"
        return _mismatch(first, last, 0.75, told)
    return None


def _mismatch(one: Work, other: Work, confidence: float, note: str) -> Finding:
    return Finding(
        rule="collectives-differ", group="timeouts", category="user_code", action="user_code",
        culprit=Culprit("code", "ranks call different collectives"), confidence=confidence,
        evidence=(one.line.quoted(), other.line.quoted()), order=min(one.line.order, other.line.order), note=note,
    )  # fmt: skip
