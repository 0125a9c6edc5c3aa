"""What `status` and `incidents` say of the code that runs, where there is something to say."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.fake import STATUS
from cli.served import Served, change, job
from evertrain.cli.main import main

Json = dict[str, Any]
PENDING = change(
    version=3, outcome="pending", urgent=False, latest=time.mktime((2026, 12, 1, 9, 13, 0, 0, 0, -1)), reason="",
)  # fmt: skip
WAITS = "pending: update to version 3 by ann@box; it comes with the next restart, at the latest 2026-12-01 09:13"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with job(tmp_path, monkeypatch) as made:
        made.answers = {"GET /v1/": [(200, [])], "GET /v1/status": [(200, STATUS)]}
        yield made


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main([*words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("different", "lines"),
    [
        ({}, []),
        ({"version": None, "change": None}, []),
        ({"version": 1, "change": None}, []),
        ({"version": 2, "change": None}, ["version 2 of the code runs"]),
        ({"version": 1, "change": PENDING}, ["version 1 of the code runs", WAITS]),
        ({"version": None, "change": PENDING}, ["the code as it was at the start runs", WAITS]),
    ],
)
def test_the_version_is_shown_where_there_was_or_will_be_a_change(
    served: Served, capsys: pytest.CaptureFixture[str], different: Json, lines: list[str]
) -> None:
    served.answers["GET /v1/status"] = [(200, {**STATUS, **different})]
    shown = said(capsys, "status")
    assert [line for line in shown if "version" in line or "the code" in line] == lines


def incident(**different: Any) -> Json:
    usual = {
        "id": 1, "attempt": 2, "time": 100.0, "cause": "ValueError", "category": "user_code", "ranks": [1],
        "nodes": ["node-0"], "step": 20, "action": "roll_back", "because": "a recent update", "confidence": 0.9,
        "evidence": [], "open": False, "first_new_step": 21, "from_version": 2, "to_version": 1,
        "seconds": {"detect": 0.1, "locate": 0.0, "failover": 0.2, "recompute": 0.3},
    }  # fmt: skip
    return {**usual, **different}


@pytest.mark.parametrize(
    ("different", "words"),
    [
        ({}, "roll back from version 2 to 1"),
        ({"action": "hot_update", "from_version": None, "to_version": 3}, "hot update to version 3"),
        ({"action": "restart"}, "restart"),
    ],
)
def test_an_incident_says_from_which_version_to_which(
    served: Served, capsys: pytest.CaptureFixture[str], different: Json, words: str
) -> None:
    served.answers["GET /v1/incidents"] = [(200, [incident(**different)])]
    assert f"  {words}  " in said(capsys, "incidents")[1]
    assert f"  action      {words}: a recent update" in said(capsys, "incidents", "1")


def test_an_incident_of_an_older_log_names_no_version(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    old = {key: value for key, value in incident().items() if not key.endswith("_version")}
    served.answers["GET /v1/incidents"] = [(200, [old])]
    assert "  action      roll back: a recent update" in said(capsys, "incidents", "1")
