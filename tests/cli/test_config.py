"""`--config`: keys that are known, durations with units, one line for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.cli.config import from_tree, load
from evertrain.model.config import Config
from evertrain.model.errors import UsageError


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
