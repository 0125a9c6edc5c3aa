"""Which file stands in for which, without running any."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from evertrain.worker import script, version
from evertrain.worker.freshness import Imported
from evertrain.worker.version import Version, WrongCode
from support import versions

HELD = {
    "train.py": "new", "pkg/__init__.py": "", "pkg/part.py": "new", "conf/base.yaml": "new", "keep/.gitkeep": "",
    "flat": "new", "only_new.py": "",
}  # fmt: skip


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name in (*HELD, "old.py", "secret.py", "data/set.bin", "pkg/__pycache__/x.pyc", "lib/site-packages/dep.py"):
        if name != "only_new.py":
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text("old")
    return root


@pytest.fixture
def made(root: Path) -> Version:
    """A version whose folder lies in the root, as a run's own folder often does."""
    folder = root / ".evertrain" / "code" / "v2"
    versions.make(root, folder, HELD, without=["old.py"])
    Path(f"{folder}.json").touch()
    return Version(str(root), str(folder))


def test_what_the_version_holds_is_in_the_folder_and_all_else_where_it_was(root: Path, made: Version) -> None:
    assert made.held(f"{root}/train.py") == f"{made.folder}/train.py"
    assert made.held(f"{root}/pkg") == f"{made.folder}/pkg"
    assert made.held(str(root)) == made.held(f"{root}/") == made.folder
    for other in ("secret.py", "data", "data/set.bin", "pkg/__pycache__", "old.py", "nowhere", "lib/site-packages"):
        assert made.held(f"{root}/{other}") is None, other
    assert made.inside(f"{made.folder}/train.py") is None, "it is there already"
    assert made.inside("/etc/passwd") is None
    assert made.inside(f"{root}er/train.py") is None


