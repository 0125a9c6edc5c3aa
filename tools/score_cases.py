"""How good are the verdicts on known cases? Scores `evertrain explain` by the rules that come with the cases.

Each figure stands alone; wrong evictions come first. With `--groups` every group of rules is switched off in turn,
which shows what each is worth and that none of them convicts hosts by its absence.

    python tools/score_cases.py [FILE.jsonl] [--without GROUP …] [--groups] [--json FILE] [--verbose]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from evertrain.detect.catalogue import Catalogue, build
from evertrain.locate import incident
from evertrain.model.findings import Verdict
from evertrain.model.signals import Signals
from evertrain.observe import rules

CASES = Path(__file__).resolve().parent.parent / "tests" / "data" / "cases" / "cases.jsonl"
IN_CODE = ("exits", "flight_recorder", "nic", "numbers", "ras", "stacks", "timeouts", "tracebacks", "xid")
"""Groups of rules that are functions, not lines of the catalogue."""
NAMED = ("host", "gpu", "nic", "link", "rack", "rank")

Case = dict[str, Any]


class Score:
    """The figures of one set of verdicts."""

    def __init__(self) -> None:
        self.wrong_evictions: list[str] = []
        self.category: list[tuple[str, str, str]] = []
        """(case, true, answered)."""
        self.action: list[tuple[str, str, str]] = []
        self.hosts: list[tuple[str, bool]] = []
        self.devices: list[tuple[str, bool]] = []
        self.injected: list[tuple[str, bool, str]] = []

    def add(self, case: Case, verdict: Verdict) -> None:
        truth, name = case["truth"], case["id"]
        culprit, text = truth["culprit"], json.dumps(case["signals"])
        is_named = culprit["type"] in NAMED and _occurs(culprit["id"], text)
        same_host = is_named and _same_host(culprit["id"], verdict.culprit.id, text)
        if verdict.action == "evict" and (
            truth["action"] != "evict" or (is_named and not same_host and verdict.culprit.id not in ("", ()))
        ):
            self.wrong_evictions.append(name)
        if truth["cause_confidence"] == "unknown":
            return
        if truth["category"].startswith("injected_"):
            self.injected.append((name, same_host, verdict.category))
        else:
            self.category.append((name, truth["category"], verdict.category))
        self.action.append((name, truth["action"], verdict.action))
        if is_named:
            self.hosts.append((name, same_host))
            rest = str(culprit["id"]).partition("/")[2]
            if same_host and rest and rest in text:
                self.devices.append((name, rest in str(verdict.culprit.id)))

    def figures(self) -> dict[str, float]:
        per_category: dict[str, list[bool]] = defaultdict(list)
        for _, true, answered in self.category:
            per_category[true].append(true == answered)
        return {
            "wrong_evictions": len(self.wrong_evictions),
            "category": _share(true == answered for _, true, answered in self.category),
            "category_mean": _share(_share(right) for right in per_category.values()),
            "action": _share(true == answered for _, true, answered in self.action),
            "host": _share(right for _, right in self.hosts),
            "device": _share(right for _, right in self.devices),
        }

    def confusion(self) -> Counter[tuple[str, str]]:
        return Counter((true, answered) for _, true, answered in self.action if true != answered)


def score(cases: Sequence[Case], catalogue: Catalogue) -> Score:
    found = Score()
    for case in cases:
        found.add(case, incident.explain(msgspec.convert(case["signals"], Signals), catalogue))
    return found


def load(path: Path) -> list[Case]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _occurs(name: Any, text: str) -> bool:
    """Names that stand nowhere in the signals, and descriptions, cannot be found."""
    if isinstance(name, (list, int)):
        return True
    host = name.partition("/")[0]
    return bool(host) and " " not in host and host in text


def _same_host(true: Any, answered: Any, text: str) -> bool:
    if isinstance(true, list):
        given = list(answered) if isinstance(answered, (list, tuple)) else [answered]
        return sorted(map(str, true)) == sorted(map(str, given))
    return str(true).partition("/")[0] == str(answered).partition("/")[0]


def _share(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed) if listed else 1.0


def _print(name: str, figures: dict[str, float]) -> None:
    shares = "  ".join(f"{key} {value:6.1%}" for key, value in figures.items() if key != "wrong_evictions")
    print(f"{name:<22} wrong evictions {figures['wrong_evictions']:.0f}  {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="?", type=Path, default=CASES)
    parser.add_argument("--without", action="append", default=[], metavar="GROUP", help="switch a group of rules off")
    parser.add_argument("--groups", action="store_true", help="switch off each group in turn")
    parser.add_argument("--verbose", action="store_true", help="name the cases that were answered otherwise")
    parser.add_argument("--json", type=Path, metavar="FILE")
    flags = parser.parse_args()
    cases = load(flags.cases)
    catalogue = build(rules.contents(), flags.without)
    whole = score(cases, catalogue)
    results = {"all": whole.figures()}
    _print(f"{len(cases)} cases", results["all"])
    for (true, answered), count in sorted(whole.confusion().items()):
        print(f"  action {true} answered as {answered}: {count}")
    if flags.verbose:
        for name, true, answered in (*whole.category, *whole.action):
            if true != answered:
                print(f"  {name}: {true}, answered {answered}")
        for name, right in whole.hosts:
            if not right:
                print(f"  {name}: another culprit")
    for name, right, category in whole.injected:
        print(f"  injected: {name}: ranks {'right' if right else 'wrong'}, category {category}")
    if flags.groups:
        for group in sorted({*(rule.group for rule in catalogue.rules), *IN_CODE}):
            results[f"without {group}"] = score(cases, catalogue.without([group])).figures()
            _print(f"without {group}", results[f"without {group}"])
    if flags.json:
        flags.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
