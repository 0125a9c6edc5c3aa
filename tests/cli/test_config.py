"""`--config`: keys that are known, durations with units, one line for everything else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evertrain.cli.config import annotated, from_tree, load
from evertrain.model.config import Config, HangConfig
from evertrain.model.errors import UsageError
from support.jobs import evertrain


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").touch()
    assert load(tmp_path / "c.yaml") == Config()


def test_values_reach_their_place() -> None:
    made = from_tree({"grace_s": 5, "restart": {"no_progress_attempts": 7, "progress_s": "2 min"}})
    assert (made.grace_s, made.restart.no_progress_attempts, made.restart.progress_s) == (5.0, 7, 120.0)


@pytest.mark.parametrize(
    ("tree", "line"),
    [
        ({"grce_s": 5}, "unknown key grce_s; did you mean grace_s?"),
        ({"restart": {"progres_s": 5}}, "unknown key restart.progres_s; did you mean progress_s?"),
        ({"grace_s": "soon"}, "grace_s: 'soon' is not a duration"),
        ({"grace_s": "5 weeks"}, "is not a duration"),
        ({"restart": {"no_progress_attempts": "many"}}, "restart.no_progress_attempts: expected `int`"),
        ({"ladder": {"alerts_to_evict": 99}}, "ladder.alerts_to_evict: expected `int` <= 32"),
        ({"ladder": {"budget_fraction": 7}}, "ladder.budget_fraction: expected `float` <= 1"),
        ({"grace_s": float("nan")}, "grace_s: nan is not a finite number, 0 or more"),
        ({"hang": {"still_limit_s": float("inf")}}, "hang.still_limit_s: inf is not a finite number, 0 or more"),
        ({"restart": {"no_progress_attempts": -3}}, "restart.no_progress_attempts: -3 is not a finite number"),
        ({"restart": 3}, "restart should hold keys and values"),
        (["a"], "the file should hold keys and values"),
    ],
)
def test_one_clear_line(tree: object, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        from_tree(tree)
    assert line in str(refused.value)


def test_not_yaml_at_all_is_one_line_with_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: [1,\nb: {")
    with pytest.raises(UsageError, match=r"c\.yaml is not YAML") as refused:
        load(tmp_path / "c.yaml")
    assert "\n" not in str(refused.value)


def read_back(text: str, folder: Path) -> Config:
    (folder / "printed.yaml").write_text(text)
    return load(folder / "printed.yaml")


def test_what_is_printed_reads_back_as_the_defaults(tmp_path: Path) -> None:
    assert read_back(annotated(Config()), tmp_path) == Config()


@settings(deadline=None)
@given(
    st.builds(
        Config,
        grace_s=st.floats(0, allow_nan=False),
        hang=st.builds(HangConfig, still_limit_s=st.floats(0, 1e7), idle_io_bytes_per_s=st.floats(0, 1e7)),
    )
)
def test_what_is_printed_reads_back_as_itself(config: Config) -> None:
    import yaml

    assert from_tree(yaml.safe_load(annotated(config))) == config


def knobs(settings: msgspec.Struct) -> list[str]:
    values = [(name, getattr(settings, name)) for name in settings.__struct_fields__]
    return [
        key for name, value in values for key in (knobs(value) if isinstance(value, msgspec.Struct) else []) or [name]
    ]


def test_every_knob_is_printed_with_what_it_means() -> None:
    lines = [line.strip() for line in annotated(Config()).splitlines()]
    for knob in knobs(Config()):
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{knob}: "))
        assert lines[at - 1].startswith("# "), f"{knob} has no docstring"


@pytest.mark.parametrize(
    ("seconds", "printed"),
    [
        (25.0, "25 s"),
        (60.0, "1 min"),
        (90.0, "90 s"),
        (1800.0, "30 min"),
        (7200.0, "2 h"),
        (0.1, "0.1 s"),
        (0.0, "0 s"),
    ],
)
def test_durations_have_units(seconds: float, printed: str) -> None:
    assert f"\ngrace_s: {printed}\n" in annotated(Config(grace_s=seconds))


def test_what_is_counted_a_second_is_no_duration() -> None:
    assert "idle_io_bytes_per_s: 4096.0" in annotated(Config())
    with pytest.raises(UsageError, match="idle_io_bytes_per_s"):
        from_tree({"hang": {"idle_io_bytes_per_s": "4 s"}})


def test_print_config_needs_no_script_and_starts_nothing(tmp_path: Path) -> None:
    printed = evertrain(tmp_path, "run", "--print-config")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert printed.stdout == annotated(Config())
    assert list(tmp_path.iterdir()) == []


def test_print_config_prints_what_holds(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("restart: {progress_s: 2 min}\ngrace_s: 7")
    printed = evertrain(tmp_path, "run", "--print-config", "--config", "c.yaml", "--grace", "9", "train.py")
    assert printed.returncode == 0
    assert read_back(printed.stdout, tmp_path) == from_tree({"restart": {"progress_s": 120}, "grace_s": 9})
    refused = evertrain(tmp_path, "run", "--config", "none.yaml", "--print-config")
    assert (refused.returncode, refused.stdout) == (2, "")


def test_without_it_the_script_is_still_needed(tmp_path: Path) -> None:
    refused = evertrain(tmp_path, "run", "--nproc-per-node", "2")
    assert refused.returncode == 2
    assert "script.py is missing" in refused.stderr
