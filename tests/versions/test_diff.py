"""What differs between two archives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evertrain.model.code import Diff
from evertrain.model.config import CodeConfig
from evertrain.versions import archive, diff
from evertrain.versions.errors import ArchiveError
from support.trees import SCRIPT, packed, plant

CONFIG = CodeConfig()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return plant(tmp_path / "root", SCRIPT)


def test_files_and_lines(root: Path, tmp_path: Path) -> None:
    plant(root, {"a.py": "1\n2\n2\n3\n", "gone/b.py": "x\ny\n", "x.sh": "", "was.txt": "1\n"})
    (root / "link.py").symlink_to("a.py")
    before = packed(root, tmp_path / "before")
    plant(root, {"a.py": "3\n1\n2\n4\n5\n", "new.py": "1\n2\n3"})
    (root / "gone/b.py").unlink()
    (root / "x.sh").chmod(0o755)
    (root / "link.py").unlink()
    (root / "link.py").symlink_to("train.py")
    (root / "was.txt").unlink()
    (root / "was.txt").symlink_to("a.py")
    after = packed(root, tmp_path / "after")
    found = diff.between(tmp_path / "before", tmp_path / "after", CONFIG, before.digest, after.digest)
    assert found == Diff(
        added=("new.py",),
        removed=("gone/b.py",),
        changed=("a.py", "link.py", "was.txt", "x.sh"),
        files=6,
        lines_added=2 + 3,
        lines_removed=1 + 2 + 1,
    )
    back = diff.between(tmp_path / "after", tmp_path / "before", CONFIG)
    assert (back.added, back.removed, back.lines_added, back.lines_removed) == (found.removed, found.added, 4, 5)


def test_nothing(root: Path, tmp_path: Path) -> None:
    packed(root, tmp_path / "a")
    assert diff.between(tmp_path / "a", tmp_path / "a", CONFIG) == Diff()


def test_the_first_of_many(root: Path, tmp_path: Path) -> None:
    packed(root, tmp_path / "before")
    plant(root, {f"many/{at:03}.py": "1\n" for at in reversed(range(50))})
    packed(root, tmp_path / "after")
    found = diff.between(tmp_path / "before", tmp_path / "after", CONFIG)
    assert found.added == tuple(f"many/{at:03}.py" for at in range(20)) and found.files == 50
    assert found.lines_added == 50


def test_lines_of_what_is_no_text_or_too_large_are_not_counted(root: Path, tmp_path: Path) -> None:
    plant(
        root,
        {"b.so": b"\0\n\n", "large.txt": os.urandom(diff.LONGEST_TEXT).hex(), "shrunk.txt": os.urandom(1 << 20).hex()},
    )
    packed(root, tmp_path / "before")
    plant(
        root,
        {"b.so": "now\ntext\n", "large.txt": os.urandom(diff.LONGEST_TEXT).hex(), "shrunk.txt": "1\n", "c.so": b"\0\n"},
    )
    packed(root, tmp_path / "after")
    found = diff.between(tmp_path / "before", tmp_path / "after", CONFIG)
    assert (found.files, found.lines_added, found.lines_removed) == (4, 0, 0)


def test_manifests_alone(root: Path, tmp_path: Path) -> None:
    before = packed(root, tmp_path / "before")
    plant(root, {"train.py": "print(2)\n"})
    after = packed(root, tmp_path / "after")
    manifests = [
        archive.check(tmp_path / name, code.digest, CONFIG) for name, code in (("before", before), ("after", after))
    ]
    assert diff.of_manifests(*manifests) == Diff(changed=("train.py",), files=1)


def test_an_archive_that_is_damaged(root: Path, tmp_path: Path) -> None:
    code = packed(root, tmp_path / "a")
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes()[:-1])
    with pytest.raises(ArchiveError):
        diff.between(tmp_path / "a", tmp_path / "b", CONFIG)
    with pytest.raises(ArchiveError, match="another digest"):
        diff.between(tmp_path / "a", tmp_path / "a", CONFIG, code.digest, "0" * 64)
