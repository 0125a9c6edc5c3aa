"""`evertrain trace`: what it shows, writes and answers, from the rings of a dead job and from what was kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from evertrain.cli import explain, main
from support import traced


def run(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main.main(["trace", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    traced.job(tmp_path / "node-0")
    return tmp_path


def test_live_shows_groups_and_who_lags(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "live", dead)
    assert code == 0
    head, row = out.splitlines()[:2]
    assert head.split("  ")[0] == "group"
    fields = row.split()
    assert fields[:7] == ["default_pg", "0-3", "all_reduce", "5", "6", "2", "3"] and 7.5 < float(fields[7]) < 60


def test_live_as_json(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "live", dead, "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    (group,) = found["groups"]
    assert (group["name"], group["least"], group["most"], group["lagging"]) == ("default_pg", 5, 6, [2])
    assert group["ranks"]["2"] == {"done": 5, "reached": 5, "in_flight": 0}
    assert group["comm"] == f"{traced.COMM:016x}"


def test_export_is_a_trace_that_perfetto_reads(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_file = dead / "trace.json"
    code, out, _ = run(capsys, "export", dead, "--out", out_file)
    assert code == 0 and "4 ranks" in out
    events: list[dict[str, Any]] = json.loads(out_file.read_text())["traceEvents"]
    done = [one for one in events if one["ph"] == "X" and one["cat"] == "done"]
    assert len(done) == 4 * 5 and {one["name"] for one in done} == {"all_reduce"}
    assert all(abs(one["dur"] - 4000) < 1 and one["ts"] >= 0 for one in done)
    assert {one["args"]["group"] for one in done} == {"default_pg"}
    (waits,) = [one for one in events if one["ph"] == "X" and one["cat"] == "blocked" and one["pid"] == 0]
    assert waits["name"] == "all_reduce (in flight)" and waits["dur"] > 7.5e6
    counters = {one["name"] for one in events if one["ph"] == "C"}
    assert counters == {"to rank 0", "to rank 1", "to rank 2", "to rank 3"}
    names = {one["args"]["name"] for one in events if one["ph"] == "M" and one["name"] == "process_name"}
    assert names == {f"rank {rank} on node-0" for rank in range(4)}


def test_query_answers_in_sql(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    sql = "SELECT rank, count(*) AS n, max(seq) AS last FROM operations WHERE kind = 'done' GROUP BY rank ORDER BY rank"
    code, out, _ = run(capsys, "query", dead, sql, "--json")
    assert code == 0
    assert json.loads(out) == [{"rank": rank, "n": 5, "last": 5} for rank in range(4)]
    sql = (
        "SELECT g.name, f.peer, h.state FROM flows f JOIN hosts h USING (rank) "
        "JOIN operations o USING (rank) JOIN groups g ON g.comm = o.comm WHERE rank = 1 AND o.kind = 'blocked'"
    )
    assert json.loads(run(capsys, "query", dead, sql, "--json")[1]) == [{"name": "default_pg", "peer": 2, "state": "S"}]
    code, out, _ = run(capsys, "query", dead, "--seconds", "5", "SELECT 1.5 AS half")
    assert code == 0 and out.split() == ["half", "1.5"]
    code, _, err = run(capsys, "query", dead, "SELECT nothing FROM nowhere")
    assert code == 2 and err.startswith("evertrain: trace query: Catalog Error") and err.count("\n") == 1


def test_parquet_files_hold_the_tables(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    duckdb = pytest.importorskip("duckdb")
    code, out, _ = run(capsys, "export", dead, "--parquet", "--out", dead / "tables")
    assert code == 0 and out.startswith("26 operations, 4 flows, 4 hosts, 1 groups in ")
    count = duckdb.execute(f"SELECT count(*) FROM '{dead}/tables/operations.parquet' WHERE kind = 'done'").fetchall()
    assert count == [(20,)]


def test_without_the_extra_one_line_says_what_to_install(
    dead: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    for words in (("query", str(dead), "SELECT 1"), ("export", str(dead), "--parquet", "--out", "x")):
        code, out, err = run(capsys, *words)
        assert (code, out) == (1, "") and "pip install 'evertrain[trace]'" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("fly",), "unknown command trace fly"),
        (("export", "{dead}"), "--out names the file"),
        (("live", "{dead}", "--seconds", "no"), "--seconds no: a number above 0"),
        (("query",), "what is to be asked?"),
    ],
)
def test_wrong_usage(words: tuple[str, ...], line: str, dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *(word.format(dead=dead) for word in words))
    assert code == 2 and line in err and err.count("\n") == 1


def test_a_folder_without_rings_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "live", tmp_path)
    assert code == 1 and "it has no trace rings" in err and err.count("\n") == 1


def test_explain_reads_the_rings_of_a_dead_job(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([str(dead), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["culprit"] == {"type": "rank", "id": 2} and "had not begun all_reduce 6" in row["summary"]
    assert any(line.startswith("rank 0 on node-0: waited in all_reduce 6 of default_pg") for line in row["evidence"])
