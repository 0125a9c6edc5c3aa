"""When all that was near is gone, a job goes on from the shared store, with another number of ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from conftest import StartJob

SCRIPT = """
import json, os, time
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import evertrain

RANK = int(os.environ["RANK"])
dist.init_process_group("gloo")
torch.manual_seed(1)
net = torch.nn.Linear(8, 8)
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
checkpointer = evertrain.Checkpointer({"model": net, "optimizer": optimizer}, store="store", store_every_steps=2)
start = checkpointer.load() or 0
bits = net.weight.detach().numpy().tobytes().hex()
Path(f"start-{start}-r{RANK}.json").write_text(json.dumps({"weight": bits, "world": dist.get_world_size()}))
step = start
while True:
    enough = torch.tensor(float(Path("over").exists()))
    dist.all_reduce(enough)
    if enough:
        break
    step += 1
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    evertrain.report(step=step)
    # several seconds, in which a step can be brought to the disk before its slots are taken for others
    if step % 10 == 0:
        checkpointer.save(step)
        Path(f"step-{step}-r{RANK}.json").write_text(net.weight.detach().numpy().tobytes().hex())
    time.sleep(0.1)
dist.barrier()
dist.destroy_process_group()
"""


def steps_in(store: Path) -> list[int]:
    return sorted(json.loads(file.read_bytes())["step"] for file in store.glob("*/*/*/manifest.json"))


@pytest.mark.parametrize(
    "left", ["nothing", pytest.param("the log, and copies of other ranks", marks=pytest.mark.matrix)]
)
def test_goes_on_from_the_store_with_other_ranks(start_job: StartJob, tmp_path: Path, left: str) -> None:
    (tmp_path / "t.py").write_text(SCRIPT)
    first = start_job("t.py", nproc=1, job="stored", flags=["--local-nodes", "2"])
    store = tmp_path / "store"
    first.wait_until(lambda _: steps_in(store), "a step is in the store", within_s=60)
    first.interrupt()
    first.wait()
    assert "store" not in first.status()["message"]
    newest = steps_in(store)[-1]
    if left == "nothing":
        shutil.rmtree(first.job_dir)

    (tmp_path / "over").touch()
    again = start_job("t.py", nproc=3, job="stored")
    assert again.wait() == 0
    folder = f"{store}/stored/attempt-1/step-{newest}"
    if left == "nothing":
        assert f"going on from step {newest}, the newest one in {folder}" in again.story()
    else:
        assert again.status()["resume"] == newest
    wanted = (tmp_path / f"step-{newest}-r0.json").read_text()
    for rank in range(3):
        found = json.loads((tmp_path / f"start-{newest}-r{rank}.json").read_bytes())
        assert found == {"weight": wanted, "world": 3}
