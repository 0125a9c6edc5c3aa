"""What do we know about a line? Rules of one pattern each: what it means, who is meant, what should be done.

A rule judges a line by itself; what lines mean together is decided later, in `locate.verdict`. Patterns ignore case.
Named groups of a pattern fill in the culprit: `host`, `rank`, `device`, `peer` (somebody else's host). Rules `in:
metrics` look at facts in the form `path.to.key: value`, all others at lines of logs and kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
from msgspec import Struct

from evertrain.detect.gate import everywhere, trimmed, words_of
from evertrain.detect.prefixes import hosts_in
from evertrain.model.errors import UsageError
from evertrain.model.findings import Action, Category, Culprit, CulpritType, Finding
from evertrain.model.signals import Line

Kind = Literal["cause", "benign", "symptom"]


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    rule: str
    pattern: str
    category: Category
    action: Action
    confidence: float
    group: str = "user"
    """Rules that are switched on and off together."""
    kind: Kind = "cause"
    """`benign` is noise or watched only; a `symptom` follows from something else."""
    where: Literal["lines", "metrics"] = msgspec.field(default="lines", name="in")
    unless: str | None = None
    """A line that matches this as well is not meant."""
    culprit: CulpritType = "unknown"
    id: str = ""
    """A description of the culprit, for code, configuration, data, libraries, storage."""
    words: tuple[str, ...] = ()
    """One of them stands, in lower case, in every line that is meant; derived from the pattern where possible."""
    note: str = ""
    source: str = ""
    examples: tuple[str, ...] = ()


class _Compiled(Struct, frozen=True):
    rule: Rule
    words: tuple[str, ...]
    pattern: re.Pattern[str]
    unless: re.Pattern[str] | None


class Catalogue:
    """Rules, ready to be asked. Raises ValueError, naming the rule, where one cannot be used."""

    def __init__(self, rules: Iterable[Rule], *, left_out: Iterable[str] = ()) -> None:
        self.left_out = frozenset(left_out)
        """Groups that are switched off, of rules in code too."""
        self.rules = tuple(rule for rule in rules if rule.group not in self.left_out)
        compiled = [_compile(rule) for rule in self.rules]
        self._lines = tuple(one for one in compiled if one.rule.where == "lines")
        self._metrics = tuple(one for one in compiled if one.rule.where == "metrics")
        self.words = frozenset(word for one in self._lines for word in one.words)
        self._begins = everywhere(self.words) if self.words else None
        self._by_word: dict[str, list[_Compiled]] = {}
        for one in self._lines:
            for word in one.words:
                # a line is asked for the shortest word that begins at a place
                found = self._begins.match(word) if self._begins else None
                self._by_word.setdefault(found[1] if found else word, []).append(one)

    def without(self, groups: Iterable[str]) -> Catalogue:
        return Catalogue(self.rules, left_out=self.left_out | frozenset(groups))

    def look_at(self, line: Line) -> list[Finding]:
        """All that is known about this line."""
        low = line.raw.lower()
        if self._begins is None:
            return []
        asked = dict.fromkeys(self._begins.findall(low))
        rules = {one.rule.rule: one for word in asked for one in self._by_word[word]}
        return _look(rules.values(), low, line)

    def look_at_metric(self, line: Line) -> list[Finding]:
        return _look(self._metrics, line.raw.lower(), line)


def decode(content: Any, source: str) -> list[Rule]:
    """Rules as a data file holds them: `{group: [rule, …]}` or a list. `source` is named in errors."""
    grouped = content.items() if isinstance(content, dict) else (("user", content or []),)
    rules: list[Rule] = []
    for group, entries in grouped:
        for entry in entries or []:
            named = {"group": str(group), **entry} if isinstance(entry, dict) else entry
            try:
                rules.append(msgspec.convert(named, Rule))
            except msgspec.ValidationError as error:
                name = entry.get("rule", "?") if isinstance(entry, dict) else "?"
                raise ValueError(f"{source}: rule {name}: {error}") from error
    return rules


def build(contents: Iterable[tuple[Any, str]], without: Iterable[str] = ()) -> Catalogue:
    """One catalogue from what several sources hold; a later rule of the same name replaces an earlier one."""
    rules: dict[str, Rule] = {}
    try:
        for content, source in contents:
            rules.update((rule.rule, rule) for rule in decode(content, source))
        return Catalogue(rules.values()).without(without)
    except ValueError as error:
        raise UsageError(f"catalogue: {error}") from error


def _compile(rule: Rule) -> _Compiled:
    try:
        # facts are few: each is looked at
        words = ("",) if rule.where == "metrics" else rule.words or words_of(rule.pattern)
        pattern = re.compile(rule.pattern, re.IGNORECASE)
        unless = re.compile(rule.unless, re.IGNORECASE) if rule.unless else None
    except (re.error, ValueError) as error:
        raise ValueError(f"rule {rule.rule}: {error}") from error
    return _Compiled(rule, tuple(trimmed(word.lower()) for word in words), pattern, unless)


def _look(rules: Iterable[_Compiled], low: str, line: Line) -> list[Finding]:
    return [
        _finding(one.rule, found, line)
        for one in rules
        if any(word in low for word in one.words)
        and (found := one.pattern.search(line.raw))
        and not (one.unless and one.unless.search(line.raw))
    ]


def _finding(rule: Rule, found: re.Match[str], line: Line) -> Finding:
    named = found.groupdict()
    host = named.get("host") or named.get("peer") or line.host
    if host is None and rule.action == "evict" and rule.culprit == "host":
        inside = hosts_in(line.text)
        host = inside[0] if len(inside) == 1 else None
    rank = int(named["rank"]) if named.get("rank") else line.rank
    return Finding(
        rule=rule.rule,
        group=rule.group,
        category=rule.category,
        action=rule.action,
        culprit=_culprit(rule, host, rank, named.get("device")),
        confidence=rule.confidence,
        evidence=(line.quoted(),),
        time=line.clock,
        order=line.order,
        rank=rank,
        host=host,
        is_symptom=rule.kind == "symptom",
        is_benign=rule.kind == "benign",
        note=rule.note,
    )


def _culprit(rule: Rule, host: str | None, rank: int | None, device: str | None) -> Culprit:
    match rule.culprit:
        case "gpu" | "nic" | "link" | "switch":
            if host and device:
                return Culprit(rule.culprit, f"{host}/{device}")
            return Culprit("host", host) if host else Culprit("rank", rank) if rank is not None else Culprit("host", "")
        case "host":
            return Culprit("host", host) if host else Culprit("rank", rank) if rank is not None else Culprit("host", "")
        case "rank":
            return Culprit("rank", rank) if rank is not None else Culprit("host", host or "")
        case _:
            return Culprit(rule.culprit, rule.id)
