"""A version folder is there whole or not at all, whoever else builds it and whatever became of the last one."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from evertrain.model.config import CodeConfig
from evertrain.versions import folder
from evertrain.versions.errors import ArchiveError
from evertrain.versions.manifest import Manifest
from support.trees import SCRIPT, packed, plant

CONFIG = CodeConfig()
FILES = SCRIPT | {"conf/a.yaml": "a: 1\n"}


class Place:
    """The user's folder, and a code folder with an archive of it."""

    def __init__(self, at: Path) -> None:
        self.root = plant(at / "root", FILES)
        (self.root / "train.py").chmod(0o755)
        (self.root / "link.py").symlink_to("model/net.py")
        self.code_dir = at / "run/code"
        self.archive = self.code_dir / "a.tar.gz"
        self.digest = packed(self.root, self.archive).digest

    def build(self, lock_limit_s: float = folder.LOCK_LIMIT_S) -> Path:
        return folder.build(self.archive, self.digest, self.root, self.code_dir, CONFIG, "n0", lock_limit_s)

    def manifest(self) -> Manifest:
        (path,) = self.code_dir.glob("*.json")
        return msgspec.json.decode(path.read_bytes(), type=Manifest)

    def hidden(self) -> list[str]:
        return [path.name for path in self.code_dir.glob(".*") if not path.name.endswith(".lock")]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_a_folder_has_what_the_archive_has(place: Place) -> None:
    built = place.build()
    assert built.parent == place.code_dir and built.name.startswith(f"{place.digest[:16]}-")
    assert {path: (built / path).read_text() for path in FILES} == FILES
    assert os.readlink(built / "link.py") == "model/net.py"
    modes = {path: stat.S_IMODE((built / path).stat().st_mode) for path in ("train.py", "model/net.py", "model", ".")}
    assert modes == {"train.py": 0o555, "model/net.py": 0o444, "model": 0o755, ".": 0o755}
    assert place.hidden() == [] and folder.problems(built, place.manifest()) == ()
    assert place.manifest().digest == place.digest


def test_the_umask_does_not_matter(place: Place) -> None:
    mask = os.umask(0o077)
    try:
        built = place.build()
    finally:
        os.umask(mask)
    assert stat.S_IMODE((built / "model").stat().st_mode) == 0o755
    assert stat.S_IMODE((built / "train.py").stat().st_mode) == 0o555


def test_two_roots_have_a_folder_each(place: Place, tmp_path: Path) -> None:
    other = folder.build(place.archive, place.digest, tmp_path / "elsewhere", place.code_dir, CONFIG, "n1")
    assert other != place.build() and (other / "train.py").is_file()


def test_what_is_whole_is_kept(place: Place) -> None:
    built = place.build()
    (built / "model/__pycache__").mkdir()
    (built / "output.txt").write_text("from a run")
    before = built.stat().st_ino, (built / "train.py").stat().st_ino
    place.archive.unlink()
    assert place.build() == built
    assert (built.stat().st_ino, (built / "train.py").stat().st_ino) == before
    assert (built / "output.txt").read_text() == "from a run"


def test_what_is_no_source_may_be_written_to_and_stays_so(place: Place) -> None:
    (place.root / "losses.txt").write_text("1,2\n")
    place.digest = packed(place.root, place.archive).digest
    built = place.build()
    assert stat.S_IMODE((built / "losses.txt").stat().st_mode) == 0o644
    assert stat.S_IMODE((built / "model/net.py").stat().st_mode) == 0o444
    with (built / "losses.txt").open("a") as losses:
        losses.write("3,4\n")
    before = built.stat().st_ino
    assert place.build() == built and built.stat().st_ino == before
    assert (built / "losses.txt").read_text() == "1,2\n3,4\n"
    made = built.with_name(f"{built.name}.json").stat()
    os.utime(built / "losses.txt", ns=(made.st_atime_ns, made.st_mtime_ns - 1))
    assert folder.problems(built, place.manifest()) == ("losses.txt",), "no script has written that"


def _write(path: Path, text: str = "other") -> None:
    path.chmod(0o644)
    path.write_text(text)


