"""`evertrain trace rca`: who has begun it, drawn with those who wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evertrain.cli import main, trace_rca
from evertrain.model.collectives import RootCause, Step
from support import traced


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main.main(["trace", "rca", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    traced.job(tmp_path / "node-0")
    return tmp_path


def test_the_rank_that_the_others_wait_for(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, dead)
    assert (code, err) == (0, "")
    first, _, culprit, *waiting = out.splitlines()
    assert "communication is stuck: rank 2 on node-0; it is outside of all collectives" in first
    assert culprit.startswith("  rank 2 on node-0 is blocked in no operation for ")
    assert waiting[0].startswith("  └─ rank 3 on node-0 waits in all_reduce number 6 of group default_pg for ")
    assert "evidence" in out and "ranks 0-1, 3 wait for it in all_reduce number 6 of group default_pg" in out


def test_as_json(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, dead, "--json")
    found = json.loads(out)
    assert code == 0 and (found["ranks"], found["component"], found["symptom"]) == ([2], "outside", "stuck")
    assert found["path"][-1][0] == 2 and found["first_s"] > 7.5


def test_where_all_have_come_nobody_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traced.job(tmp_path / "node-0", behind=None)
    code, out, _ = run(capsys, tmp_path)
    assert code == trace_rca.NOBODY
    assert "communication is not the cause" in out and "all have come to all_reduce number 6" in out
    assert "evertrain stacks" in out


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--since", "x"], 2, "--since x"),
        (["nowhere"], 1, "nowhere"),
        (["--seconds", "3"], 2, "--seconds"),
    ],
)
def test_wrong_usage_is_one_line(
    words: list[str], code: int, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found, out, err = run(capsys, *words)
    assert found == code and out == "" and line in err and "Traceback" not in err


def test_a_folder_without_rings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, tmp_path)
    assert code == 1 and "no trace rings" in err and len(err.splitlines()) == 1


def test_the_path_is_drawn_from_the_culprit_down() -> None:
    path = (
        Step(2, "n1", "waits in reduce_scatter number 3 of group dp for 1.9 s", (0,)),
        Step(6, "n3", "waits in reduce_scatter number 3 of group dp for 1.9 s", (4,)),
        Step(0, "n0", "waits in transfer number 5 from rank 4 to rank 0 in group pp for 2.0 s", (4,)),
        Step(4, "n2", "waits in all_reduce number 9 of group tp for 2.0 s", (5,)),
        Step(5, "n2", "rank 5 on n2 is stopped (state T)"),
    )
    assert list(trace_rca.drawn(path, (5,))) == [
        "  rank 5 on n2 is stopped (state T)",
        "  └─ rank 4 on n2 waits in all_reduce number 9 of group tp for 2.0 s",
        "     ├─ rank 6 on n3 waits in reduce_scatter number 3 of group dp for 1.9 s",
        "     └─ rank 0 on n0 waits in transfer number 5 from rank 4 to rank 0 in group pp for 2.0 s",
        "        └─ rank 2 on n1 waits in reduce_scatter number 3 of group dp for 1.9 s",
    ]


def test_a_circle_is_drawn_once() -> None:
    path = (Step(0, "", "waits", (1,)), Step(1, "", "waits", (0,)))
    assert list(trace_rca.drawn(path, (0,))) == ["  rank 0 waits", "  └─ rank 1 waits"]


def test_a_link_and_a_moment_are_told() -> None:
    cause = RootCause(
        symptom="slow", component="network", ranks=(2, 3), link=(2, 3), nodes=("a", "b"), time=1_700_000_000.25,
        bound_s=0.05, confidence=0.68, evidence=("2 % lost",), blind=("nothing came of rank 7",),
    )  # fmt: skip
    first, *rest = trace_rca.lines(cause, "demo")
    assert "between rank 2 and rank 3; the network (confidence 0.68)" in first
    assert "clocks agree within 0.05 s" in first and ".2 (" in first
    assert any("nothing came of rank 7" in line for line in rest)
