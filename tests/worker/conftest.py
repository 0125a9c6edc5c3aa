"""Fixtures of the worker's tests: gangs of real ranks."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .gang import Gang, server


@pytest.fixture(scope="session")
def gang_server() -> Iterator[subprocess.Popen[str]]:
    with server() as started:
        yield started


@pytest.fixture
def gang(gang_server: subprocess.Popen[str]) -> Iterator[Gang]:
    folder = Path(tempfile.mkdtemp(prefix="evertrain-test-", dir="/dev/shm"))
    yield Gang(gang_server, folder)
    shutil.rmtree(folder)
