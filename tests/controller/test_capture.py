"""The capture is a process that gives way, and ends with the controller."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from evertrain.controller import capture
from evertrain.controller.capture import Asked, Captured
from evertrain.model.config import CodeConfig
from support import code
from support.waiting import eventually


def asked(folder: Path, config: CodeConfig | None = None) -> Asked:
    target = folder / "archive" / "code.tar.gz"
    return Asked(root=str(folder / "project"), skip=(), config=config or CodeConfig(), target=str(target))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return code.written(tmp_path / "project")


async def test_the_process_finds_what_is_found_here(tmp_path: Path, project: Path) -> None:
    found = await capture.capture(asked(tmp_path))
    assert found == Captured(code=code.packed(project, tmp_path / "again.tar.gz"))
    assert (tmp_path / "archive" / "code.tar.gz").read_bytes() == (tmp_path / "again.tar.gz").read_bytes()


async def test_what_cannot_be_captured_is_one_line(tmp_path: Path, project: Path) -> None:
    found = await capture.capture(asked(tmp_path, CodeConfig(most_bytes=3)))
    assert found.code is None and found.problem and "\n" not in found.problem
    (tmp_path / "archive").write_text("no folder")
    found = await capture.capture(asked(tmp_path))
    assert found.code is None and found.problem.startswith("the code is not captured: ")


async def test_modules_beside_the_users_are_not_taken_for_ours(
    tmp_path: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "msgspec.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(project)
    assert (await capture.capture(asked(tmp_path))).code is not None


@pytest.fixture
def large(project: Path) -> Path:
    """It takes seconds to compress."""
    (project / "large.py").write_bytes(os.urandom(64 << 20))
    return project


def test_it_gives_way_and_ends_with_the_controller(tmp_path: Path, large: Path) -> None:
    command = [sys.executable, "-P", "-m", "evertrain.controller.capture"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(asked(tmp_path)) + b"\n")
        process.stdin.flush()
        eventually((tmp_path / "archive").exists, "it has begun to write", every_s=0.005)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) > os.getpriority(os.PRIO_PROCESS, 0)
        process.stdin.close()
        assert process.wait(20) == 1 and process.stdout.read() == b""
    assert not (tmp_path / "archive" / "code.tar.gz").exists()


async def test_who_no_longer_waits_ends_it(tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def noted(*command: str, **how: int) -> asyncio.subprocess.Process:
        started.append(await start(*command, **how))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    waiting = asyncio.create_task(capture.capture(asked(tmp_path)))
    async with asyncio.timeout(20):
        while not (tmp_path / "archive").exists():
            await asyncio.sleep(0.005)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert started[0].returncode == -9
