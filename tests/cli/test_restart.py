"""`evertrain restart`: what is sent, with which secret, and what it says; real restarts are in tests/system."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.served import Served, change, job, version
from evertrain.cli.main import main

Json = dict[str, Any]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with job(tmp_path, monkeypatch) as made:
        made.answers = {
            "PUT /v1/code/": [(201, {})],
            "POST /v1/restart": [(202, {})],
            "GET /v1/restart/": [(200, done(back=False)), (200, done())],
        }
        yield made


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "train.py").write_text("print(2)\n")
    return folder


def done(**different: Any) -> Json:
    usual = {
        "restart": "r", "from_step": None, "verify": None, "args": None, "env": [], "brings": None, "back": True,
        "attempt": 2, "resume": 40, "seconds": 0.51, "verified": None, "ended": None,
    }  # fmt: skip
    return {**usual, **different}


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> list[str]:
    assert main(["restart", *map(str, words)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    exit_code = main(["restart", *map(str, words)])
    out, line = capsys.readouterr()
    assert out == "" and line.startswith("evertrain: ") and line.count("\n") == 1, (out, line)
    return exit_code, line.removeprefix("evertrain: ").rstrip("\n")


def test_a_plain_restart_changes_nothing_and_takes_no_code_token(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "job", "--reason", "a try") == ["job job restarted: attempt 2 resumed from step 40 in 0.5 s"]
    (post,) = served.of("POST", "/v1/restart")
    wish = json.loads(post.body)
    assert post.token == "ordinary"
    assert (wish["args"], wish["env"], wish["digest"], wish["source"], wish["reason"]) == (None, {}, "", "", "a try")
    assert not served.of("PUT", "/") and not served.of("GET", "/v1/changes")


@pytest.mark.parametrize("words", [("--env", "A=1"), ("--args", "--lr", "3"), ("--args",)])
def test_other_arguments_and_environment_take_the_code_token(
    served: Served, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    served.answers["GET /v1/restart/"] = [(200, done(args=["--lr", "3"]))]
    assert said(capsys, *words)[1] == (
        "arguments and environment stay as they are now until the job is run again by its command line"
    )
    assert [one.token for one in served.of("POST", "/v1/restart")] == ["for code"]


def test_other_code(served: Served, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--code", code, "--from-step", "38")[-1] == (
        "code, arguments and environment stay as they are now until the job is run again by its command line: "
        "then your own files run in place"
    )
    (put,), (post,) = served.of("PUT", "/v1/code/"), served.of("POST", "/v1/restart")
    wish = json.loads(post.body)
    assert put.path.endswith(wish["digest"]) and len(wish["digest"]) == 64
    assert wish["source"] == str(code) and wish["from_step"] == 38 and "@" in wish["author"]
    assert put.token == post.token == "for code"
    assert refused(capsys, "--code", "nowhere") == (2, "--code nowhere: no such folder")


def test_one_whose_controller_died_is_told_again_with_its_code(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["GET /v1/restart/"] = [(404, {"error": "unknown"}), (200, done())]
    said(capsys, "--code", code)
    assert [len(served.of(*what)) for what in (("PUT", "/v1/code/"), ("POST", "/v1/restart"))] == [2, 2]


def test_code_that_is_rolled_back_ends_the_waiting(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["GET /v1/restart/"] = [(200, done(back=False))]
    served.answers["GET /v1/changes/"] = [(200, change(act="restart", outcome="rolled_back", because="rank 0: nan"))]
    served.answers["GET /v1/versions"] = [(200, {"versions": [version()], "changes": []})]
    assert refused(capsys, "--code", code) == (
        1, "job job: version 2 failed: rank 0: nan; rolled back to version 1, training goes on"
    )  # fmt: skip


def test_an_update_that_a_plain_restart_takes_along_and_that_fails_is_no_success(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["GET /v1/restart/"] = [(200, done(brings="theirs", attempt=4))]
    served.answers["GET /v1/changes/theirs"] = [
        (200, change(change="theirs", back=False)),  # it has come to its loop, and to no step yet
        (200, change(change="theirs", outcome="rolled_back", because="rank 0: nan", attempt=4, back=False)),
    ]
    served.answers["GET /v1/versions"] = [(200, {"versions": [version()], "changes": []})]
    assert refused(capsys) == (1, "job job: version 2 failed: rank 0: nan; rolled back to version 1, training goes on")
    assert len(served.of("GET", "/v1/changes/theirs")) == 2


def test_an_update_that_a_plain_restart_takes_along_has_to_do_a_step(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["GET /v1/restart/"] = [(200, done(brings="theirs", attempt=4))]
    served.answers["GET /v1/changes/theirs"] = [(500, {}), (200, change(back=False)), (200, change())]
    assert said(capsys) == ["job job restarted: attempt 4 resumed from step 40 in 0.5 s"]
    assert len(served.of("GET", "/v1/changes/theirs")) == 3
    # its own first attempt was lost to something else
    served.answers["GET /v1/restart/"] = [(200, done(brings="theirs", attempt=5))]
    served.answers["GET /v1/changes/theirs"] = [(200, change(back=False))]
    assert said(capsys) == ["job job restarted: attempt 5 resumed from step 40 in 0.5 s"]


def test_without_the_code_token(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers["POST /v1/restart"] = [(403, {"error": "no", "token_file": "/far/code-token"})]
    exit_code, line = refused(capsys, "--env", "A=1")
    assert exit_code == 1 and line.startswith("job job is not restarted: ")
    assert "/far/code-token" in line and "EVERTRAIN_CODE_TOKEN" in line
