"""The examples are ordinary scripts: they run under plain torchrun, where nothing of ours is active."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--steps", "6", "--layers", "1", "--width", "32", "--print-every", "2", "--evaluate-every", "3"]


def torchrun(script: str, *args: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    started = subprocess.Popen(
        [*command, str(EXAMPLES / script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        out, _ = started.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        started.terminate()  # torchrun ends its ranks
        started.communicate(timeout=40)
        raise
    assert started.returncode == 0, out
    return out


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("train_gpt.py", []),
        ("train_gpt_fsdp.py", []),
        # tests/system/test_parallel.py trains it
        pytest.param("train_3d.py", ["--dp", "1", "--layers", "2"], marks=pytest.mark.matrix),
    ],
)
def test_gpt_trains_and_names_its_final_parameters(script: str, options: list[str], tmp_path: Path) -> None:
    out = torchrun(script, *SMALL, *options, "--out", str(tmp_path / "hash"))
    losses = [float(line.split()[3]) for line in out.splitlines() if line.startswith("step") and "seen" not in line]
    assert len(losses) == 3 and losses[-1] < losses[0] < 7.0
    digest = (tmp_path / "hash").read_text().strip()
    assert len(digest) == 64
    assert out.rstrip().endswith(f"final parameters sha256 {digest}")


@pytest.mark.matrix
def test_plain_goes_on_from_its_own_checkpoint(tmp_path: Path) -> None:
    assert "evertrain" not in (EXAMPLES / "plain.py").read_text().split('"""')[2]
    assert "starting after step 0" in torchrun("plain.py", "--checkpoints", str(tmp_path), "--steps", "20")
    again = torchrun("plain.py", "--checkpoints", str(tmp_path), "--steps", "30")
    assert "starting after step 20" in again and "step 30" in again