def test_names_through_links_and_dots(
    root: Path, made: Version, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alias").symlink_to(root)
    (tmp_path / "deep").symlink_to(root / "pkg")
    assert made.held(f"{tmp_path}/alias/train.py") == f"{made.folder}/train.py"
    assert made.held(f"{tmp_path}/deep/../conf/base.yaml") == f"{made.folder}/conf/base.yaml", "as the kernel sees it"
    monkeypatch.chdir(root / "pkg")
    assert made.held("part.py") == made.held("./part.py") == f"{made.folder}/pkg/part.py"
    by_alias = Version(f"{tmp_path}/alias", made.folder)
    assert by_alias.held(f"{root}/train.py") == by_alias.held(f"{tmp_path}/alias/train.py") == f"{made.folder}/train.py"


def test_a_link_of_the_versions_own_is_held_where_it_leads_to_the_version(root: Path, made: Version) -> None:
    (Path(made.folder) / "link.py").symlink_to("train.py")
    (Path(made.folder) / "out.py").symlink_to("/etc/hostname")
    assert made.holds(f"{made.folder}/link.py")
    assert not made.holds(f"{made.folder}/out.py")


def test_an_installed_link_to_the_root_is_no_library(root: Path, made: Version, tmp_path: Path) -> None:
    for site in (tmp_path / "env" / "site-packages", root / "lib" / "site-packages"):
        site.mkdir(parents=True, exist_ok=True)
        (site / "linked").symlink_to(root / "pkg")
        assert made.held(f"{site}/linked/part.py") == f"{made.folder}/pkg/part.py"
        assert made.held(str(site)) is None


def test_what_the_version_lacks_is_told_from_what_came_later(root: Path, made: Version) -> None:
    assert made.lacks(f"{root}/old.py")
    (root / "generated.py").write_text("later")
    assert not made.lacks(f"{root}/generated.py")
    (Path(made.folder) / "__pycache__").mkdir()
    again = Version(str(root), made.folder)
    assert not again.lacks(f"{root}/generated.py"), "byte code in the folder does not make it younger"
    assert not made.lacks(f"{root}/secret.py") and not made.lacks(f"{root}/train.py") and not made.lacks("/nowhere")


def test_a_script_is_the_versions_even_where_it_has_none(root: Path, made: Version) -> None:
    assert made.script(f"{root}/train.py") == f"{made.folder}/train.py"
    assert made.script(f"{root}/old.py") == f"{made.folder}/old.py", "which cannot be run, and that is said"
    assert made.script(f"{root}/secret.py") == f"{root}/secret.py"
    assert made.script("/bin/sh") == "/bin/sh"


@pytest.mark.parametrize(
    ("word", "inside"),
    [
        ("conf/base.yaml", "conf/base.yaml"), ("--c=conf/base.yaml", "conf/base.yaml"), ("conf", "conf"),
        ("file=./train.py", "train.py"), ("flat", "flat"), ("./pkg", "pkg"), ("pkg/part.py", "pkg/part.py"),
        *((word, None) for word in (
            "", "=", "--out=", ".", "..", "./", "pkg", "--model=pkg", "keep", "--out=keep", "data", "data/set.bin",
            "secret.py", "old.py", "new/file", "--lr=3", "https://host/train.py", "a\0b", "x" * 5000, "-", "~",
        )),
    ],
)  # fmt: skip
def test_arguments_that_name_what_the_version_holds(
    root: Path, made: Version, monkeypatch: pytest.MonkeyPatch, word: str, inside: str | None
) -> None:
    monkeypatch.chdir(root)
    name, is_option, _ = word.rpartition("=") if inside else ("", "", "")
    assert made.argument(word) == (word if inside is None else f"{name}{is_option}{made.folder}/{inside}")


def test_a_folder_with_results_in_it_stays_where_it_is(
    root: Path, made: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a script writes there must not land in the version folder, because a file in it is tracked."""
    monkeypatch.chdir(root)
    assert made.argument("--config=./conf") == f"--config={made.folder}/conf"
    (root / "conf" / "step-10.txt").write_text("saved meanwhile")
    assert made.argument("--out=./conf") == "--out=./conf"
    assert made.argument("conf/base.yaml") == f"{made.folder}/conf/base.yaml"


def test_absolute_arguments(root: Path, made: Version) -> None:
    assert made.argument(f"--c={root}/conf/base.yaml") == f"--c={made.folder}/conf/base.yaml"
    assert made.argument(f"{root}/data") == f"{root}/data"


def test_the_scripts_folder_and_a_modules_are_the_versions(
    root: Path, made: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "current", made)
    monkeypatch.chdir(root)
    command = {"kind": "script", "target": f"{made.folder}/train.py", "args": []}
    assert script.first_path(command) == made.folder
    # one that the version does not hold still imports the version's modules
    assert script.first_path({**command, "target": "secret.py"}) == made.folder
    assert script.first_path({**command, "kind": "module", "target": "pkg.part"}) == made.folder
    assert script.source_file({**command, "kind": "module", "target": "pkg.part"}) == f"{made.folder}/pkg/part.py"


def loaded(monkeypatch: pytest.MonkeyPatch, file: str, name: str = "mine") -> None:
    module = types.ModuleType(name)
    module.__file__ = file
    monkeypatch.setitem(sys.modules, name, module)


def test_a_module_of_the_root_that_the_version_has_another_of_ends_the_rank(
    root: Path, made: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    version.check(3)
    monkeypatch.setattr(version, "current", made)
    for fine in ("secret.py", "data/set.bin", "lib/site-packages/dep.py"):
        loaded(monkeypatch, f"{root}/{fine}")
        version.check(3)
    loaded(monkeypatch, f"{made.folder}/pkg/part.py")
    version.check(3)
    loaded(monkeypatch, f"{root}/pkg/part.py", "pkg.part")
    with pytest.raises(WrongCode) as found:
        version.check(3)
    for part in ("rank 3", "module pkg.part", f"{root}/pkg/part.py", f"{made.folder}/pkg/part.py", "__file__"):
        assert part in str(found.value)
    loaded(monkeypatch, f"{root}/old.py", "pkg.part")
    with pytest.raises(WrongCode, match=r"the version has no .*/old\.py"):
        version.check(3)


def test_what_was_imported_from_the_folder_is_looked_at_for_changes(
    root: Path, made: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = {"kind": "script", "target": f"{root}/pkg/part.py", "args": []}
    loaded(monkeypatch, f"{root}/conf/base.yaml")
    assert Imported(command).changed() is None
    in_root = Imported(command, str(root))
    (root / "conf" / "base.yaml").write_text("edited")
    assert in_root.changed() == f"{root}/conf/base.yaml"

    monkeypatch.setattr(version, "current", made)
    for file in (f"{made.folder}/pkg/part.py", f"{made.folder}/secret.py", f"{root}/data/set.bin"):
        loaded(monkeypatch, file)
        imported = Imported(command, str(root))
        assert imported.changed() is None
        Path(file).write_text("edited")
        assert imported.changed() == file


def test_a_folder_that_is_not_there_is_said_in_a_line(root: Path) -> None:
    code = {"version": 2, "digest": "d", "root": str(root), "folder": "/nowhere"}
    with pytest.raises(SystemExit, match="no code to run in /nowhere: No such file or directory"):
        version.enter({"command": {"kind": "script", "target": "train.py", "args": []}, "code": code})


def test_without_a_version_nothing_is_another_file(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    monkeypatch.chdir(root)
    given = {"command": {"kind": "script", "target": "train.py", "args": ["conf/base.yaml"]}, "code": None}
    before = list(sys.path), list(sys.meta_path)
    assert version.enter(given) is given
    assert version.arguments(["conf/base.yaml"]) == ["conf/base.yaml"]
    assert version.first_path("x") == "x" and version.problem() is None and version.digest(given) == ""
    assert (list(sys.path), list(sys.meta_path)) == before and os.getcwd() == str(root)
