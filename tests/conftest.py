"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support import jobs, leftovers

StartJob = Callable[..., jobs.Job]
InPeace = Callable[..., Path]


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[StartJob]:
    """`support.jobs.start` in this test's folder, or in `folder` below it; at the end every job is closed."""
    started: list[jobs.Job] = []

    def start(script: str | Path, *, folder: str = ".", **options: Any) -> jobs.Job:
        (tmp_path / folder).mkdir(exist_ok=True)
        started.append(jobs.start(tmp_path / folder, script, **options))
        return started[-1]

    yield start
    jobs.close(tmp_path, started)


@pytest.fixture(scope="session")
def in_peace(tmp_path_factory: pytest.TempPathFactory) -> InPeace:
    """Folder of a job that nobody has disturbed: what others are compared with. The same one runs only once."""
    done: dict[tuple[str, ...], Path] = {}

    def run(script: str, *args: str, nproc: int, flags: Sequence[str] = ()) -> Path:
        key = (script, *args, str(nproc), *flags)
        if key not in done:
            folder = tmp_path_factory.mktemp("in-peace")
            job = jobs.start(folder, script, nproc=nproc, flags=flags, args=args)
            try:
                assert job.wait() == 0
                assert job.incidents() == []
            finally:
                jobs.close(folder, [job])
            done[key] = folder
        return done[key]

    return run


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever the tests of this process did, nothing of their jobs is left when they are over."""
    yield
    left = leftovers.after_a_while(tmp_path_factory.getbasetemp(), [f"-{jobs.SESSION}-"], within_s=15)
    assert [*leftovers.found_at_close, *left] == []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of tests/system starts real processes."""
    for item in items:
        if "system" in item.path.parts:
            item.add_marker(pytest.mark.system)
