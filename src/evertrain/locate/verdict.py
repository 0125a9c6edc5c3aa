"""What is the cause, among hundreds of lines that only follow from it?

Findings are weighed, not counted: what says of itself that it follows is set aside, what happens to healthy jobs too is
mentioned, and of the rest the most certain one decides; among equals the first. A host is convicted only where the
hardware said so, or where it failed repeatedly, and never for what many hosts show at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec import Struct

from evertrain.model.findings import Category, Culprit, CulpritType, Finding, Verdict

ALIKE = 0.1
"""Findings of programs whose confidences differ by less are equals: the first in time is the cause."""
MANY_HOSTS = 3
MANY_PORTS = 2
"""Hosts: a link has two ends, and a switch many."""
NAMED_BY = 3
"""Hosts that must name the same silent peer before it is convicted on their word."""
SURE = 0.9
TRANSIENT = 0.7
"""Confidence below which a success after a restart outweighs what was found."""
MIN_SHOWN = 12
_SOFTWARE: frozenset[Category] = frozenset(
    ("user_code", "user_config", "framework_bug", "numerics", "oom_gpu", "oom_host", "data", "unknown", "none")
)  # fmt: skip
_ROLLBACK = "rollback_user_code"
_HISTORY = "failed-before"
_AGAIN = "fact-same-host"
_VAGUE_GROUPS = ("cuda", "xid", "exits", "library", "nccl", "network")
_RACK = re.compile(r"(?:^|[-_.])r(?:ack)?-?0*(\d+)(?=[-_.]|$)|rack-?0*(\d+)", re.IGNORECASE)


class Circumstances(Struct, frozen=True, kw_only=True):
    """What else is known about the incident."""

    died: bool
    """A process failed, or the job made no progress."""
    somebody_died_first: bool = False
    """An end that no other rank's end explains was seen."""
    moves_between_hosts: bool = False
    port_is_unused: bool = False
    """The network port that is spoken of carries no traffic of the job."""
    hosts_of_ranks: Mapping[int, str] = {}


def draw(findings: Sequence[Finding], known: Circumstances) -> Verdict:
    """The verdict from all findings of one incident."""
    findings = [_with_host(finding, known) for finding in findings]
    changes = [one for one in findings if one.action == _ROLLBACK]
    benign = [one for one in findings if one.is_benign]
    symptoms = [one for one in findings if one.is_symptom and not one.is_benign]
    causes = [one for one in findings if not (one.is_benign or one.is_symptom) and one.action != _ROLLBACK]
    # an exception without a rule of its own is what the line says, if a rule knows that
    followed = {one.order for one in symptoms if one.order}
    causes = [
        one for one in causes if not (one.group == "tracebacks" and one.confidence < 0.5 and one.order in followed)
    ]
    causes, set_aside = _weighed(causes, known)
    if blamed := _silent_peer(symptoms, known):
        causes.append(blamed)

    best = _with_rank(_choose(causes), causes)
    if best is None and symptoms:
        best = _choose_symptom(symptoms, known)
    if (
        changes
        and known.died
        and (best is None or best.category in _SOFTWARE)
        and (best is None or best.confidence < 0.98)
    ):
        best = _rolled_back(best, changes)
    if best is not None and best.action == "human" and best.confidence < TRANSIENT:
        best = _transient(best, causes)
    if best is None and benign:
        if known.died and not known.port_is_unused:
            return _not_enough(findings, benign)
        best = max(benign, key=lambda one: one.confidence)
        best = msgspec.structs.replace(best, category="none", action="none", culprit=Culprit("none"))
    if best is None:
        return _not_enough(findings, ()) if known.died and not known.port_is_unused else _healthy()
    return Verdict(
        category=best.category,
        action=best.action,
        culprit=best.culprit,
        confidence=round(best.confidence, 2),
        evidence=_evidence(best, findings),
        considered=tuple(_considered(best, findings, set_aside)),
        summary=best.note or best.rule,
    )


