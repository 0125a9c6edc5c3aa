"""The controller's archives: each is what its name says, and no trouble with them is anybody else's."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from evertrain.controller import capture as capturing
from evertrain.controller import code_store
from evertrain.controller.code_store import CodeStore
from evertrain.model.code import Code, Diff
from evertrain.model.config import CodeConfig, Config
from evertrain.model.spec import Command, ControllerSpec
from evertrain.versions.errors import ArchiveError
from support import code


def spec(folder: Path, config: CodeConfig | None = None, **different: Any) -> ControllerSpec:
    """The run directory lies in the working tree, as it does usually."""
    root = folder / "project"
    run_dir = root / ".evertrain" / "job"
    run_dir.mkdir(parents=True, exist_ok=True)
    usual: dict[str, Any] = {
        "job": "job", "run_id": "job-1", "run_dir": str(run_dir), "log_root": str(run_dir / "logs"),
        "database": str(run_dir / "events.db"), "token_file": "", "listen_fd": 0, "url": "", "nodes": ("gpu01",),
        "nproc_per_node": 1, "command": Command(kind="script", target="train.py"), "code_root": str(root),
        "code_dir": str(run_dir / "code"), "config": Config(code=config or CodeConfig()),
    }  # fmt: skip
    return ControllerSpec(**{**usual, **different})


async def until(is_so: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not is_so():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within 20 s: {what}") from None


async def captured(store: CodeStore) -> tuple[Code | None, str]:
    store.begin()
    await until(lambda: store.captured, "it is known what the code is")
    assert store.captured is not None
    return store.captured


async def pieces(content: bytes, size: int = 100) -> AsyncIterator[bytes]:
    for begin in range(0, len(content), size):
        yield content[begin : begin + size]


def hidden(store: CodeStore) -> list[str]:
    return [path.name for path in store.path("x").parent.iterdir() if path.name.startswith(".")]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return code.written(tmp_path / "project")


@pytest.fixture
def store(tmp_path: Path, project: Path) -> CodeStore:
    return CodeStore(spec(tmp_path), lambda: None)


@pytest.fixture
def other(tmp_path: Path) -> tuple[Code, bytes]:
    """Another version, as a command brings it."""
    return code.another(tmp_path)


# --- what the user has


async def test_the_users_files_are_captured_once_and_who_waits_is_woken(tmp_path: Path, project: Path) -> None:
    woken: list[bool] = []
    made = spec(tmp_path)
    (Path(made.run_dir) / "events.py").write_text("of the run, not of the code")
    store = CodeStore(made, lambda: woken.append(asyncio.get_running_loop().is_running()))
    assert store.captured is None
    found, problem = await captured(store)
    assert found is not None and problem == ""
    assert (found.files, found.bytes) == (2, sum(map(len, code.FILES.values())))
    assert found == store.known(found.digest)
    assert found.archive_bytes == store.path(found.digest).stat().st_size
    await until(lambda: woken, "the conductor is woken")
    assert woken == [True], "in the event loop"
    (project / "train.py").write_text("later")
    store.begin()
    await asyncio.sleep(0)
    assert store.captured == (found, "")
    await until(lambda: hidden(store) == [], "nothing half is left")
    assert os.listdir(store.path("x").parent) == [f"{found.digest}.tar.gz"]


async def test_the_same_files_again_are_the_same_archive(tmp_path: Path, store: CodeStore) -> None:
    found, _ = await captured(store)
    assert found is not None
    before = store.path(found.digest).stat()
    later = CodeStore(spec(tmp_path), lambda: None)
    assert await captured(later) == (found, "")
    assert later.path(found.digest).stat().st_ino == before.st_ino, "its size may have been announced"


async def test_what_is_too_large_is_not_captured_and_the_line_says_what_to_do(tmp_path: Path, project: Path) -> None:
    store = CodeStore(spec(tmp_path, CodeConfig(most_files=1)), lambda: None)
    found, problem = await captured(store)
    assert found is None and "--code DIR" in problem and "\n" not in problem


async def test_where_no_folder_is_known_nothing_is_captured(tmp_path: Path) -> None:
    assert await captured(CodeStore(spec(tmp_path, code_root=""), lambda: None)) == (
        None,
        "there is no folder of code; name one with --code DIR",
    )


async def test_a_capture_that_fails_is_no_trouble_of_the_job(store: CodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing.sys, "executable", "/bin/false")
    assert await captured(store) == (
        None,
        "the code is not captured: the process for that ended with status 1; see the controller's log",
    )
    monkeypatch.setattr(capturing.sys, "executable", "/nowhere/python")
    later = CodeStore(store._spec, lambda: None)
    found, problem = await captured(later)
    assert found is None and "/nowhere/python: No such file" in problem
    await until(lambda: hidden(store) == [], "nothing half is left")


async def test_a_capture_that_was_killed_in_the_middle_leaves_nothing(store: CodeStore) -> None:
    half = store.path("x").parent / ".capture" / ".abcdefgh.partial"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"half")
    found, problem = await captured(store)
    assert found is not None and problem == ""
    await until(lambda: hidden(store) == [], "nothing half is left")


# --- what commands bring


async def test_what_is_brought_is_there_under_its_digest(store: CodeStore, other: tuple[Code, bytes]) -> None:
    made, content = other
    assert store.known(made.digest) is None
    assert await store.put(made.digest, pieces(content)) == made
    assert store.known(made.digest) == made
    assert store.path(made.digest).read_bytes() == content
    inode = store.path(made.digest).stat().st_ino
    assert await store.put(made.digest, pieces(content)) == made
    assert store.path(made.digest).stat().st_ino == inode, "once is enough"
    await until(lambda: hidden(store) == [], "nothing half is left")


@pytest.mark.parametrize("spoil", ["digest", "half", "noise", "nothing"])
async def test_what_is_not_what_it_should_be_is_refused(
    store: CodeStore, other: tuple[Code, bytes], spoil: str
) -> None:
    made, content = other
    digest = "0" * 64 if spoil == "digest" else made.digest
    brought = {"digest": content, "half": content[: len(content) // 2], "noise": b"noise" * 99, "nothing": b""}[spoil]
    with pytest.raises(ArchiveError) as refused:
        await store.put(digest, pieces(brought))
    assert "\n" not in str(refused.value)
    assert store.known(digest) is None and not store.path(digest).exists()
    await until(lambda: hidden(store) == [], "nothing half is left")
    # and troubles nobody else
    assert await store.put(made.digest, pieces(content)) == made


async def test_what_is_too_large_is_refused_before_all_of_it_has_come(tmp_path: Path) -> None:
    config = CodeConfig(most_bytes=10, most_files=1)
    store = CodeStore(spec(tmp_path, config), lambda: None)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 20
            yield bytes(1 << 20)

    with pytest.raises(ArchiveError, match="larger than"):
        await store.put("0" * 64, endless())
    assert sent <= config.most_archive_bytes + (1 << 20)
    await until(lambda: hidden(store) == [], "nothing half is left")


async def test_who_brings_something_may_break_off(store: CodeStore, other: tuple[Code, bytes]) -> None:
    made, content = other

    async def broken() -> AsyncIterator[bytes]:
        yield content[:50]
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        await store.put(made.digest, broken())
    await until(lambda: hidden(store) == [], "nothing half is left")
    assert store.known(made.digest) is None


async def test_a_run_directory_that_is_gone_is_trouble_of_the_request_only(
    tmp_path: Path, store: CodeStore, other: tuple[Code, bytes]
) -> None:
    made, content = other
    run_dir = Path(spec(tmp_path).run_dir)
    shutil.rmtree(run_dir)
    with pytest.raises(OSError):
        await store.put(made.digest, pieces(content))
    assert store.known(made.digest) is None
    found, problem = await captured(store)
    assert found is None and "No such file" in problem
    assert not run_dir.exists(), "it does not come back"


async def test_a_full_disk_is_trouble_of_the_request_only(
    store: CodeStore, other: tuple[Code, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, content = other
    append = code_store.append
    with monkeypatch.context() as patched:
        # what is written to this device finds no room
        patched.setattr(code_store, "append", lambda _, piece: append(Path("/dev/full"), piece))
        with pytest.raises(OSError, match="No space left"):
            await store.put(made.digest, pieces(content))
    assert await store.put(made.digest, pieces(content)) == made


async def test_what_a_killed_controller_has_left_is_removed(store: CodeStore, other: tuple[Code, bytes]) -> None:
    made, content = other
    folder = store.path("x").parent
    folder.mkdir()
    (folder / f".{'a' * 16}.arriving").write_bytes(b"half")
    (folder / ".nfs0001").write_bytes(b"not ours")

    async def both() -> AsyncIterator[bytes]:
        yield content[:50]
        # while this one is arriving another one comes, and clears up
        await store.put(made.digest, pieces(content))
        yield content[50:]

    assert await store.put(made.digest, both()) == made
    await until(lambda: hidden(store) == [".nfs0001"], "nothing half is left")


# --- what is known


async def test_an_archive_is_verified_once_for_as_long_as_it_is_the_same_file(
    tmp_path: Path, store: CodeStore, other: tuple[Code, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, content = other
    await store.put(made.digest, pieces(content))
    looks: list[str] = []
    check = code_store.archive.check
    monkeypatch.setattr(code_store.archive, "check", lambda *given: (looks.append(given[1]), check(*given))[1])
    later = CodeStore(spec(tmp_path), lambda: None)
    assert later.known(made.digest) == later.known(made.digest) == made
    assert looks == [made.digest]
    path = later.path(made.digest)
    path.write_bytes(content[:-9])
    assert later.known(made.digest) is None, "it was damaged since then"
    # and is not in the way of a good one
    assert await later.put(made.digest, pieces(content)) == made == later.known(made.digest)
    path.unlink()
    assert later.known(made.digest) is None


@pytest.mark.parametrize(
    ("target", "held"),
    [
        ("train.py", "train.py"), ("{root}/model/../train.py", "train.py"), ("{link}/train.py", "train.py"),
        ("{root}/model/__init__.py", "model/__init__.py"), ("{root}/old.py", None), ("/elsewhere/train.py", None),
    ],
)  # fmt: skip
async def test_where_the_script_lies_in_a_version(
    tmp_path: Path, project: Path, other: tuple[Code, bytes], monkeypatch: pytest.MonkeyPatch, target: str,
    held: str | None,
) -> None:  # fmt: skip
    monkeypatch.chdir(project)
    (tmp_path / "link").symlink_to(project)
    command = Command(kind="script", target=target.format(root=project, link=tmp_path / "link"))
    store = CodeStore(spec(tmp_path, command=command), lambda: None)
    found, _ = await captured(store)
    assert found is not None
    made, content = other
    await store.put(made.digest, pieces(content))
    assert store.script_in(found.digest) == held
    assert store.script_in(made.digest) == ("train.py" if held == "train.py" else None)
    later = CodeStore(spec(tmp_path, command=command), lambda: None)
    assert later.script_in(made.digest) == store.script_in(made.digest)
    module = CodeStore(spec(tmp_path, command=Command(kind="module", target="train.py")), lambda: None)
    assert module.script_in(found.digest) is None
    with pytest.raises(ArchiveError):
        module.script_in("0" * 64)


async def test_what_is_different_between_two_versions(store: CodeStore, other: tuple[Code, bytes]) -> None:
    made, content = other
    await store.put(made.digest, pieces(content))
    found, _ = await captured(store)
    assert found is not None
    different = store.diff(found.digest, made.digest)
    assert (different.added, different.removed, different.changed) == (
        ("new.py",),
        ("model/__init__.py",),
        ("train.py",),
    )
    assert different.files == 3
    assert store.diff(made.digest, made.digest).files == 0


async def test_whoever_asks_again_does_not_have_it_compared_again(
    store: CodeStore, other: tuple[Code, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, content = other
    await store.put(made.digest, pieces(content))
    begun: list[str] = []
    go_on = threading.Event()

    def slow(before: str, after: str) -> Diff:
        begun.append(after)
        assert go_on.wait(10)
        return Diff(files=3)

    monkeypatch.setattr(store, "diff", slow)
    impatient = [asyncio.create_task(store.difference(made.digest, made.digest)) for _ in range(5)]
    await asyncio.sleep(0)
    impatient[0].cancel()
    go_on.set()
    assert [(await one).files for one in impatient[1:]] == [3, 3, 3, 3]
    assert (await store.difference(made.digest, made.digest)).files == 3
    assert begun == [made.digest]
    with pytest.raises(asyncio.CancelledError):
        await impatient[0]
