"""Which folder is the code's, and what is said where that is not what one might think."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertrain.cli import plan as planning
from evertrain.cli.flags import run_parser
from evertrain.cli.plan import Plan
from evertrain.model.errors import UsageError


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script two levels below, in a folder that is the working directory."""
    folder = tmp_path / "repo" / "jobs"
    folder.mkdir(parents=True)
    (tmp_path / "repo" / ".git").mkdir()
    (tmp_path / "library").mkdir()
    (folder / "train.py").touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def plan(*words: str) -> Plan:
    return planning.from_flags(run_parser().read([*words]), {})


def test_the_working_tree_of_what_is_run(here: Path) -> None:
    assert plan("train.py").code_root == here.parent
    assert plan("-m", "jobs.train").code_root == here.parent
    (here.parent / ".git").rmdir()
    assert plan("train.py").code_root == here
    (here / "run.sh").touch(mode=0o755)
    assert plan("--no-python", "./run.sh").code_root == here


def test_the_folder_that_is_named(here: Path, tmp_path: Path) -> None:
    made = plan("--code", ".", "train.py")
    assert (made.code_root, made.notes) == (here, ())
    assert plan("--code", str(here), "train.py").code_root == here


def test_a_library_may_be_all_that_changes_and_that_is_said(tmp_path: Path) -> None:
    made = plan("--code", "../../library", "train.py")
    assert made.code_root == tmp_path / "library"
    assert made.notes == (
        "--code ../../library does not hold train.py: the script itself is not part of a version",
    )  # fmt: skip
    # where a module lies is known by its import only
    assert plan("--code", "../../library", "-m", "train").notes == ()


def test_a_script_in_its_folder_by_another_name_is_held(here: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(here)
    assert plan("--code", str(tmp_path / "link"), "train.py").notes == ()


def test_the_home_folder_is_no_code(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here.parent / ".git").rmdir()
    monkeypatch.setenv("HOME", str(here))
    made = plan("train.py")
    assert made.code_root is None
    (note,) = made.notes
    assert note == (
        "there is no code for `evertrain update` to take the place of: train.py does not lie in a folder of its own; "
        "--code DIR names one"
    )
    assert plan("--code", ".", "train.py").code_root == here


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("", "--code : no such folder"),
        ("missing", "--code missing: no such folder"),
        ("train.py", "--code train.py: a file; the folder that holds the code is needed"),
        ("/", "--code /: the whole machine is no code; a folder is needed"),
    ],
)
def test_what_is_no_folder_is_refused(asked: str, line: str) -> None:
    with pytest.raises(UsageError) as refused:
        plan("--code", asked, "train.py")
    assert str(refused.value) == line
