"""`evertrain update`: what is sent, what is waited for, and what is said when it comes to nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.served import Served, change, diff, job, version
from evertrain.cli import client, look
from evertrain.cli.main import main

Json = dict[str, Any]
TAKEN = [(202, {"change": "c"})]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "train.py").write_text("print(2)\n")
    return folder


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with job(tmp_path, monkeypatch) as made:
        made.answers = {
            "PUT /v1/code/": [(201, {"digest": "", "files": 1, "bytes": 9})],
            "POST /v1/changes": TAKEN,
            "GET /v1/changes/": [(200, change())],
            "GET /v1/versions": [(200, {"versions": [version(), version(2)], "changes": []})],
        }
        yield made


def said(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main(["update", *map(str, words)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    exit_code = main(["update", *map(str, words)])
    out, line = capsys.readouterr()
    assert out == "" and line.startswith("evertrain: ") and line.count("\n") == 1, (out, line)
    return exit_code, line.removeprefix("evertrain: ").rstrip("\n")


# -- what is asked for -----------------------------------------------------------------------------------------------


def test_the_code_is_sent_and_then_asked_for(served: Served, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "job", "--code", code, "--urgent", "--reason", "fix loss")
    (put,), (post,) = served.of("PUT", "/v1/code/"), served.of("POST", "/v1/changes")
    assert put.token == post.token == "for code"
    assert put.body[:2] == b"\x1f\x8b", "as it travels it is compressed"
    wish = json.loads(post.body)
    assert put.path == f"/v1/code/{wish['digest']}"
    assert served.of("GET", "/v1/changes/")[0].path == f"/v1/changes/{wish['change']}"
    assert "@" in wish.pop("author")
    assert len(wish.pop("digest")) == 64 and wish.pop("change")
    assert wish == {
        "kind": "update", "source": str(code), "version": None, "urgent": True, "within_s": None,
        "keep_progress": True, "reason": "fix loss",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "within_s"), [((), None), (("--within", "90s"), 90.0), (("--within", "2d"), 172800.0)]
)
def test_without_within_the_config_of_the_job_holds(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], within_s: float | None
) -> None:
    said(capsys, "--job", "job", "--code", code, *words)
    wish = served.wish("/v1/changes")
    assert (wish["urgent"], wish["within_s"]) == (False, within_s)


def test_equal_folders_have_equal_digests_and_what_the_job_excludes_is_no_code(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    described = served.run_dir / "job.json"
    content = json.loads(described.read_bytes())
    content["code"]["exclude"] = ["*.local"]
    described.write_text(json.dumps(content))
    said(capsys, "--code", code)
    (code / "notes.local").write_text("mine")
    said(capsys, "--code", code)
    (code / "train.py").write_text("print(3)\n")
    said(capsys, "--code", code)
    first, second, third = (json.loads(one.body)["digest"] for one in served.of("POST", "/v1/changes"))
    assert first == second != third


def test_the_token_of_the_environment_outranks_the_file(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERTRAIN_CODE_TOKEN", "given")
    said(capsys, "--code", code)
    assert {one.token for one in served.asked if one.method != "GET"} == {"given"}


# -- not urgent ------------------------------------------------------------------------------------------------------


def test_what_comes_later_is_said_and_not_waited_for(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latest = time.mktime((2026, 12, 1, 9, 13, 0, 0, 0, -1))
    pending = change(
        outcome="pending", back=False, urgent=False, latest=latest, attempt=None,
        diff=diff(changed=["model.py"], added=["loss.py"], removed=["old.py"], files=3),
    )  # fmt: skip
    served.answers["GET /v1/changes/"] = [(200, pending)]
    first, second = said(capsys, "--code", code).splitlines()
    assert first == (
        "job job: version 2 comes with the next restart, at the latest 2026-12-01 09:13 "
        "(the same with --urgent: at once)"
    )
    assert second == "compared with version 1: 3 files changed, +12 −4 lines: model.py, loss.py (new), old.py (gone)"
    assert json.loads(said(capsys, "--code", code, "--json")) == pending


def test_where_ranks_are_being_started_it_may_come_at_once(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["GET /v1/changes/"] = [(200, change(urgent=False, back=False, seconds=None))]
    assert said(capsys, "--code", code).startswith("job job: version 2 runs: attempt 4 resumed from step 120")


# -- urgent ----------------------------------------------------------------------------------------------------------


def test_an_urgent_one_is_waited_for(served: Served, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers["GET /v1/changes/"] = [
        (200, change(outcome="pending", back=False, attempt=None)),
        (200, change(back=False)),
        (200, change(diff=diff(files=9, args=True, env=["SEED"]))),
    ]
    assert said(capsys, "--code", code, "--urgent").splitlines() == [
        "job job: version 2 runs: attempt 4 resumed from step 120 in 1.2 s",
        "compared with version 1: 9 files changed, +12 −4 lines: model.py, …; other arguments; environment: SEED",
    ]
    assert len(served.of("GET", "/v1/changes/")) == 3
    served.answers["GET /v1/changes/"] = [(200, change(resume=None, seconds=None))]
    assert "attempt 4 began anew; its steps cannot be seen yet" in said(capsys, "--code", code, "--urgent")


@pytest.mark.parametrize(
    ("different", "line"),
    [
        (
            {"outcome": "rolled_back", "because": "rank 1 on node-0: ValueError: nan"},
            "job job: version 2 failed: rank 1 on node-0: ValueError: nan; rolled back to version 1, training goes on",
        ),
        (
            {"outcome": "rolled_back", "ended": "no progress"},
            "job job: version 2 failed; rolled back to version 1, the job has ended: no progress",
        ),
        (
            {"outcome": "dropped", "because": "node-1 cannot have it: no space left"},
            "job job is not updated: node-1 cannot have it: no space left; training goes on as it is",
        ),
        (
            {"outcome": "superseded"},
            "job job is not updated: another change has taken the place of version 2",
        ),
        (
            {"outcome": "pending", "ended": "every rank exited with 0"},
            "job job ended before the update was done: every rank exited with 0",
        ),
    ],
)
def test_what_has_come_to_nothing_is_one_line(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str], different: Json, line: str
) -> None:
    served.answers["GET /v1/changes/"] = [(200, change(back=False, **different))]
    assert refused(capsys, "--code", code, "--urgent") == (1, line)


def test_a_failed_one_is_json_too(served: Served, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dropped = change(back=False, outcome="dropped", because="why")
    served.answers["GET /v1/changes/"] = [(200, dropped)]
    assert main(["update", "--code", str(code), "--urgent", "--json"]) == 1
    out, line = capsys.readouterr()
    assert json.loads(out) == dropped and "is not updated: why" in line


def test_the_version_that_is_named_is_the_one_that_runs(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["GET /v1/changes/"] = [(200, change(version=3, parent=2, back=False, outcome="rolled_back"))]
    served.answers["GET /v1/versions"] = [(200, {"versions": [version(), version(2), version(3)], "changes": []})]
    assert "version 3 failed; rolled back to version 1" in refused(capsys, "--code", code, "--urgent")[1]
    del served.answers["GET /v1/versions"]
    assert "version 3 failed; rolled back to version 2" in refused(capsys, "--code", code, "--urgent")[1]


def test_a_wish_that_died_with_its_controller_is_told_again(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["GET /v1/changes/"] = [(404, {"error": "unknown"}), (200, change())]
    said(capsys, "--code", code, "--urgent")
    first, second = served.of("POST", "/v1/changes")
    assert first.body == second.body
    assert len(served.of("PUT", "/v1/code/")) == 2


def test_a_controller_that_does_not_know_yet_is_asked_again(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["PUT /v1/code/"] = [(503, {"error": "later"}), (201, {})]
    served.answers["POST /v1/changes"] = [(503, {"error": "later"}), *TAKEN]
    said(capsys, "--code", code, "--urgent")
    assert [one.method for one in served.asked] == ["PUT", "PUT", "POST", "POST", "GET"]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "--code is missing (see `evertrain update --help`)"),
        (("--code", "nowhere"), "--code nowhere: no such folder"),
        (("--code", "new/train.py"), "--code new/train.py: a file; the folder that holds the code is needed"),
        (("--code", "/"), "--code /: the whole machine is no code; a folder is needed"),
        (("--code", "new", "--within", "0"), "--within 0: what is to come at once is --urgent"),
        (("--code", "new", "--within", "soon"), "--within soon: not a duration, as 90s, 30m, 24h or 2d"),
        (("--code", "new", "--within", "-3h"), "--within -3h: it cannot be negative"),
        (("job", "--within", "-.5h", "--code", "new"), "--within -.5h: it cannot be negative"),
        (("--code", "new", "--within=-3h"), "--within -3h: it cannot be negative"),
        (("--code", "new", "--within", "--urgent"), "argument --within: expected one argument"),
        (("--code", "new", "-3h"), "unknown flag -3h"),
        (("--code", "new", "--within", "1h", "--urgent"), "which of them?"),
    ],
)
def test_what_was_typed_wrong_is_2(
    served: Served,
    code: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    line: str,
) -> None:
    monkeypatch.chdir(code.parent)
    exit_code, seen = refused(capsys, *words)
    assert exit_code == 2 and line in seen
    assert served.asked == []


def test_a_folder_that_is_too_large_is_2(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = served.run_dir / "job.json"
    content = json.loads(described.read_bytes())
    content["code"]["most_bytes"] = 4
    described.write_text(json.dumps(content))
    exit_code, seen = refused(capsys, "--code", code)
    assert exit_code == 2 and "--code DIR" in seen
    assert served.asked == []


@pytest.mark.parametrize(("wrong_usage", "exit_code"), [(True, 2), (False, 1)])
def test_what_the_controller_refuses_is_said(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str], wrong_usage: bool, exit_code: int
) -> None:
    served.answers["POST /v1/changes"] = [(409, {"error": "version 2 runs already", "wrong_usage": wrong_usage})]
    assert refused(capsys, "--code", code) == (exit_code, "job job is not updated: version 2 runs already")


def test_an_archive_that_is_not_taken(served: Served, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers["PUT /v1/code/"] = [(400, {"error": "too many files"})]
    assert refused(capsys, "--code", code) == (1, "job job is not updated: too many files")
    assert not served.of("POST", "/v1/changes")


def test_without_the_code_token_both_places_for_it_are_named(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (served.run_dir / "code-token").unlink()
    served.answers["PUT /v1/code/"] = [(403, {"error": "not with this token", "token_file": "/far/code-token"})]
    exit_code, line = refused(capsys, "--code", code)
    assert exit_code == 1
    assert line == (
        "job job is not updated: to change what it runs takes the code token: /far/code-token on the node that "
        "serves the job, or EVERTRAIN_CODE_TOKEN"
    )
    assert served.asked[-1].token == "ordinary"


def test_a_wrong_code_token_is_named_by_where_it_is_from(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served.answers["PUT /v1/code/"] = [(401, {"error": "wrong or missing token"})]
    file = served.run_dir / "code-token"
    assert refused(capsys, "--code", code)[1] == f"job job is not updated: the code token of {file} is not the job's"
    monkeypatch.setenv("EVERTRAIN_CODE_TOKEN", "x")
    assert "the code token of EVERTRAIN_CODE_TOKEN is not the job's" in refused(capsys, "--code", code)[1]
    monkeypatch.setenv("EVERTRAIN_CODE_TOKEN", "zwölf")
    assert refused(capsys, "--code", code) == (
        2, "EVERTRAIN_CODE_TOKEN: a token is one line of printable ASCII characters"
    )  # fmt: skip


def test_a_job_that_does_not_run(served: Served, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    served.is_alive = False
    assert refused(capsys, "--code", code) == (
        1, "job job does not run; `evertrain run` runs your own files as they are then"
    )  # fmt: skip
    assert refused(capsys, "other", "--code", code)[1].startswith("there is no job other")


def test_a_controller_that_stays_away(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (served.run_dir / "controller.json").unlink()
    monkeypatch.setattr(look, "CONTROLLER_AWAY_S", 0.03)
    assert refused(capsys, "--code", code) == (
        1, "job job is not updated: its controller does not answer for 0 s"
    )  # fmt: skip


def test_one_that_goes_away_while_it_is_waited_for(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: client.Client, path: str) -> Any:
        raise client.Unreachable("away")

    monkeypatch.setattr(client.Client, "get", away)
    monkeypatch.setattr(look, "CONTROLLER_AWAY_S", 0.03)
    exit_code, line = refused(capsys, "--code", code, "--urgent")
    assert exit_code == 1 and "the update may go on without this command" in line


def test_ctrl_c_ends_the_waiting_only(
    served: Served, code: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    served.answers["GET /v1/changes/"] = [(200, change(back=False))]
    monkeypatch.setattr(time, "sleep", interrupted)
    assert main(["update", "--code", str(code), "--urgent"]) == 130
    assert [one.method for one in served.asked] == ["PUT", "POST", "GET"]
