"""What a rank opens at the old place of a file that its version has another of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evertrain.worker import reads
from evertrain.worker.version import Version
from support import versions


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "root"
    for name in ("conf.yaml", "same.yaml", "data/x.bin", "secret"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("as it was")
    monkeypatch.chdir(root)
    return root


@pytest.fixture
def hook(root: Path, tmp_path: Path) -> reads.Hook:
    held = {"conf.yaml": "as it is.", "same.yaml": "as it was"}
    versions.make(root, tmp_path / "v2", held)
    return reads.hook(Version(str(root), str(tmp_path / "v2")), "rank 3")


def opens(hook: reads.Hook, path: object, flags: object = os.O_RDONLY | os.O_CLOEXEC) -> None:
    hook("open", (path, "r", flags))


def test_it_is_said_once_with_what_to_do(
    hook: reads.Hook, root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    opens(hook, "conf.yaml")
    said = capfd.readouterr().err
    assert said == (
        f"evertrain: rank 3 reads {root}/conf.yaml, of which the version that it runs has another: to read that one "
        f"({tmp_path}/v2/conf.yaml), use a path made from __file__, or give it as an argument of the script\n"
    )
    for again in ("conf.yaml", str(root / "conf.yaml"), "./conf.yaml"):
        opens(hook, again)
    child = os.fork()
    if child == 0:
        opens(hook, "conf.yaml")
        os._exit(0)
    os.waitpid(child, 0)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "path", ["same.yaml", "data/x.bin", "secret", "nowhere", "", "/etc/hostname", b"conf.yaml", 7, None, "\0"]
)
def test_all_else_is_passed_over(hook: reads.Hook, capfd: pytest.CaptureFixture[str], path: object) -> None:
    opens(hook, path)
    assert capfd.readouterr().err == ""


def test_writing_and_other_events_are_none_of_it(
    hook: reads.Hook, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_CREAT, "odd"):
        opens(hook, "conf.yaml", flags)
    opens(hook, str(tmp_path / "v2" / "conf.yaml"))
    hook("open", ())
    hook("import", ("conf.yaml", None, 0))
    assert capfd.readouterr().err == ""
