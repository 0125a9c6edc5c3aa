"""A machine is tested by hand: the exit code says how it is, and what is asked for wrongly says nothing about it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from evertrain.cli import diagnose, readings
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
