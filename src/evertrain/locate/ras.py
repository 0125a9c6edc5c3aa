"""What does NCCL's own watch (RAS) say about the ranks of a communicator?

The text and the JSON of `ncclras`. One look at running ranks proves little: they never are at the same operation. Only
counts that are the same in a second look show a hang, and then those that are *behind* are the suspects, while RAS
lists whichever side is the smaller. Processes that do not answer are missing at once.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from evertrain.model.findings import Action, Category, Culprit, Finding

_GROUP = "ras"


class Member(msgspec.Struct, frozen=True):
    """A rank of a communicator, or a process, as RAS names it."""

    rank: int | None = None
    host: str = ""
    gpus: str = ""
    says: str = ""
    """What RAS says of it: its state, its error."""

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.rank is not None else "process"
        where = f" on {self.host}" if self.host else ""
        return f"{who}{where}{f' (GPU {self.gpus})' if self.gpus else ''}{f': {self.says}' if self.says else ''}"


class Level(msgspec.Struct, frozen=True):
    """Ranks of a communicator that have launched the same number of operations of one kind."""

    launched: int
    count: int
    listed: tuple[Member, ...] = ()
    """Who they are; RAS names only the few."""


class Look(msgspec.Struct, frozen=True):
    """One report."""

    ranks: int = 0
    """Of the largest communicator."""
    levels: dict[tuple[str, str], tuple[Level, ...]] = {}
    """{(communicator, operation): levels}, where the counts differ."""
    dead: tuple[Member, ...] = ()
    silent: tuple[Member, ...] = ()
    """Did not answer; not yet given up."""
    left: tuple[Member, ...] = ()
    """Their state of the communicator is another than that of the most."""
    failed: tuple[Member, ...] = ()
    lines: tuple[str, ...] = ()


def judge(lines: Sequence[str], facts: Mapping[str, Any] | None = None) -> tuple[Finding, ...]:
    """What one or several reports, in the order in which they were taken, say."""
    looks = read(lines)
    if not looks:
        return ()
    last = looks[-1]
    found = [*_missing(last), *_failed(last), *_left(last)]
    if last.levels:
        unchanged = {
            key for key, levels in last.levels.items() if any(look.levels.get(key) == levels for look in looks[:-1])
        }
        if not unchanged and _is_told_to_stand(facts or {}):
            unchanged = set(last.levels)
        if unchanged:
            found += [_behind(last, key) for key in sorted(unchanged)][:4]
        elif not found:
            times = "a single look" if len(looks) == 1 else f"{len(looks)} looks"
            note = (
                f"ranks at different operations in {times}: healthy ranks are, too, unless a second look shows the same"
            )
            found.append(_finding("ras-moving", "none", "none", 0.6, Culprit("none"), last.lines, note, is_benign=True))
    if not found:
        note = "RAS reports nothing wrong"
        found.append(_finding("ras-ok", "none", "none", 0.3, Culprit("none"), last.lines[-3:], note, is_benign=True))
    return tuple(found)


def is_report(text: str) -> bool:
    """Whether this is the output of `ncclras`."""
    return bool(_TABLE.search(text) or _BANNER.search(text) or ('"missing_ranks"' in text and '"communicators' in text))


def _behind(look: Look, key: tuple[str, str]) -> Finding:
    levels = sorted(look.levels[key], key=lambda level: level.launched)
    front = levels[-1]
    behind = levels[:-1]
    listed = tuple(one for level in behind for one in level.listed)
    count = sum(level.count for level in behind)
    which = f"{key[1]} of communicator {key[0]}"
    if listed and len(listed) == count and count <= front.count:
        note = f"{count} ranks stay behind in {which}, in every look: {front.count} wait for them"
        culprit = _culprit(listed, look)
        return _finding("ras-behind", "unknown", "retry", 0.6, culprit, look.lines, note, listed)
    note = f"{count} ranks stay behind in {which}, in every look; they are too many, or not listed"
    return _finding("ras-behind", "unknown", "human", 0.4, Culprit(), look.lines, note)


def _missing(look: Look) -> Iterator[Finding]:
    for members, word in ((look.dead, "dead"), (look.silent, "silent")):
        if not members:
            continue
        hosts = Counter(one.host for one in members if one.host)
        note = f"{len(members)} processes are {word} to RAS: {', '.join(str(one) for one in members[:4])}"
        if word == "dead" and len(hosts) == 1 and len(members) > 1:
            # all processes of one machine at once
            (host,) = hosts
            yield _finding("ras-dead-host", "host_os", "evict", 0.55, Culprit("host", host), look.lines, note, members)
            continue
        culprit = _culprit(members, look)
        yield _finding(f"ras-{word}", "unknown", "retry", 0.5, culprit, look.lines, note, members)


def _failed(look: Look) -> Iterator[Finding]:
    own = [one for one in look.failed if not re.search("remote", one.says, re.IGNORECASE)]
    if own:
        note = f"NCCL failed on {', '.join(str(one) for one in own[:4])}"
        yield _finding("ras-error", "unknown", "retry", 0.45, _culprit(own, look), look.lines, note, own)
    elif look.failed:
        note = f"{len(look.failed)} ranks lost a peer"
        yield _finding("ras-peers", "unknown", "retry", 0.2, Culprit(), look.lines, note, is_symptom=True)


def _left(look: Look) -> Iterator[Finding]:
    if look.left and not look.dead:
        note = f"in another state than the others: {', '.join(str(one) for one in look.left[:4])}"
        yield _finding("ras-left", "unknown", "retry", 0.4, _culprit(look.left, look), look.lines, note, look.left)


def _culprit(members: Sequence[Member], look: Look) -> Culprit:
    """Positions in a communicator are ranks of the job only in the one that spans it, which is the largest."""
    ranks = tuple(sorted({one.rank for one in members if one.rank is not None}))
    if ranks:
        return Culprit("rank", ranks[0] if len(ranks) == 1 else ranks)
    hosts = sorted({one.host for one in members if one.host})
    return Culprit("host", hosts[0]) if len(hosts) == 1 else Culprit()


_STANDS = re.compile(
    r"unchanged|not change|no change|same counts?|not mov|no progress|frozen|stuck|identical", re.IGNORECASE
)


def _is_told_to_stand(facts: Mapping[str, Any]) -> bool:
    return any(
        _STANDS.search(f"{key} {value}") and str(value).lower() not in ("false", "no", "0", "none")
        for key, value in facts.items()
        if re.search(r"ras|quer|sampl|look|count|repeat", f"{key} {value}", re.IGNORECASE)
    )


def _finding(
    rule: str,
    category: Category,
    action: Action,
    confidence: float,
    culprit: Culprit,
    lines: Iterable[str],
    note: str,
    members: Sequence[Member] = (),
    *,
    is_symptom: bool = False,
    is_benign: bool = False,
) -> Finding:
    hosts = {one.host for one in members if one.host}
    return Finding(
        rule=rule,
        group=_GROUP,
        category=category,
        action=action,
        culprit=culprit,
        confidence=confidence,
        evidence=tuple(lines)[:12],
        rank=culprit.id if culprit.type == "rank" and isinstance(culprit.id, int) else None,
        host=next(iter(hosts)) if len(hosts) == 1 else None,
        is_symptom=is_symptom,
        is_benign=is_benign,
        note=note,
    )


# --- reading

_TABLE = re.compile(r"^\s*Group\s+Comms\s+Nodes\s+Ranks", re.MULTILINE)
_BANNER = re.compile(r"^\s*Communicators\.\.\.|^#\d+-\d+ \([0-9a-f]+\) (?:MISMATCH|INCOMPLETE|ERROR)", re.MULTILINE)
_ROW = re.compile(
    r"^\s*\d+\s+\d+\s+\d+\s+\d+(?:-\d+)?\s+(?P<ranks>\d+)\s+\d+\s+(?P<status>[A-Z]+)\s+(?P<errors>[A-Z,]+)$"
)
_COMMUNICATOR = re.compile(r"^#\d+-\d+ \((?P<hash>[0-9a-f]+)\) (?P<what>[A-Z]+)")
_COUNTS = re.compile(r"^Communicator ranks have different (?:(?P<operation>\w+) operation counts|(?P<status>status))")
_MANY = re.compile(
    r"^(?P<count>\d+) ranks (?:have (?:launched up to operation (?P<launched>\d+)|(?P<none>not launched any)"
    r"|status (?P<status>\w+))|reported (?P<error>.+))"
)
_MEMBER = re.compile(
    r"^(?:Rank (?P<rank>\d+)|Process (?P<pid>\d+) on node (?P<node>\S+) managing)"
    r"(?: has launched up to operation (?P<launched>\d+)| has (?P<none>not launched any operations)"
    r"| has status (?P<status>\w+)| reported (?P<error>.+?))?(?: --)?(?: GPUs? (?P<gpus>[\d,]+)(?: \(NVML [\d,]+\))?)?"
    r"(?: managed by process \d+ on node (?P<host>\S+))?"
)


class _Report:
    def __init__(self) -> None:
        self.section, self.communicator, self.operation = "", "", ""
        self.many: int | None = None
        self.about = ""
        self.ranks = 0
        self.levels: dict[tuple[str, str], list[Level]] = defaultdict(list)
        self.dead: list[Member] = []
        self.silent: list[Member] = []
        self.left: list[Member] = []
        self.failed: list[Member] = []
        self.lines: list[str] = []
        self.states = 0

    def look(self) -> Look:
        return Look(
            self.ranks, {key: tuple(found) for key, found in self.levels.items()}, tuple(self.dead), tuple(self.silent),
            tuple(self.left), tuple(self.failed), tuple(self.lines[:40]),
        )  # fmt: skip

    def take(self, line: str) -> None:
        text = line.strip()[:2_000]
        if row := _ROW.match(line):
            self.ranks = max(self.ranks, int(row["ranks"]))
            if row["errors"] != "OK":
                self.lines.append(text)
        elif found := _COMMUNICATOR.match(text):
            self.section, self.communicator, self.operation = found["what"], found["hash"], ""
            self.lines.append(text)
        elif text in ("INCOMPLETE", "DEAD", "TIMEOUT"):
            self.section = text
            self.lines.append(text)
        elif found := _COUNTS.match(text):
            self.operation = found["operation"] or "status"
            self.states = 0
            self.lines.append(text)
        elif self.section and (found := _MANY.match(text)):
            self._many(found, text)
        elif self.section and (found := _MEMBER.match(text)):
            self._member(found, text)

    def _many(self, found: re.Match[str], text: str) -> None:
        self.lines.append(text)
        if found["launched"] or found["none"]:
            level = Level(int(found["launched"] or 0), int(found["count"]))
            self.levels[self.communicator, self.operation].append(level)
        elif found["status"]:
            self.states += 1
        self.about = found["status"] or found["error"] or ""

    def _member(self, found: re.Match[str], text: str) -> None:
        self.lines.append(text)
        says = found["status"] or found["error"] or ""
        rank = int(found["rank"]) if found["rank"] else None
        member = Member(rank, found["host"] or found["node"] or "", found["gpus"] or "", says or self.about)
        if self.section == "DEAD":
            self.dead.append(msgspec.structs.replace(member, says=""))
        elif self.section == "INCOMPLETE":
            self.silent.append(msgspec.structs.replace(member, says=""))
        elif self.section == "ERROR":
            self.failed.append(member)
        elif self.operation == "status":
            # the first state that is listed is that of the most
            if self.states > 1 or says:
                self.left.append(member)
        elif found["launched"] or found["none"]:
            self.levels[self.communicator, self.operation].append(Level(int(found["launched"] or 0), 1, (member,)))
        elif levels := self.levels.get((self.communicator, self.operation)):
            last = levels[-1]
            levels[-1] = Level(last.launched, last.count, (*last.listed, member))


def read(lines: Sequence[str]) -> tuple[Look, ...]:
    """Every report in `lines`, in order."""
    text = "\n".join(lines)
    if text.lstrip().startswith("{"):
        return tuple(_read_json(text))
    reports: list[_Report] = []
    current: _Report | None = None
    for line in lines:
        if _TABLE.match(line) or (current is None and _BANNER.match(line.strip())):
            current = _Report()
            reports.append(current)
        if current is not None:
            current.take(line)
    return tuple(_merge_silent(one).look() for one in reports)


def _merge_silent(report: _Report) -> _Report:
    """A process that does not answer is listed once as a process and once for each communicator: the rank says more."""
    for members in (report.silent, report.dead):
        if any(one.rank is not None for one in members):
            members[:] = list(dict.fromkeys(one for one in members if one.rank is not None))
    return report


def _read_json(text: str) -> Iterator[Look]:
    decoder_text = text.strip()
    try:
        documents = [msgspec.json.decode(decoder_text)]
    except (msgspec.MsgspecError, RecursionError):
        try:
            documents = [msgspec.json.decode(part) for part in re.split(r"(?m)(?<=^\})\s*$\s*(?=^\{)", decoder_text)]
        except (msgspec.MsgspecError, RecursionError):
            return
    for document in documents:
        communicators = document.get("communicators") if isinstance(document, Mapping) else None
        if isinstance(communicators, list):
            yield _look_at_json(_mappings(communicators))


def _look_at_json(communicators: list[Mapping[str, Any]]) -> Look:
    levels: dict[tuple[str, str], tuple[Level, ...]] = {}
    missing: dict[bool, dict[Member, None]] = {True: {}, False: {}}
    failed: dict[Member, None] = {}
    largest = 0
    for one in communicators:
        ranks, absent = _mappings(one.get("ranks")), _mappings(one.get("missing_ranks"))
        largest = max(largest, len(ranks) + len(absent))
        by_count: dict[str, dict[int, list[Member]]] = defaultdict(lambda: defaultdict(list))
        for rank in ranks:
            for told in rank.values():
                if isinstance(told, Mapping):
                    for operation, count in told.items():
                        if isinstance(count, int) and not isinstance(count, bool) and operation[:1].isupper():
                            by_count[operation][count].append(_json_member(rank))
            status = rank.get("status")
            error = status.get("async_error") if isinstance(status, Mapping) else None
            if error not in (None, 0, 7, "", "OK", "ncclSuccess", "ncclInProgress", "No error"):
                failed[msgspec.structs.replace(_json_member(rank), says=str(error))] = None
        for operation, counts in by_count.items():
            if len(counts) > 1:
                key = (str(one.get("hash") or one.get("comm_hash") or one.get("id") or ""), operation)
                levels[key] = tuple(Level(count, len(who), tuple(who)) for count, who in sorted(counts.items()))
        for rank in absent:
            status = rank.get("status")
            dead = isinstance(status, Mapping) and status.get("considered_dead") is True
            missing[dead][_json_member(rank)] = None
    lines = [
        f"{key[1]} of {key[0]}: {level.count} ranks at {level.launched}"
        for key, found in levels.items()
        for level in found
    ]
    lines += [str(one) for found in missing.values() for one in found]
    return Look(largest, levels, tuple(missing[True]), tuple(missing[False]), (), tuple(failed), tuple(lines[:40]))


def _mappings(told: Any) -> list[Mapping[str, Any]]:
    return [one for one in told if isinstance(one, Mapping)] if isinstance(told, list) else []


def _json_member(told: Mapping[str, Any]) -> Member:
    rank, host, gpu = told.get("rank"), told.get("host"), told.get("cuda_dev")
    return Member(rank if isinstance(rank, int) else None, str(host or ""), str(gpu) if gpu is not None else "")