def _weighed(causes: Iterable[Finding], known: Circumstances) -> tuple[list[Finding], dict[str, str]]:
    """Take back what accuses a host without right."""
    kept: list[Finding] = []
    set_aside: dict[str, str] = {}
    causes = list(causes)
    hosts: dict[str, set[str]] = {}
    for one in causes:
        if one.action == "evict" and one.host:
            hosts.setdefault(one.rule, set()).add(one.host)
    present = {one.host for one in causes if one.action == "evict" and one.host and one.rule != _HISTORY}
    for one in causes:
        if one.action != "evict":
            kept.append(one)
        elif one.rule == _HISTORY and (not known.died or (present and one.host not in present)):
            set_aside[one.rule] = "nothing points at this host now"
        elif len(hosts.get(one.rule, ())) >= (MANY_PORTS if one.category == "network_ib" else MANY_HOSTS):
            kept.append(_many_hosts(one, [other for other in causes if other.rule == one.rule]))
        elif known.port_is_unused and one.category == "network_ib" and one.group in ("nic", "facts"):
            set_aside[one.rule] = "the port carries no traffic of the job"
        elif one.rule == _AGAIN and any(_explains_itself(other) for other in causes):
            set_aside[one.rule] = "the error explains itself on any host"
        elif known.moves_between_hosts and one.confidence < SURE:
            set_aside[one.rule] = "the failure moves between hosts"
        elif one.confidence < 0.8 and not (one.host or one.rank is not None or _names_somebody(one.culprit)):
            kept.append(msgspec.structs.replace(one, action="human", note=f"{one.note or one.rule}; no host is named"))
        else:
            kept.append(one)
    return kept, set_aside


def _explains_itself(one: Finding) -> bool:
    """A program's own error: where it happens says nothing about the machine."""
    return one.action in ("user_code", "storage", "retry") and one.group not in _VAGUE_GROUPS and one.confidence >= 0.55


def _names_somebody(culprit: Culprit) -> bool:
    return culprit.id not in ("", (), None)


def _many_hosts(one: Finding, same: Sequence[Finding]) -> Finding:
    """Many hosts with one fault have something in common that is no host: a rack, a switch, a driver."""
    ordered = sorted(same, key=lambda other: (other.time if other.time is not None else 0.0, other.order))
    racks = [_rack(other.host or "") for other in ordered]
    if one.category == "nvlink_fabric" and all(racks):
        return msgspec.structs.replace(
            one, culprit=Culprit("rack", f"rack-{racks[0]}"), host=None, confidence=0.85,
            note=f"{one.note}; first seen in rack {racks[0]}, then on {len({o.host for o in same})} hosts",
        )  # fmt: skip
    kind: CulpritType = "switch" if one.category in ("network_ib", "nvlink_fabric") else "library"
    hosts = ", ".join(dict.fromkeys(other.host or "" for other in ordered))
    return msgspec.structs.replace(
        one, action="human", culprit=Culprit(kind, f"shared by {hosts}"), host=None,
        note=f"{one.note}; on {len({o.host for o in same})} hosts at once, so no single host is at fault",
    )  # fmt: skip


def _rack(host: str) -> str | None:
    found = _RACK.search(host)
    return (found[1] or found[2]) if found else None


def _with_host(one: Finding, known: Circumstances) -> Finding:
    """A rank to be evicted is a host, where it is known which."""
    if one.action != "evict":
        return one
    if one.culprit.type == "rank" and isinstance(one.culprit.id, int):
        host = one.host or known.hosts_of_ranks.get(one.culprit.id)
        return msgspec.structs.replace(one, culprit=Culprit("host", host), host=host) if host else one
    if one.culprit.type == "host" and not one.culprit.id and one.host:
        return msgspec.structs.replace(one, culprit=Culprit("host", one.host))
    return one


def _silent_peer(symptoms: Sequence[Finding], known: Circumstances) -> Finding | None:
    """A peer that several hosts say is silent, while nobody died."""
    if known.somebody_died_first:
        return None
    named = [one for one in symptoms if one.rule == "ib-completion" and one.host]
    counted = Counter(one.host for one in named)
    if not counted:
        return None
    host, count = counted.most_common(1)[0]
    reporters = {line.split(":", 1)[0] for one in named if one.host == host for line in one.evidence}
    if len(reporters) < NAMED_BY or count < 0.8 * sum(counted.values()):
        return None
    first = next(one for one in named if one.host == host)
    return msgspec.structs.replace(
        first, action="evict", confidence=0.6, is_symptom=False, culprit=Culprit("host", host or ""),
        note=f"{len(reporters)} others lost this host on InfiniBand, and nobody died",
    )  # fmt: skip


