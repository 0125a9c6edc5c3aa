"""Which folder is a job's code, and which files of it."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import msgspec
import pytest

from evertrain.model.config import CodeConfig
from evertrain.model.spec import Command
from evertrain.versions import roots, tree
from evertrain.versions.errors import TreeError
from support.trees import SCRIPT, kept, plant

CONFIG = CodeConfig()


def script(target: str) -> Command:
    return Command(kind="script", target=target)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def test_the_root_is_the_nearest_repository_else_the_folder_of_the_script(home: Path) -> None:
    plant(
        home, {"repo/.git/HEAD": "", "repo/jobs/a/train.py": "", "repo/sub/.git": "gitdir: x", "repo/sub/train.py": ""}
    )
    plant(home, {"plain/a/train.py": ""})
    repo = home / "repo"
    assert roots.root_of(script("jobs/a/train.py"), repo, home) == repo
    assert roots.root_of(script(str(repo / "jobs/a/train.py")), home, home) == repo
    assert roots.root_of(script("../repo/sub/train.py"), repo, home) == repo / "sub"
    assert roots.root_of(script("a/train.py"), home / "plain", home) == home / "plain/a"
    assert roots.root_of(Command(kind="module", target="jobs.a.train"), repo, home) == repo
    assert roots.root_of(Command(kind="module", target="a.train"), home / "plain", home) == home / "plain"
    assert roots.root_of(Command(kind="program", target="./a/run"), home / "plain", home) == home / "plain/a"


def test_the_home_folder_and_what_it_lies_in_are_no_root(home: Path, tmp_path: Path) -> None:
    plant(home, {".git/HEAD": "", "train.py": "", "a/train.py": ""})
    assert roots.root_of(script("train.py"), home, home) is None
    assert roots.root_of(script("train.py"), tmp_path, home) is None
    assert roots.root_of(script("/train.py"), home, home) is None
    # a home folder that is a repository, of dot files for example, is not the code
    assert roots.root_of(script("a/train.py"), home, home) == home / "a"
    link = tmp_path / "link"
    link.symlink_to(home)
    assert (
        roots.root_of(script("train.py"), link, home) is None and roots.root_of(script("train.py"), home, link) is None
    )


def test_a_program_of_the_system_has_no_tree(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in ("sh", "/bin/sh", "no-such-program"):
        assert roots.root_of(Command(kind="program", target=target), home, home) is None
    plant(home, {"repo/.git/HEAD": "", "repo/.venv/bin/my-trainer": "#!/bin/sh\n"})
    (home / "repo/.venv/bin/my-trainer").chmod(0o755)
    monkeypatch.setenv("PATH", str(home / "repo/.venv/bin"))
    assert roots.root_of(Command(kind="program", target="my-trainer"), home, home) == home / "repo"


def test_code_is_found_and_the_rest_is_named(tmp_path: Path) -> None:
    plant(tmp_path, SCRIPT | {"data/a.npy": "1", "empty/": "", "lib/ops.so": "elf", "deep/er/x.json": "{}"})
    (tmp_path / "train.py").chmod(0o755)
    found = tree.scan(tmp_path, CONFIG)
    assert [file.path for file in found.files] == [
        "deep/er/x.json", "lib/ops.so", "model/__init__.py", "model/net.py", "train.py",
    ]  # fmt: skip
    assert [file.path for file in found.files if file.executable] == ["train.py"]
    # folders that no code lies in are left where they are, so that the job's output lands there
    assert found.folders == ("deep", "deep/er", "lib", "model")
    assert [(left.path, left.reason) for left in found.left_out] == [("data/a.npy", "data")]
    assert found.bytes == 9 + 0 + 15 + 3 + 2


@pytest.mark.parametrize(
    "name",
    [
        ".git/config", ".hg/x", ".svn/x", "__pycache__/a.py", "a.pyc", ".mypy_cache/x", ".ruff_cache/x",
        ".pytest_cache/x", ".ipynb_checkpoints/x.ipynb", "node_modules/x.js", ".venv/x.py", "venv/x.py", ".evertrain/x",
        "wandb/x.json", "mlruns/x", "lightning_logs/x", ".env", ".env.production", "a.pem", "tls.key", "id_rsa",
        "id_rsa.pub", "id_ed25519", "a.p12", "a.pfx", ".netrc", ".npmrc", ".pypirc", ".aws/config", ".ssh/config",
        ".kube/config", "credentials", "credentials.json", "a.keystore", "a.pt", "a.pth", "a.ckpt", "a.safetensors",
        "a.npy", "a.NPZ", "a.parquet", "a.arrow", "a.h5", "a.hdf5", "a.tfrecord", "a.zip", "a.tar", "a.tar.xz", "a.gz",
        "a.zst", "a.bin", "a.onnx", "a.mp4", "a.JPG", "train.log", "slurm-12.out", "core.123",
    ],
)  # fmt: skip
def test_what_is_excluded_by_default(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {name: "x", f"deeper/{name}": "x", "train.py": ""})
    assert kept(tmp_path) == {"train.py"}


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.py", "secrets.py", "id_rsa_tools.py", "key.py", ".env.example", "env.py", "credentials/__init__.py",
        "venv.py", "ops.so", "wandb_utils.py", "config.yaml", "bin/run", "core.py", "setup.cfg", "model.pt.py", "log",
        "a\u00e4\u4e2d.py", "with space.py", ".gitignore", "x.egg-info/entry_points.txt", "keys.json",
    ],
)  # fmt: skip
def test_what_is_code_although_it_looks_like_it(tmp_path: Path, name: str) -> None:
    plant(tmp_path, {name: ""})
    assert kept(tmp_path) == {name}


def test_a_virtual_environment_of_any_name(tmp_path: Path) -> None:
    plant(tmp_path, SCRIPT | {"py311/pyvenv.cfg": "", "py311/lib/x.py": ""})
    assert kept(tmp_path) == set(SCRIPT)


def test_links_that_stay_inside_are_kept_and_made_relative(tmp_path: Path) -> None:
    root = plant(tmp_path / "root", {"model/net.py": "", "other/x.py": ""})
    plant(tmp_path, {"outside.py": "", "rootless/x.py": ""})
    (root / "absolute.py").symlink_to(root / "model/net.py")
    (root / "other/up.py").symlink_to("../model/net.py")
    (root / "chain").symlink_to("other/again")
    (root / "other/again").symlink_to("../model")
    (root / "all").symlink_to(".")
    (root / "around.py").symlink_to("../root/model/net.py")
    (root / "later.py").symlink_to("model/none.py")
    (root / "out.py").symlink_to("../outside.py")
    (root / "beside").symlink_to(tmp_path / "rootless")
    (root / "out-by-two").symlink_to("model/../../outside.py")
    (root / "loop").symlink_to("loop2")
    (root / "loop2").symlink_to("loop")
    assert kept(root) == {
        "model/net.py",
        "other/x.py",
        "absolute.py -> model/net.py",
        "other/up.py -> ../model/net.py",
        "chain -> model",
        "other/again -> ../model",
        "all -> .",
        "around.py -> model/net.py",
        "later.py -> model/none.py",
    }
    (tmp_path / "link").symlink_to(root)
    assert kept(tmp_path / "link") == kept(root)


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    plant(tmp_path, SCRIPT)
    os.mkfifo(tmp_path / "pipe.py")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        assert kept(tmp_path) == set(SCRIPT)
    os.mkfifo(tmp_path / ".gitignore")
    assert kept(tmp_path) == set(SCRIPT)


@pytest.mark.parametrize("name", [b"\xff.py", b"a\\b.py", b"a\nb.py", b"a\x7f.py", "a\u2028b.py".encode()])
def test_names_that_do_not_travel_are_left_out(tmp_path: Path, name: bytes) -> None:
    plant(tmp_path, SCRIPT)
    with open(os.fsencode(tmp_path) + b"/" + name, "wb"):
        pass
    os.mkdir(os.fsencode(tmp_path) + b"/d" + name)
    plant(Path(os.fsdecode(os.fsencode(tmp_path) + b"/d" + name)), SCRIPT)
    found = tree.scan(tmp_path, CONFIG)
    assert {file.path for file in found.files} == set(SCRIPT)
    assert len(found.left_out) == 2 and all("name" in left.reason for left in found.left_out)


def test_what_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, SCRIPT | {"locked/x.py": "", "own.py": ""})
    list_it, may = os.scandir, os.access

    def scandir(path: str | Path) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return list_it(path)

    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("own.py") and may(path, mode))
    found = tree.scan(tmp_path, CONFIG)
    assert {file.path for file in found.files} == set(SCRIPT)
    assert [left.path for left in found.left_out] == ["locked", "own.py"]


def test_what_is_skipped(tmp_path: Path) -> None:
    plant(tmp_path, SCRIPT | {"runs/a/run.json": "", "runs/b.json": ""})
    assert {file.path for file in tree.scan(tmp_path, CONFIG, [tmp_path / "runs/a"]).files} == {*SCRIPT, "runs/b.json"}


@pytest.mark.parametrize(
    ("files", "limits", "said"),
    [
        ({f"d/{at}.py": "" for at in range(6)}, {"most_files": 5}, "more than 5 files"),
        ({"a.py": "x" * 600, "big.txt": "x" * 900}, {"most_bytes": 1000}, "the largest big.txt"),
        ({f"{at}.npy": "" for at in range(60)}, {"most_files": 5}, "more than 50 files, whether code or not"),
        ({f"{at}/b/c/x": "" for at in range(5)}, {"most_files": 10}, "more than 10 folders"),
    ],
)
def test_what_is_too_large_is_refused_with_what_to_do(
    tmp_path: Path, files: dict[str, str], limits: dict[str, int], said: str
) -> None:
    plant(tmp_path, files)
    with pytest.raises(TreeError) as refused:
        tree.scan(tmp_path, msgspec.structs.replace(CONFIG, **limits))
    assert said in str(refused.value) and "--code DIR" in str(refused.value) and "\n" not in str(refused.value)


def test_a_scan_ends_in_time(tmp_path: Path) -> None:
    plant(tmp_path, {f"{at}.py": "" for at in range(200)})
    with pytest.raises(TreeError, match="more than can be looked at in 0 s"):
        tree.scan(tmp_path, CONFIG, limit_s=0)


def test_what_is_ignored_is_not_walked_through(tmp_path: Path) -> None:
    plant(tmp_path, {".gitignore": "lake\n", "train.py": ""} | {f"lake/{at}.py": "" for at in range(200)})
    assert len(tree.scan(tmp_path, CodeConfig(most_files=10)).files) == 2


@pytest.mark.parametrize("name", ["nowhere", "train.py", "a\nb"])
def test_no_folder(tmp_path: Path, name: str) -> None:
    plant(tmp_path, SCRIPT)
    with pytest.raises(TreeError, match="is not a folder") as refused:
        tree.scan(tmp_path / name, CONFIG)
    assert "\n" not in str(refused.value)


def test_many_small_files_in_no_time(tmp_path: Path) -> None:
    plant(tmp_path, {".gitignore": "*.tmp\n/out/\n!a.tmp\n"} | {f"{at % 50}/{at}.py": "" for at in range(500)})
    began = time.process_time()
    assert len(tree.scan(tmp_path, CONFIG).files) == 501
    assert time.process_time() - began < 2
