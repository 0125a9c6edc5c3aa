"""The verdicts on known cases, on the same cases retold, and with what is known of a whole category taken away."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from evertrain.detect.catalogue import Catalogue, build
from evertrain.locate import incident
from evertrain.model.findings import Verdict
from evertrain.model.signals import Line, Signals
from evertrain.observe import rules
from support.incidents import FORMS
from support.paraphrase import Paraphrase

ROOT = Path(__file__).resolve().parents[2]


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("score_cases", ROOT / "tools" / "score_cases.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["score_cases"] = module
    spec.loader.exec_module(module)
    return module


score_cases = _tool()
CASES: list[dict[str, Any]] = score_cases.load(score_cases.CASES)
CATALOGUE = build(rules.contents())
CATEGORIES = sorted({rule.category for rule in CATALOGUE.rules} - {"none", "unknown"})


def explain(signals: dict[str, Any], catalogue: Catalogue = CATALOGUE) -> Verdict:
    return incident.explain(msgspec.convert(signals, Signals), catalogue)


def test_figures_on_the_known_cases() -> None:
    figures = score_cases.score(CASES, CATALOGUE).figures()
    assert figures["wrong_evictions"] == 0
    assert figures["action"] >= 0.95
    assert figures["category"] >= 0.95
    assert figures["host"] >= 0.95
    assert figures["device"] >= 0.9


def test_ranks_of_injected_faults_are_found() -> None:
    assert all(right for _, right, _ in score_cases.score(CASES, CATALOGUE).injected)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_incident_told_otherwise_gives_the_same_verdict(seed: int) -> None:
    for case in CASES:
        told = Paraphrase(seed)
        other = explain(told.signals(case["signals"]))
        own = explain(case["signals"])
        assert (other.category, other.action) == (own.category, own.action), case["id"]
        assert other.culprit.type == own.culprit.type, case["id"]
        if own.culprit.type in score_cases.NAMED:
            renamed = json.loads(told.text(json.dumps(msgspec.to_builtins(own.culprit.id))))
            assert json.loads(msgspec.json.encode(other.culprit.id)) == renamed, case["id"]


@pytest.mark.parametrize("category", CATEGORIES)
def test_without_the_rules_of_a_category_nobody_else_is_convicted(category: str) -> None:
    poorer = Catalogue(rule for rule in CATALOGUE.rules if rule.category != category)
    assert score_cases.score(CASES, poorer).wrong_evictions == []


@pytest.mark.parametrize("group", sorted({*(rule.group for rule in CATALOGUE.rules), *score_cases.IN_CODE}))
def test_without_a_group_of_rules_nobody_else_is_convicted(group: str) -> None:
    assert score_cases.score(CASES, CATALOGUE.without([group])).wrong_evictions == []


def test_no_rule_is_made_for_one_case() -> None:
    """Each rule that matches a line of the cases also matches something that is in none of them."""
    lines = [line for case in CASES for line in (*case["signals"]["logs"], *case["signals"]["dmesg"])]
    seen = {_shape(line) for line in lines}
    firing = {found.rule for line in lines for found in CATALOGUE.look_at(Line(text=line, raw=line, order=0))}
    others = [line for _, signals, *_ in FORMS for line in (*signals.get("logs", ()), *signals.get("dmesg", ()))]
    others += [example for rule in CATALOGUE.rules for example in rule.examples]
    elsewhere = {
        found.rule
        for line in others
        if _shape(line) not in seen
        for found in CATALOGUE.look_at(Line(text=line, raw=line, order=0))
    }
    assert firing
    assert firing <= elsewhere


def _shape(line: str) -> str:
    return re.sub(r"\W+|\d+", " ", line).strip().lower()
