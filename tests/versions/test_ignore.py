"""What .gitignore means in a tree, compared with git itself where that is here."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from evertrain.model.config import CodeConfig
from support.trees import SCRIPT, kept, plant

NO_GIT = shutil.which("git") is None


def test_nested_files_and_those_of_the_repository(tmp_path: Path) -> None:
    root = plant(
        tmp_path / "repo",
        {
            ".git/info/exclude": "mine.py\n",
            ".gitignore": "# comment\n/out\n*.tmp.py\nsub/*.txt\ndeep/**/x.py\n",
            "out/a.py": "", "sub/out/a.py": "", "a.tmp.py": "", "sub/b.tmp.py": "", "mine.py": "", "sub/mine.py": "",
            "sub/.gitignore": "local.py\n!b.tmp.py\n", "sub/local.py": "", "local.py": "", "sub/a.txt": "",
            "sub/sub/a.txt": "", "deep/a/b/x.py": "", "deep/y.py": "",
        },
    )  # fmt: skip
    assert kept(root) == {
        ".gitignore", "sub/.gitignore", "sub/out/a.py", "sub/b.tmp.py", "local.py", "sub/sub/a.txt", "deep/y.py",
    }  # fmt: skip
    # a folder of it: what the repository says goes for it as well
    assert kept(root / "sub") == {".gitignore", "out/a.py", "b.tmp.py", "sub/a.txt"}
    # one that git ignores as a whole, and that was named as the code
    assert kept(root / "out") == {"a.py"}


def test_a_worktree_has_the_exclude_file_of_its_repository(tmp_path: Path) -> None:
    plant(tmp_path, {"repo/.git/info/exclude": "mine.py\n", "repo/.git/worktrees/w/commondir": "../..\n"})
    root = plant(tmp_path / "w", SCRIPT | {"mine.py": "", ".git": f"gitdir: {tmp_path}/repo/.git/worktrees/w\n"})
    assert kept(root) == set(SCRIPT)
    (root / ".git").write_bytes(b"\xff nonsense")
    assert kept(root) == {*SCRIPT, "mine.py"}


def test_a_negated_pattern_brings_back_what_is_excluded_by_default(tmp_path: Path) -> None:
    plant(tmp_path, SCRIPT | {"vocabulary.bin": "", "other.bin": "", "wandb/sweep.py": ""})
    assert kept(tmp_path) == set(SCRIPT)
    assert kept(tmp_path, CodeConfig(exclude=("!vocabulary.bin", "!wandb/"))) == {
        *SCRIPT, "vocabulary.bin", "wandb/sweep.py",
    }  # fmt: skip
    plant(tmp_path, {".gitignore": "!vocabulary.bin\n"})
    assert kept(tmp_path) == {*SCRIPT, "vocabulary.bin", ".gitignore"}
    # the config has the last word
    assert kept(tmp_path, CodeConfig(exclude=("*.bin", "model"))) == {"train.py", ".gitignore"}


def test_a_list_of_what_is_allowed_does_not_allow_what_is_never_code(tmp_path: Path) -> None:
    plant(
        tmp_path,
        SCRIPT
        | {
            ".gitignore": "*\n!*/\n!*.py\n!.gitignore\n",
            "notes.txt": "",
            ".venv/x.py": "",
            ".git/hook.py": "",
            ".env": "",
        },
    )
    assert kept(tmp_path) == {*SCRIPT, ".gitignore"}


@pytest.mark.parametrize("text", [b"!\n/\n//\n[\n", b"\xff\xfe\n", b"\xef\xbb\xbf*.txt\r\n", b"\\\n", b"[z-a]\n"])
def test_odd_ignore_files_do_no_harm(tmp_path: Path, text: bytes) -> None:
    plant(tmp_path, SCRIPT | {".gitignore": text, "a.txt": ""})
    assert kept(tmp_path) - {"a.txt"} == {*SCRIPT, ".gitignore"}


@pytest.mark.skipif(NO_GIT, reason="git is not installed")
@pytest.mark.parametrize(
    "rules",
    [
        "a*\n!ab*\n", "/a/\nb\n", "a/**/c\n", "**/c\n", "a/*\n!a/b\n", "*\n!*/\n!c\n", "b/\n", "/*\n!/a\n/a/*\n!/a/b\n",
        "[ab]\n", "a?\n", "\\!c\n#x\n", " c\nb \n", "a/b/\n!a/b/c\n", "c\n!/c\n",
        "*\n!/a\n", "*\n!/a/\n!c\n", "*/b\n", "a/**\n!a/b\n", "a/**\n!a/**/\n!bb\n", "**/b/\n!x/b\n",
        "b/\n!b\n", "c  \n", "!\n/\n",
        "a/**/\n", "**\n!a/\n!a/c\n", "/**/c\n", "**/a/**\n", "a[!b]*\n", "x/*/b\n", "[a-\n", "a//c\n",
    ],
)  # fmt: skip
def test_the_same_as_git(tmp_path: Path, rules: str) -> None:
    names = ["a/b/c", "a/c", "b/c", "ab/c", "abc", "c", "a/bb", "x/a/b/c", "x/b", "!c"]
    plant(tmp_path, dict.fromkeys(names, "x") | {".gitignore": rules})
    git = ["git", "-C", str(tmp_path), "-c", "core.excludesFile=/dev/null"]
    subprocess.run([*git, "init", "-q"], check=True)
    listed = subprocess.run([*git, "ls-files", "-z", "-o", "--exclude-standard"], check=True, capture_output=True)
    assert kept(tmp_path) == {name for name in listed.stdout.decode().split("\0") if name}
