"""Fixtures of the test programs' tests: nodes on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fleet import Fleet, server


@pytest.fixture(scope="session")
def fleet_server() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="evertrain-test-") as folder:
        with server(Path(folder) / "socket") as path:
            yield path


@pytest.fixture
def fleet(fleet_server: Path, tmp_path: Path) -> Iterator[Fleet]:
    opened = Fleet(fleet_server, tmp_path)
    yield opened
    opened.close()
