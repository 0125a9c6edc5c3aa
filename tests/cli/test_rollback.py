"""`evertrain rollback`: which version is meant, where training goes on, and what is said when it comes to nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.served import Served, change, diff, job, version
from evertrain.cli.main import main

Json = dict[str, Any]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with job(tmp_path, monkeypatch) as made:
        known = [
            version(digest="abcdef0" + "1" * 57),
            version(2, digest="1234567" + "a" * 57),
            version(3, digest="abcdef9" + "2" * 57, runs=True),
        ]
        made.answers = {
            "POST /v1/changes": [(202, {"change": "c"})],
            "GET /v1/changes/": [(200, back())],
            "GET /v1/versions": [(200, {"versions": known, "changes": []})],
        }
        yield made


def back(**different: Any) -> Json:
    usual = {"act": "rollback", "version": 1, "parent": 2, "goes_back": True, "resume": 30}
    return change(**{**usual, **different})


def test_a_checkpoint_of_another_version_is_not_called_its_own(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    served.answers["GET /v1/changes/"] = [(200, back(resume=90, resume_version=2))]
    assert said(capsys)[-1] == "training goes on from step 90 of version 2: no checkpoint of version 1 is left"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main(["rollback", *words]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    exit_code = main(["rollback", *words])
    out, line = capsys.readouterr()
    assert out == "" and line.startswith("evertrain: ") and line.count("\n") == 1, (out, line)
    return exit_code, line.removeprefix("evertrain: ").rstrip("\n")


def test_without_a_version_the_controller_chooses(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--reason", "loss is up") == [
        "job job: version 1 runs: attempt 4 resumed from step 30 in 1.2 s",
        "compared with version 2: 1 file changed, +12 −4 lines: model.py",
        "training goes back to step 30, the newest checkpoint of version 1",
    ]
    wish = served.wish("/v1/changes")
    assert wish.pop("change") and "@" in wish.pop("author")
    assert wish == {
        "kind": "rollback", "digest": "", "source": "", "version": None, "urgent": True, "within_s": None,
        "keep_progress": False, "reason": "loss is up",
    }  # fmt: skip
    assert {one.token for one in served.of("POST", "/v1/changes")} == {"for code"}


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (("job", "2"), 2),
        (("2", "--job", "job"), 2),
        (("--job", "job", "2"), 2),
        (("job", "2", "--job", "job"), 2),
        (("--job", "job"), None),
        (("job",), None),
        (("job", "abcdef0"), 1),
        (("job", "ABCDEF0"), 1),
        (("job", "123456"), 2),
    ],
)
def test_the_version_that_is_meant(
    served: Served, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], number: int | None
) -> None:
    said(capsys, *words)
    assert served.wish("/v1/changes")["version"] == number


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("2",), "there is no job 2 (known: job); where a version is meant, the job is, too: --job NAME 2"),
        (("job", "1", "2"), "unexpected argument '2'"),
        (("other", "2", "--job", "job"), "unexpected argument '2'"),
        (("job", "newest"), "'newest' is neither the number nor the digest of a version"),
        (("job", "abcde"), "abcde: at least 6 digits of a digest are needed"),
        (("job", "abcdef"), "abcdef may be version 1 or 3 of job job: give its number"),
        (("job", "fedcba"), "job job has no version fedcba; `evertrain versions` lists them"),
    ],
)
def test_what_was_typed_wrong_is_2(
    served: Served, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], line: str
) -> None:
    exit_code, seen = refused(capsys, *words)
    assert exit_code == 2 and line in seen
    assert not served.of("POST", "/v1/changes")


def test_an_unknown_job_is_no_version(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "jbo")[0] == 1
    assert "did you mean job?" in refused(capsys, "jbo")[1]


def test_progress_may_be_kept(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    kept = back(goes_back=False, resume=57, diff=diff(files=0))
    served.answers["GET /v1/changes/"] = [(200, back(back=False)), (200, kept)]
    assert said(capsys, "--keep-progress") == [
        "job job: version 1 runs: attempt 4 resumed from step 57 in 1.2 s",
        "training goes on from step 57; what other versions have trained is kept",
    ]
    assert served.wish("/v1/changes")["keep_progress"] is True
    assert json.loads("\n".join(said(capsys, "--keep-progress", "--json"))) == kept


def test_a_version_without_a_checkpoint_begins_anew(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers["GET /v1/changes/"] = [(200, back(resume=None))]
    lines = said(capsys)
    assert lines[0].endswith("attempt 4 began anew in 1.2 s")
    assert lines[2] == "training goes back to its beginning: there is no checkpoint of version 1"


def test_what_has_come_to_nothing_is_1(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.answers["GET /v1/changes/"] = [(200, back(back=False, outcome="dropped", because="node-1 has no space"))]
    assert refused(capsys) == (
        1, "job job is not rolled back: node-1 has no space; training goes on as it is"
    )  # fmt: skip
    served.answers["POST /v1/changes"] = [(409, {"error": "no version before this has proven itself"})]
    assert refused(capsys) == (1, "job job is not rolled back: no version before this has proven itself")
    served.answers["POST /v1/changes"] = [(409, {"error": "there is no version 9", "wrong_usage": True})]
    assert refused(capsys, "job", "9") == (2, "job job is not rolled back: there is no version 9")


def test_without_the_code_token(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    (served.run_dir / "code-token").unlink()
    served.answers["POST /v1/changes"] = [(403, {"error": "no", "token_file": "/far/code-token"})]
    exit_code, line = refused(capsys)
    assert exit_code == 1 and "/far/code-token" in line and "EVERTRAIN_CODE_TOKEN" in line


def test_a_job_that_does_not_run_or_answer(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    del served.answers["GET /v1/versions"]
    assert refused(capsys, "job", "abcdef0") == (
        1, "job job: its controller does not answer; which version is abcdef0?"
    )  # fmt: skip
    served.is_alive = False
    assert "does not run" in refused(capsys)[1]
