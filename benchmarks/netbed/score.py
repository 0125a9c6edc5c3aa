"""Was it found, how soon, and was it the right one? What was true against what was said; pure.

A fault counts only where it was felt: the mean step in its time, by rank 0's own log, is 1.8 times the usual one, or
one step takes 3 s. What was said first within `LATE_S` of its end belongs to it; what is said at any other time is a
false trigger, and so is a second incident that names somebody else.

It is detected when the controller raises an alarm, which is before it has looked at all ranks; it is named when the
incident of the alarm can be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from typing import Any

LATE_S = 8.0
"""TCP needs some seconds to recover once a link is back; an incident of that time is of the same fault."""
FELT, FELT_STEP_S = 1.8, 3.0
NEAR_S = 8.0

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Truth:
    fault: str
    ranks: tuple[int, ...]
    began: float
    ended: float


@dataclass(frozen=True)
class Seen:
    """An incident as it was at some time, when it had changed."""

    time: float
    incident: Json


@dataclass(frozen=True)
class Verdict:
    """What an incident says of communication."""

    ranks: tuple[int, ...]
    component: str
    link: tuple[int, ...] = ()

    @property
    def is_named(self) -> bool:
        return bool(self.ranks) and self.component not in ("", "none")


@dataclass(frozen=True)
class Effect:
    """On the steps of rank 0, in seconds."""

    before: float
    during: float
    after: float
    longest: float
    ratio: float

    @property
    def is_felt(self) -> bool:
        return self.ratio >= FELT or self.longest >= FELT_STEP_S


@dataclass(frozen=True)
class Outcome:
    truth: Truth
    effect: Effect
    detected_s: float | None = None
    """From the fault to the alarm."""
    named_s: float | None = None
    """From there to the first verdict that names somebody and can be read,"""
    settled_s: float | None = None
    """... and to the last change of who and what is named."""
    first: Verdict | None = None
    last: Verdict | None = None


def verdict_of(incident: Json) -> Verdict | None:
    """None: it is not about communication."""
    component = incident.get("component")
    if not component:
        return None
    links = incident.get("links") or []
    link = tuple(links[0]) if links and all(isinstance(one, int) for one in links[0]) else ()
    return Verdict(tuple(sorted(incident["ranks"])), component, link)


def usual_step_s(steps: Sequence[float], truths: Sequence[Truth]) -> float:
    """Of the time in which nothing was wrong, nor had just been."""
    well = [
        end - begin
        for begin, end in _pairs(steps)
        if not any(begin < one.ended + LATE_S and end > one.began for one in truths)
    ]
    return mean(well) if well else 0.0


def effect(truth: Truth, steps: Sequence[float], usual_s: float) -> Effect:
    def between(first: float, last: float) -> list[float]:
        return [end - begin for begin, end in _pairs(steps) if begin < last and end > first]

    during = between(truth.began, truth.ended)
    before = between(truth.began - NEAR_S, truth.began - 1.0)
    after = between(truth.ended + LATE_S - 2, truth.ended + LATE_S + 4)
    # the last step may not have ended: then all there is is the time since it began
    slowest = max(during, default=truth.ended - max(steps[-1], truth.began) if steps else 0.0)
    average = mean(during) if during else slowest
    return Effect(
        mean(before) if before else 0.0, average, mean(after) if after else 0.0, slowest,
        average / usual_s if usual_s else 0.0,
    )  # fmt: skip


def judge(truth: Truth, of: Effect, alarms: Sequence[float], seen: Sequence[Seen]) -> Outcome:
    """By its first alarm, and its first incident about communication."""
    detected = min((time for time in alarms if _is_of(truth, time)), default=None)
    its = [one for one in seen if verdict_of(one.incident) is not None]
    first = {one.incident["id"]: one.time for one in reversed(its)}
    own = [id for id, time in first.items() if _is_of(truth, time)]
    if not own or detected is None:
        return Outcome(truth, of, detected - truth.began if detected is not None else None)
    incident = min(own, key=first.__getitem__)
    versions = [(one.time, verdict_of(one.incident)) for one in its if one.incident["id"] == incident]
    named = [(time, verdict) for time, verdict in versions if verdict is not None and verdict.is_named]
    last = versions[-1][1]
    settled = next(time for number, (time, _) in enumerate(versions) if all(v == last for _, v in versions[number:]))
    return Outcome(
        truth,
        of,
        detected_s=detected - truth.began,
        named_s=named[0][0] - detected if named else None,
        settled_s=settled - detected,
        first=named[0][1] if named else None,
        last=last,
    )


def is_localised(outcome: Outcome, *, is_network: bool) -> bool:
    """The rank is named alone; of a link the right pair is enough; of two ranks either is right, or both."""
    return outcome.last is not None and _is_right(outcome.last, outcome.truth, is_network)


def is_by_pair(outcome: Outcome) -> bool:
    return outcome.last is not None and not _alone(outcome.last, outcome.truth)


def is_first_right(outcome: Outcome, *, is_network: bool) -> bool:
    return outcome.first is not None and _is_right(outcome.first, outcome.truth, is_network)


def false_triggers(
    truths: Sequence[Truth], alarms: Sequence[float], seen: Sequence[Seen], nodes: Sequence[str]
) -> list[str]:
    """In words; `nodes` by rank."""
    found = [f"an alarm at {time:.1f}" for time in alarms if not any(_is_of(one, time) for one in truths)]
    first: dict[Any, float] = {}
    last: dict[Any, Json] = {}
    for one in seen:
        first.setdefault(one.incident["id"], one.time)
        last[one.incident["id"]] = one.incident
    judged: set[Truth] = set()
    for id, time in sorted(first.items(), key=lambda pair: pair[1]):
        incident = last[id]
        truth = next((one for one in truths if _is_of(one, time)), None)
        what = f"incident {id}: {incident['cause']}, ranks {incident['ranks']}, nodes {incident['nodes']}"
        if truth is None:
            found.append(f"{what}: nothing was wrong")
        elif truth in judged or verdict_of(incident) is None:
            # of the first about communication its outcome tells
            right = {nodes[rank] for rank in truth.ranks}
            if not set(incident["nodes"]) <= right:
                found.append(f"{what}: beside what is said of {truth.fault} at {truth.ranks}")
        else:
            judged.add(truth)
    return found


def figures(
    outcomes: Sequence[Outcome], is_network: Mapping[str, bool], components: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """Of the faults that count."""
    felt = [one for one in outcomes if one.effect.is_felt]
    found: dict[str, float] = {}
    if not outcomes:
        return found
    found["felt_fraction"] = len(felt) / len(outcomes)
    if not felt:
        return found
    localised = [is_localised(one, is_network=is_network[one.truth.fault]) for one in felt]
    right = [one.last is not None and one.last.component in components[one.truth.fault] for one in felt]
    found["localised_fraction"] = mean(localised)
    found["pair_fraction"] = mean(is_by_pair(one) and yes for one, yes in zip(felt, localised, strict=True))
    found["first_right_fraction"] = mean(is_first_right(one, is_network=is_network[one.truth.fault]) for one in felt)
    found["component_right_fraction"] = mean(right)
    detected = [one.detected_s for one in felt if one.detected_s is not None]
    found["detected_fraction"] = len(detected) / len(felt)
    if detected:
        found["detection_p50_s"], found["detection_p100_s"] = median(detected), max(detected)
    if named := [one.named_s for one in felt if one.named_s is not None]:
        found["rca_after_detection_p50_s"], found["rca_after_detection_p100_s"] = median(named), max(named)
    if settled := [one.settled_s for one in felt if one.settled_s is not None]:
        found["settled_after_detection_p100_s"] = max(settled)
    return found


def _is_right(verdict: Verdict, truth: Truth, is_network: bool) -> bool:
    if not verdict.is_named:
        return False
    return _alone(verdict, truth) or (is_network and len(verdict.link) == 2 and bool({*truth.ranks} & {*verdict.link}))


def _alone(verdict: Verdict, truth: Truth) -> bool:
    return bool(verdict.ranks) and set(verdict.ranks) <= set(truth.ranks)


def _is_of(truth: Truth, time: float) -> bool:
    return truth.began <= time <= truth.ended + LATE_S


def _pairs(steps: Sequence[float]) -> list[tuple[float, float]]:
    return list(pairwise(steps))
