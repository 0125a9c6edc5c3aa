"""`make demo` keeps its promise, and would say so if it did not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import EXAMPLES, user_environment


@pytest.mark.timeout(400)
def test_the_demonstration_ends_with_the_same_bits(tmp_path: Path) -> None:
    demo = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"],
        cwd=tmp_path,
        env=user_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stdout.splitlines()[-1] == "bit-identical: yes"
    assert "rank 0 on node-0" in demo.stdout and "node-1 is evicted" in demo.stderr
