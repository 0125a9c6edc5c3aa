"""A machine is tested by hand: the exit code says how it is, and what is asked for wrongly says nothing about it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cli import served
from evertrain.cli import diagnose, examine, readings
from evertrain.cli.main import main
from evertrain.model.diagnosis import Inspected, InspectOrder, Reading
from support import jobs

NODE = os.uname().nodename


def check(outcome: Any, *found: Reading, program: str = "compute") -> dict[str, Any]:
    order = InspectOrder(number=1, ranks=1, program=program)
    result = Inspected(number=1, outcome=outcome, because="it says so", readings=found)
    return diagnose.check("here", "crash", program, order, result, {}, 1.0)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["passed", "absent"], 0), (["passed", "late"], 1), (["crashed"], 1), (["passed", "failed"], 2),
        (["late", "failed"], 2), (["absent"], 3), (["refused"], 3), ([], 3),
    ],
)  # fmt: skip
def test_the_worst_counts(outcomes: list[str], code: int) -> None:
    assert diagnose.worst([check(outcome) for outcome in outcomes]) == code


def test_a_machine_that_does_not_repeat_its_own_bits_is_broken() -> None:
    detail = {"runs": ["a", "b", "a"], "records": {}}
    one = check(
        "passed", Reading(rank=1, name="alignment", value=1.0, unit="s/step", detail=detail), program="alignment"
    )
    assert one["accused"] == {"here": "here: alignment: rank 1: 3 runs gave 2 results"}
    assert diagnose.worst([one]) == 2


@pytest.mark.parametrize(
    "words", [["--budget", "5"], ["--suite", "all"], ["--ranks", "0"], ["--python", "/no/such"], ["no-such-job"]]
)
def test_what_is_wrong_with_the_command_line_says_nothing_of_the_machine(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose", *words]) == 3
    seen = capsys.readouterr()
    assert not seen.out and seen.err.startswith("evertrain: ") and seen.err.count("\n") == 1


def test_without_torch_nothing_can_be_said(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    answer = jobs.evertrain(tmp_path, "diagnose", "--ranks", "1", "--python", python)
    assert answer.returncode == 3
    assert "UNKNOWN" in answer.stdout and "Traceback" not in answer.stderr


def test_a_machine_that_computes_wrongly_is_named_with_the_numbers(tmp_path: Path) -> None:
    environment = jobs.user_environment(tmp_path, {"EVERTRAIN_DIAGNOSE_FAULT": f"flip:node={NODE}"})
    words = ("diagnose", "--suite", "nan", "--ranks", "1", "--json")
    answer = jobs.evertrain(tmp_path, *words, environment=environment, timeout_s=90)
    assert answer.returncode == 2, answer.stderr
    found = json.loads(answer.stdout)
    assert [one["name"] for one in found["checks"]] == ["vendor diagnostics", "compute"]
    assert "elements are wrong" in found["checks"][1]["accused"][NODE]
    assert any(f"{NODE}: compute" in line for line in readings.lines(found["checks"]))


def test_numbers_are_shown_in_units_that_people_read() -> None:
    assert readings.number(2.5e9, "bytes/s") == "2.5 GB/s"
    assert readings.number(81.23456, "GFLOP/s") == "81.23 GFLOP/s"
    assert readings.number(12.0, "bytes/s") == "12 B/s"


# -- the nodes of a live job -------------------------------------------------------------------------------------------


def exam(*checks: dict[str, Any], outcome: str | None = "passed", because: str = "") -> dict[str, Any]:
    return {"over": outcome is not None, "outcome": outcome, "because": because, "checks": list(checks)}


def test_the_nodes_of_a_live_job_are_tested_by_its_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(examine, "POLL_S", 0.01)
    done, runs = check("passed"), {**check("passed", program="memory"), "seconds": None, "results": {}}
    with served.job(tmp_path, monkeypatch) as job:
        job.answers["POST /v1/exams"] = [(202, {"exam": 4})]
        job.answers["GET /v1/exams/4"] = [
            (404, {"error": "unknown"}), (200, exam(outcome=None)), (200, exam(done, runs, outcome=None)),
            (200, exam(done, check("failed", program="memory"))),
        ]  # fmt: skip
        assert main(["diagnose", "--nodes", "a, b", "--suite", "illegal-access", "--budget", "90s"]) == 2
        assert job.wish("/v1/exams") == {"nodes": ["a", "b"], "suite": "illegal_access", "budget_s": 90.0}
        out = capsys.readouterr().out
        assert out.count("compute: 1 passed in 1.0 s") == 1 and "CRITICAL - here: memory: it says so" in out
        job.answers["GET /v1/exams/4"] = [(200, exam(done))]
        assert main(["diagnose", "job", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["status"] == "ok"
        assert job.wish("/v1/exams")["nodes"] == []


@pytest.mark.parametrize(
    ("words", "answers", "said"),
    [
        (["job"], {"POST /v1/exams": (409, {"error": "it trains on a"})}, "job job is not tested: it trains on a"),
        (["job", "--ranks", "2"], {}, "--ranks and --python are for this machine"),
        (
            ["--nodes", "a"],
            {"POST /v1/exams": (202, {"exam": 1}), "GET /v1/exams": (200, exam(outcome="given_up", because="needed"))},
            "job job: the tests were given up: needed",
        ),
    ],
)
def test_where_they_are_not_tested_one_line_says_why(
    words: list[str],
    answers: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with served.job(tmp_path, monkeypatch) as job:
        job.answers = {name: [answer] for name, answer in answers.items()}
        assert main(["diagnose", *words]) == 3
        seen = capsys.readouterr()
        assert not seen.out and said in seen.err and seen.err.count("\n") == 1
        job.is_alive = False
        assert main(["diagnose", "--nodes", "a"]) == 3
        assert "does not run, so nobody reaches its nodes" in capsys.readouterr().err
