"""Which job is meant when nobody names one? The newest here."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.plans import known_job
from evertrain.cli import registry
from evertrain.model.errors import TroubleError


def test_the_newest_of_registry_and_folder(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), "EVERTRAIN_RUN_DIR": str(tmp_path / "here")}
    known_job(tmp_path / "here", "local", started_time=5.0)
    far = known_job(tmp_path / "elsewhere", "far", started_time=9.0)
    assert registry.find(None, None, environ).job == "local"
    registry.remember("far", far, "far-1", 9.0, environ)
    assert registry.find(None, None, environ).job == "far"
    assert registry.find("local", None, environ).run_dir == tmp_path / "here" / "local"
    assert registry.find(None, tmp_path / "here", environ).job == "local"


def test_the_folder_of_one_job_will_do(tmp_path: Path) -> None:
    run_dir = known_job(tmp_path, "one", started_time=1.0)
    assert registry.find(None, run_dir, {}).job == "one"


def test_an_unknown_job_names_the_known_ones(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path), "EVERTRAIN_RUN_DIR": str(tmp_path / "runs")}
    with pytest.raises(TroubleError, match="there is no job here"):
        registry.find(None, None, environ)
    known_job(tmp_path / "runs", "alpha", started_time=1.0)
    known_job(tmp_path / "runs", "beta", started_time=2.0)
    with pytest.raises(TroubleError, match=r"no job alhpa; did you mean alpha\? \(known: alpha, beta\)"):
        registry.find("alhpa", None, environ)


def test_a_home_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    registry.remember("a", tmp_path, "a-1", 1.0, {"XDG_STATE_HOME": str(tmp_path / "file")})


def test_a_broken_file_is_no_job(tmp_path: Path) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path), "EVERTRAIN_RUN_DIR": str(tmp_path / "runs")}
    (tmp_path / "evertrain" / "jobs").mkdir(parents=True)
    (tmp_path / "evertrain" / "jobs" / "x.json").write_text("{")
    known_job(tmp_path / "runs", "good", started_time=1.0)
    assert registry.find(None, None, environ).job == "good"
