"""What `status` and `incidents` say of the code that runs, where there is something to say."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.fake import STATUS
from cli.plans import known_job
from cli.served import Served, change, job
from evertrain.cli import processes
from evertrain.cli.main import main
from evertrain.controller.store import EventStore
from support.ladders import Job

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


def test_ranks_that_nobody_watches_are_no_job_that_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = known_job(tmp_path, "job")
    me = processes.identify(os.getpid())
    assert me is not None
    (run_dir / "processes").mkdir(exist_ok=True)
    processes_file = run_dir / "processes" / "keeper-node-0.json"
    processes_file.write_text(json.dumps(me._asdict()))
    ladder = Job()
    store = EventStore(run_dir / "events.db")
    asyncio.run(store.append(ladder.log))
    store.close()
    lonely = said(capsys, "status", "--job", "job", "--run-dir", str(tmp_path))
    assert "nobody watches it: `evertrain run` and the controller are gone" in "".join(lonely)
    processes_file.rename(run_dir / "processes" / "controller.json")
    silent = said(capsys, "status", "--job", "job", "--run-dir", str(tmp_path))
    assert "the controller does not answer; this is from its log" in " ".join(silent)


def test_incidents_take_the_name_of_a_job_and_a_number_in_any_order(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["GET /v1/incidents"] = [(200, [])]
    assert said(capsys, "incidents", "job") == ["job job has had no incident"]
    assert main(["incidents", "3", "job"]) == main(["incidents", "job", "3"]) == 1
    assert "job job has no incident 3" in capsys.readouterr().err


def test_an_incident_points_to_one_that_may_be_the_same_fault(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    def incident(number: int, cause: str, time: float, rank: int = 2, node: str = "node-0") -> Json:
        return {
            "id": number, "cause": cause, "time": time, "ranks": [rank], "nodes": [node], "attempt": 1, "step": 20,
            "action": "restart", "because": "", "open": False, "first_new_step": None, "seconds": {"failover": None},
            "category": "hang", "confidence": 0.8, "evidence": [],
        }  # fmt: skip

    stuck, hang = incident(1, "communication stuck (compute)", 1000.0), incident(2, "hang (loop)", 1008.0)
    elsewhere, later = incident(3, "hang", 1009.0, 0, "node-7"), incident(4, "hang", 1100.0)
    served.answers["GET /v1/incidents"] = [(200, [stuck, hang, elsewhere, later])]
    see = [" ".join(line.split()) for line in said(capsys, "incidents", "2") if "see also" in line]
    assert see == ["see also incident 1: rank 2 on node-0: communication stuck (compute)"]
