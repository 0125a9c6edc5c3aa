"""On a machine with GPUs: NCCL loads the plugin that `evertrain run` gives it, and its chunks are counted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import StartJob
from evertrain.trace import layout
from evertrain.trace.reading import Reader

SCRIPT = """\
import os, time, torch, torch.distributed as dist
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
data = torch.ones(4 << 20, device="cuda")
while not os.path.exists("enough"):
    dist.all_reduce(data)
    torch.cuda.synchronize()
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()
"""


def _gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.count("GPU ")


pytestmark = [
    pytest.mark.system,
    pytest.mark.gpu,
    pytest.mark.skipif(_gpus() < 2, reason="needs two NVIDIA GPUs and a torch for CUDA"),
]


def test_chunks_of_real_collectives_are_counted(start_job: StartJob, tmp_path: Path) -> None:
    (tmp_path / "reduce.py").write_text(SCRIPT)
    # sockets between the two ranks, so that proxies work
    job = start_job("reduce.py", nproc=2, environment={"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"})
    status = job.wait_until(
        lambda seen: any("2 ranks, NCCL" in line for line in seen["active"]), "both ranks' plugins", within_s=90
    )
    (line,) = [line for line in status["active"] if "NCCL's collectives" in line]
    assert "interface v" in line

    for pid in job.rank_pids().values():
        (file,) = Path("/dev/shm").glob(f"evertrain-*/**/trace/*-nccl-{pid}.ring")
        with Reader(file) as reader:
            found = reader.since(0).operations
            done = found[found["kind"] == layout.KINDS["done"]]
            sent = done[done["flow"] == layout.SIDES["send"]]
            assert len(sent) and (sent["done"] == sent["total"]).all() and (sent["transmitted"] == sent["total"]).all()
            whole = done[done["flow"] == layout.SIDES["whole"]]
            assert "all_reduce" in {layout.OPS[int(op)] for op in whole["op"]}
            assert reader.lost() == 0
    (tmp_path / "enough").touch()
    assert job.wait() == 0
