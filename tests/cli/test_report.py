"""`evertrain report`: the same sums as text, Markdown and JSON."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cli.plans import known_job
from evertrain.cli.report import duration, markdown, sections
from evertrain.controller import accounts
from evertrain.controller.store import EventStore
from evertrain.model.records import AnyRecord
from support.jobs import evertrain
from support.world import World


def killed_once() -> World:
    world = World()
    world.turns()
    world.train(10)
    world.turn()
    world.fail(1)
    world.turns()
    world.train(5)
    world.turns()
    world.stop()
    world.turns()
    assert world.state.ended is not None
    return world


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job that has ended."""
    run_dir = known_job(tmp_path / "runs", "job")
    asyncio.run(write(run_dir / "events.db", killed_once().log))
    return tmp_path


async def write(database: Path, log: list[AnyRecord]) -> None:
    store = EventStore(database)
    await store.append(log)
    store.close()


def test_json_is_all_that_is_on_stdout_and_adds_up(folder: Path) -> None:
    done = evertrain(folder, "report", "job", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    whole = report["all"]
    assert whole["productive_s"] + whole["lost_s"] == pytest.approx(whole["wall_s"], abs=1e-6)
    assert report == accounts.report(killed_once().log, job="job", now=None)


def test_text_says_where_the_time_went(folder: Path) -> None:
    done = evertrain(folder, "report")
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("job job: 1 run, 2 attempts", "ETTR", "killed (SIGKILL)", "recompute", "planned stop", "start up"):
        assert words in done.stdout


def test_markdown_is_tables(folder: Path) -> None:
    said = evertrain(folder, "report", "--job", "job", "--markdown").stdout
    assert said.startswith("# job job: 1 run, 2 attempts\n\n## Time\n\n|  | this run |\n| :--- | ---: |\n")
    for line in said.splitlines():
        assert not line or line.startswith(("#", "| "))
    assert "| 1 | killed (SIGKILL) |" in said


def test_run_dir_finds_it_too(folder: Path) -> None:
    done = evertrain(folder, "report", "--run-dir", str(folder / "runs" / "job"), "--json")
    assert json.loads(done.stdout)["job"] == "job"


def test_json_and_markdown_exclude_each_other(folder: Path) -> None:
    done = evertrain(folder, "report", "--json", "--markdown")
    assert (done.returncode, done.stdout) == (2, "")


def report(**changed: Any) -> dict[str, Any]:
    return {**accounts.report(killed_once().log, job="job", now=None), **changed}


def test_what_breaks_a_markdown_table_is_escaped() -> None:
    seen = report()
    seen["all"]["by_incident"][0]["cause"] = "a | b\nc"
    assert "| a \\| b c |" in markdown(seen)


def test_one_run_is_shown_once_and_several_beside_each_other() -> None:
    assert next(sections(report())).columns == ("", "this run")
    assert next(sections(report(runs=report()["runs"] * 2))).columns == ("", "all runs", "this run")


def test_every_row_has_a_cell_for_every_column() -> None:
    for section in sections(report()):
        assert section.rows and all(len(row) == len(section.columns) for row in section.rows)
        assert section.words <= set(section.columns)


def test_a_job_without_a_run_has_a_report() -> None:
    assert "wall time" in markdown(accounts.report([], job="job", now=1.0))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0.00 s"), (59.994, "59.99 s"), (185.0, "3 min 05 s"), (7380.0, "2 h 03 min"), (372_000.0, "4 d 07 h")],
)
def test_durations_are_read_at_a_glance(seconds: float, words: str) -> None:
    assert duration(seconds) == words