def _choose(causes: Sequence[Finding]) -> Finding | None:
    if not causes:
        return None
    best = max(causes, key=lambda one: (one.confidence, _names_somebody(one.culprit), -one.order))
    if best.action == "evict" and not _names_somebody(best.culprit):
        # the same said with a name is worth more
        named = [one for one in causes if one.action == "evict" and one.category == best.category
                 and one.confidence > best.confidence - ALIKE and _names_somebody(one.culprit)]  # fmt: skip
        return max(named, key=lambda one: (one.confidence, -one.order)) if named else best
    if best.action == "evict" or best.order == 0:
        return best
    rivals = [
        one
        for one in causes
        if one.action != "evict" and 0 < one.order < best.order and one.confidence > best.confidence - ALIKE
        and one.confidence >= 0.55
    ]  # fmt: skip
    return min(rivals, key=lambda one: one.order) if rivals else best


def _with_rank(best: Finding | None, causes: Sequence[Finding]) -> Finding | None:
    """Native code crashed: the launcher may know in which rank."""
    if best is None or best.culprit.type != "library" or best.rank is not None:
        return best
    told = next((one for one in causes if one.group == "exits" and one.category == best.category), None)
    return msgspec.structs.replace(best, culprit=told.culprit) if told and told.culprit.type == "rank" else best


def _choose_symptom(symptoms: Sequence[Finding], known: Circumstances) -> Finding:
    best = max(symptoms, key=lambda one: (one.confidence, -one.order))
    if best.category == "network_ib":
        named = Counter(one.host for one in symptoms if one.category == "network_ib" and one.host)
        host = named.most_common(1)[0][0] if named else None
        best = msgspec.structs.replace(
            best, culprit=Culprit("host", host) if host else Culprit(), category="network_ib",
            note=f"{best.note}; this alone does not say which: try elsewhere, and look at {host or 'the network'}",
        )  # fmt: skip
    return best


def _transient(best: Finding, causes: Sequence[Finding]) -> Finding:
    """What went away by itself, and is not understood, may be tried again."""
    told = next((one for one in causes if one.rule == "fact-retry-worked"), None)
    if told is None:
        return best
    return msgspec.structs.replace(
        best, action="retry", evidence=(*best.evidence, *told.evidence), note=f"{best.note}; {told.note}"
    )


def _rolled_back(best: Finding | None, changes: Sequence[Finding]) -> Finding:
    change = max(changes, key=lambda one: one.confidence)
    if best is None or best.category in ("unknown", "none"):
        return change
    return msgspec.structs.replace(
        best, action=_ROLLBACK, confidence=max(best.confidence, change.confidence) - 0.05,
        evidence=(*best.evidence, *change.evidence), note=f"{best.note}; it came with a recent change",
    )  # fmt: skip


def _not_enough(findings: Sequence[Finding], benign: Sequence[Finding]) -> Verdict:
    return Verdict(
        category="unknown", action="human", confidence=0.1,
        evidence=tuple(line for one in benign[:3] for line in one.evidence),
        considered=tuple((one.rule, "happens to healthy jobs too") for one in _unique(benign)),
        summary="not enough evidence: nothing that was read says what failed",
    )  # fmt: skip


def _healthy() -> Verdict:
    return Verdict(category="none", action="none", culprit=Culprit("none"), confidence=0.5, summary="nothing is wrong")


def _evidence(best: Finding, findings: Sequence[Finding]) -> tuple[str, ...]:
    same = [
        one
        for one in findings
        if one.rule == best.rule or (one.host and one.host == best.host and one.action == best.action)
    ]
    lines = dict.fromkeys(line for one in (best, *same) for line in one.evidence if line)
    return tuple(lines)[:MIN_SHOWN]


def _considered(best: Finding, findings: Sequence[Finding], set_aside: Mapping[str, str]) -> Iterable[tuple[str, str]]:
    for one in _unique(findings):
        if one.rule == best.rule:
            continue
        if reason := set_aside.get(one.rule):
            yield one.rule, reason
        elif one.is_benign:
            yield one.rule, f"no cause: {one.note}" if one.note else "happens to healthy jobs too"
        elif one.is_symptom:
            yield one.rule, f"follows from something else: {one.note}" if one.note else "follows from something else"
        elif one.action == best.action and one.category == best.category:
            yield one.rule, "says the same"
        elif one.confidence > best.confidence - ALIKE:
            yield one.rule, "came later"
        else:
            yield one.rule, f"less certain ({one.confidence:.2f})"


def _unique(findings: Sequence[Finding]) -> list[Finding]:
    seen: dict[str, Finding] = {}
    for one in findings:
        seen.setdefault(one.rule, one)
    return list(seen.values())
