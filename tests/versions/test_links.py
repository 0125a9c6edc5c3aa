"""What is no code a version folder takes from the original place, as it is there now."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evertrain.model.config import CodeConfig
from evertrain.versions import folder, tree
from evertrain.versions.archive import pack
from support.trees import SCRIPT, packed, plant

CONFIG = CodeConfig()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return plant(tmp_path / "root", SCRIPT)


def built(root: Path, digest: str = "", config: CodeConfig = CONFIG, run: str = "../run") -> Path:
    code_dir = root / run / "code"
    if not digest:
        code = pack(tree.scan(root, config, [code_dir.parent]), code_dir / "new")
        os.replace(code_dir / "new", code_dir / f"{code.digest}.tar.gz")
        digest = code.digest
    return folder.build(code_dir / f"{digest}.tar.gz", digest, root, code_dir, config, "n0")


def links(version: Path, root: Path) -> set[str]:
    """Those that lead to the same place below the root."""
    return {
        path.relative_to(version).as_posix()
        for path in version.rglob("*")
        if path.is_symlink() and os.readlink(path) == str(root / path.relative_to(version))
    }


def digest_of(version: Path) -> str:
    (found,) = [path for path in version.parent.glob("*.tar.gz") if path.name.startswith(version.name[:16])]
    return found.name.partition(".")[0]


def test_data_and_secrets_and_what_leads_out(root: Path, tmp_path: Path) -> None:
    plant(
        root,
        {
            "data/big.npy": "1", "outputs/": "", ".env": "SECRET=1", "model/weights.pt": "2", "wandb/x.py": "",
            "__pycache__/x.pyc": "", "model/__pycache__/net.pyc": "", "stray.pyc": "", ".git/HEAD": "ref", "a.log": "",
            ".gitignore": "local\ngenerated.py\n", "local/x.py": "x = 1", "model/generated.py": "y = 1",
            ".venv/pyvenv.cfg": "", "env311/pyvenv.cfg": "", "env311/lib/x.py": "",
        },
    )  # fmt: skip
    shared = plant(tmp_path / "shared", {"lib.py": ""})
    (root / "shared").symlink_to(shared)
    (root / "model/lib.py").symlink_to(shared / "lib.py")
    with open(os.fsencode(root) + b"/\xff.py", "wb"):
        pass
    version = built(root)
    assert links(version, root) == {
        "data", "outputs", ".env", "model/weights.pt", "wandb", ".git", "a.log", "local", "model/generated.py", ".venv",
        "env311", "shared", "model/lib.py", "\udcff.py",
    }  # fmt: skip
    # what a job writes there lands in the original
    (version / "outputs/result.txt").write_text("3")
    assert (root / "outputs/result.txt").read_text() == "3"
    assert not (version / "__pycache__").exists() and not (version / "model/__pycache__").exists()


def test_they_are_made_anew_at_each_build(root: Path) -> None:
    version = built(root)
    assert links(version, root) == set()
    plant(root, {"data/x.npy": "", "model/w.pt": "", "state.json": "{}"})
    assert built(root, digest_of(version)) == version
    assert links(version, root) == {"data", "model/w.pt", "state.json"}
    (root / "model/w.pt").unlink()
    (root / "state.json").unlink()
    (version / "own").symlink_to("/nowhere")
    (version / "mine.pt").write_text("of the job")
    plant(root, {"mine.pt": "of the user"})
    built(root, digest_of(version))
    assert links(version, root) == {"data"}
    assert os.readlink(version / "own") == "/nowhere" and (version / "mine.pt").read_text() == "of the job"


def test_code_of_a_later_version_does_not_come_into_an_earlier_one(root: Path) -> None:
    first = built(root)
    plant(
        root,
        {"json.py": "broken", "newer/__init__.py": "", "newer/data.npy": "", "model/extra.py": "", "notes/a.txt": ""},
    )
    (root / "alias.py").symlink_to("json.py")
    (root / "train.py").unlink()
    (root / "train.py").symlink_to("json.py")
    second = built(root)
    built(root, digest_of(first))
    assert links(first, root) == {"notes"} and (first / "train.py").read_text() == SCRIPT["train.py"]
    assert (second / "newer/data.npy").is_symlink() and (second / "json.py").is_file()


def test_what_one_version_ignores_the_next_may_have(root: Path) -> None:
    plant(root, {".gitignore": "generated.py\n", "generated.py": "x = 1"})
    first = built(root)
    plant(root, {".gitignore": ""})
    (first / "generated.py").unlink()
    built(root, digest_of(first))
    assert links(first, root) == {"generated.py"}


def test_a_large_folder_is_data_before_all_of_it_was_looked_at(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evertrain.versions.links.LOOKED_AT", 20)
    version = built(root)
    plant(root, {f"lake/{at}.txt": "" for at in range(21)} | {"lake/deep/x.py": ""})
    built(root, digest_of(version))
    assert links(version, root) == {"lake"}


def test_no_original_no_links(root: Path, tmp_path: Path) -> None:
    plant(root, {"data/x.npy": ""})
    digest = packed(root, tmp_path / "a").digest
    version = folder.build(tmp_path / "a", digest, tmp_path / "none", tmp_path / "code", CONFIG, "n0")
    assert sorted(path.name for path in version.iterdir()) == ["model", "train.py"]


@pytest.mark.parametrize("run", [".evertrain/job", "runs/job", "model/runs/job"])
def test_a_code_folder_below_the_root_leads_to_no_loop(root: Path, run: str) -> None:
    plant(root, {f"{run}/log.txt": "", "runs/other.npy": "", "runs/old/x.npy": "", "runs/newer.json": ""})
    version = built(root, run=run)
    seen = 0
    for place, folders, files in os.walk(version, followlinks=True):
        seen += len(files) + len(folders)
        assert seen < 100 and Path(place).resolve() != version.parent
    assert (version / "runs/old/x.npy").exists() and (version / "runs/other.npy").exists()
    if not run.startswith("."):
        assert (version / run / "log.txt").is_symlink() and not (version / run / "code").exists()


def test_patterns_of_the_config(root: Path) -> None:
    version = built(root, config=CodeConfig(exclude=("net.py",)))
    assert links(version, root) == {"model/net.py"}


def test_a_root_behind_a_link(root: Path, tmp_path: Path) -> None:
    plant(root, {"data/x.npy": ""})
    (tmp_path / "alias").symlink_to(root)
    assert links(built(tmp_path / "alias"), tmp_path / "alias") == {"data"}