def _link_out(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _folder_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


DAMAGE = {
    "other content": lambda built: _write(built / "train.py"),
    "the same size": lambda built: _write(built / "train.py", "print(2)\n"),
    "a file that is gone": lambda built: (built / "train.py").unlink(),
    "an empty file": lambda built: _write(built / "train.py", ""),
    "not executable": lambda built: (built / "train.py").chmod(0o444),
    "executable": lambda built: (built / "model/net.py").chmod(0o555),
    "a link in place of a file": lambda built: _link_out(built / "model/net.py"),
    "a link in place of a folder": lambda built: _folder_link(built / "model"),
    "another link": lambda built: _link_out(built / "link.py"),
    "a link that is gone": lambda built: (built / "link.py").unlink(),
    "a file in place of all": lambda built: (built.rename(built.with_name("x")), built.write_text("")),
    "a link in place of all": lambda built: _folder_link(built),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_built_anew(place: Place, case: str) -> None:
    built = place.build()
    DAMAGE[case](built)
    assert folder.problems(built, place.manifest())
    assert place.build() == built
    assert folder.problems(built, place.manifest()) == () and not built.is_symlink()
    assert {path: (built / path).read_text() for path in FILES} == FILES
    assert place.hidden() == []


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"digest": "x", "archive_bytes": 1, "files": []}', None])
def test_a_manifest_that_is_damaged(place: Place, text: bytes | None) -> None:
    built = place.build()
    (path,) = place.code_dir.glob("*.json")
    if text is None:
        path.unlink()
    else:
        path.write_bytes(text)
    assert place.build() == built
    assert place.manifest().digest == place.digest and folder.problems(built, place.manifest()) == ()


def test_what_a_script_wrote_is_there_after_the_repair(place: Place) -> None:
    built = place.build()
    plant(built, {"model/results/step.json": "1", "log.txt": "2", "model/__pycache__/net.pyc": "3"})
    _write(built / "train.py")
    place.build()
    assert (built / "model/results/step.json").read_text() == "1" and (built / "log.txt").read_text() == "2"
    assert not (built / "model/__pycache__").exists()


def test_no_folder_without_a_good_archive(place: Place) -> None:
    place.archive.write_bytes(place.archive.read_bytes()[:-9])
    with pytest.raises(ArchiveError):
        place.build()
    for digest in ("../../x", "f" * 63, "", "F" * 64):
        with pytest.raises(ArchiveError, match="is not the digest"):
            folder.build(place.archive, digest, place.root, place.code_dir, CONFIG, "n0")
    place.archive.unlink()
    with pytest.raises(ArchiveError, match="cannot be read"):
        place.build()
    assert [path for path in place.code_dir.iterdir() if not path.name.endswith(".lock")] == []


def test_several_build_the_same_at_once(place: Place) -> None:
    gate = threading.Barrier(6)

    def one(at: int) -> Path:
        gate.wait()
        # half of them do not wait for the others
        return folder.build(
            place.archive, place.digest, place.root, place.code_dir, CONFIG, f"n{at}", lock_limit_s=60.0 * (at % 2)
        )

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(one, range(6)))) == 1
    place.build()
    assert folder.problems(place.build(), place.manifest()) == () and place.hidden() == []


def test_one_that_is_stopped_does_not_hold_up_the_others(place: Place) -> None:
    built = place.build()
    with open(place.code_dir / f".{built.name}.lock", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (built / "train.py").unlink()
        assert place.build(lock_limit_s=0) == built
    assert (built / "train.py").is_file()


KILLED = """
import os, signal, sys
from pathlib import Path
from evertrain.model.config import CodeConfig
from evertrain.versions import folder

left = int(sys.argv[1])

def watched(event, args):
    global left
    if event in ("open", "os.mkdir", "os.rename", "os.chmod", "os.symlink", "os.remove", "os.utime", "shutil.rmtree"):
        if "-" in str(args[0]) or "partial" in str(args[0]) or event != "open":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

archive, digest, root, code_dir = sys.argv[2:]
sys.addaudithook(watched)
folder.build(Path(archive), digest, Path(root), Path(code_dir), CodeConfig(), "killed")
"""


def test_killed_at_any_point_the_next_one_builds(place: Place) -> None:
    built = place.build()
    place.code_dir.joinpath("keep").write_text("of somebody else")
    points = 0
    ended = False
    while not ended and points < 200:
        points += 7
        is_first = points % 2 == 0
        if is_first:
            shutil.rmtree(built)
        else:
            # a damaged folder with something of a script's in it
            _write(built / "train.py")
            (built / "own.txt").write_text("of a script")
        command = [sys.executable, "-c", KILLED, str(points), str(place.archive), place.digest]
        died = subprocess.run([*command, str(place.root), str(place.code_dir)], timeout=60)
        ended = died.returncode == 0
        assert ended or died.returncode == -signal.SIGKILL
        if os.path.lexists(built) and not ended:
            # never half of it: what the manifest names is either as it was, damaged by us, or whole
            assert set(folder.problems(built, place.manifest())) <= (set() if is_first else {"train.py"})
        assert place.build() == built and place.hidden() == []
        assert folder.problems(built, place.manifest()) == ()
        assert is_first or (built / "own.txt").read_text() == "of a script"
    assert ended and points > 20
    assert place.code_dir.joinpath("keep").read_text() == "of somebody else"


@pytest.mark.parametrize("call", ["rename", "replace", "mkdir", "symlink", "chmod"])
def test_a_full_disk_leaves_nothing_behind(place: Place, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(OSError, match="No space left"):
            place.build()
    left = [path.name for path in place.code_dir.iterdir() if path.suffix not in (".lock", ".gz", ".json")]
    assert left == []
    assert (place.build() / "train.py").is_file()


def test_a_full_disk_while_repairing_loses_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    built = place.build()
    (built / "own.txt").write_text("of a script")
    (built / "train.py").unlink()
    rename = os.rename

    def full(old: str | Path, new: str | Path) -> None:
        if Path(old).name == "code":
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(old, new)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", full)
        with pytest.raises(OSError, match="No space left"):
            place.build()
    assert (built / "own.txt").read_text() == "of a script"
    place.build()
    assert (built / "train.py").is_file() and (built / "own.txt").is_file()


def test_somebody_who_keeps_breaking_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "problems", lambda *_: ("train.py",))
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(OSError, match="keeps changing"))
        place.build()
