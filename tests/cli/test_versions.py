"""`evertrain versions`: the table, what is pending, who tried what; and the same as JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cli.served import Served, change, job, version
from evertrain.cli import narrate, versions
from evertrain.cli.main import main

Json = dict[str, Any]
LATEST = time.mktime((2026, 12, 1, 9, 13, 0, 0, 0, -1))
WAITS = change(version=3, parent=1, outcome="pending", back=False, urgent=False, latest=LATEST)
SEEN = {
    "versions": [
        version(args=["--lr", "3"], proven=True),
        version(2, source="/home/ann/other", runs=False, outcome="rolled_back", args=["--lr", "3"], reason="fix loss"),
        version(3, runs=False, outcome="pending", first_step=None, last_step=None, args=["--lr", "3"]),
    ],
    "changes": [change(outcome="rolled_back", because="rank 1: nan"), WAITS],
}
AUDIT = [
    {
        "time": 100.0, "act": "upload", "author": "ann@box", "address": "127.0.0.1", "outcome": "refused",
        "detail": "a path that leads out",
    }
]  # fmt: skip


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with job(tmp_path, monkeypatch) as made:
        made.answers = {"GET /v1/versions": [(200, SEEN)], "GET /v1/audit": [(200, AUDIT)]}
        yield made


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["versions", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def columns(line: str) -> list[str]:
    return [part.strip() for part in line.split("  ") if part.strip()]


def test_the_table(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    head, first, second, third, pending = said(capsys, "job").splitlines()
    day = narrate.day(100.0)
    assert columns(head) == ["version", "digest", "when", "who", "from", "steps", "state", "reason"]
    assert columns(first) == ["* 1", "1" * 12, day, "ann@box", "/home/ann/train", "1–50", "running, proven"]
    assert columns(second) == [
        "2", "2" * 12, day, "ann@box", "/home/ann/other", "1–50", "rolled back: rank 1: nan", "fix loss"
    ]  # fmt: skip
    assert columns(third)[-3:] == ["/home/ann/train", "-", "pending until 2026-12-01 09:13"]
    assert pending == (
        "pending: update to version 3 by ann@box: fix loss; it comes with the next restart, at the latest "
        "2026-12-01 09:13"
    )


def test_a_time_that_is_not_known_is_not_now(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers["GET /v1/versions"] = [(200, {"versions": [version(time=None, author="")], "changes": []})]
    assert columns(said(capsys).splitlines()[1])[2:5] == ["-", "-", "/home/ann/train"]


def test_the_same_code_with_other_arguments_says_which(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    other = [version(), version(2, digest="1" * 64, args=["--lr", "a b"], env=["SEED"], runs=False)]
    served.answers["GET /v1/versions"] = [(200, {"versions": other, "changes": []})]
    assert columns(said(capsys).splitlines()[2])[4] == "arguments: --lr 'a b'; environment: SEED"


def test_json_is_what_the_controller_says(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(capsys, "--json")) == SEEN
    assert json.loads(said(capsys, "--json", "--audit")) == AUDIT


def test_the_audit(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    _, line = said(capsys, "--audit").splitlines()
    assert columns(line) == [
        narrate.day(100.0), "upload", "ann@box", "127.0.0.1", "refused", "a path that leads out"
    ]  # fmt: skip
    entry = {**AUDIT[0], "detail": f"{'ab' * 32}: {'a long reason, ' * 30}"}
    served.answers["GET /v1/audit"] = [(200, [entry])]
    _, line = said(capsys, "--audit").splitlines()
    assert columns(line)[4:] == ["refused", f"{'ab' * 6}: {'a long reason, ' * 30}".rstrip()], "nothing is cut off"
    served.answers["GET /v1/audit"] = [(200, [])]
    assert said(capsys, "--audit") == "job job: nobody has tried to have other code run\n"


def test_before_there_is_a_version(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers["GET /v1/versions"] = [(200, {"versions": [], "changes": []})]
    assert said(capsys) == "job job: nothing of its code has been captured yet\n"


@pytest.mark.parametrize(
    ("different", "because", "words"),
    [
        ({"runs": True}, "", "running"),
        ({"runs": True, "proven": True, "outcome": "applied"}, "", "running, proven"),
        ({"outcome": "applied"}, "", "earlier"),
        ({"outcome": "proven", "proven": True}, "", "earlier, proven"),
        ({"outcome": "dropped"}, "no space", "dropped: no space"),
        ({"outcome": "superseded", "attempts": []}, "", "superseded"),
        ({"outcome": "superseded"}, "another change", "earlier"),
        ({"runs": True, "problem": "too large", "digest": ""}, "", "running, not captured: too large"),
    ],
)
def test_states(different: Json, because: str, words: str) -> None:
    assert versions.state(version(**{"runs": False, **different}), change(because=because)) == words


def test_of_a_job_that_has_ended_the_log_tells(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.is_alive = False
    log = ModuleType("evertrain.controller.code_views")
    log.versions_of = {served.run_dir / "events.db": SEEN}.__getitem__  # type: ignore[attr-defined]
    log.audit_of = {served.run_dir / "events.db": AUDIT}.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evertrain.controller.code_views", log)
    monkeypatch.setattr("evertrain.controller.code_views", log, raising=False)
    assert main(["versions"]) == 1
    assert "has written nothing down yet" in capsys.readouterr().err
    (served.run_dir / "events.db").touch()
    assert json.loads(said(capsys, "--json")) == SEEN
    assert json.loads(said(capsys, "--json", "--audit")) == AUDIT
    assert served.asked == []
