"""What a process must be like before it may be forked, and how it becomes cheap to fork."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"


def python(body: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "OPENBLAS_"))}
    start = f"import os, sys; sys.path.insert(0, {str(SRC)!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", start + body], env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_preloading_leaves_no_thread_no_variable_no_cuda_and_one_version(tmp_path: Path) -> None:
    for name in ("root/mine.py", "v2/mine.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    out = python(
        "from evertrain.worker import preload\nbefore = dict(os.environ)\n"
        "preload.load({'kind': 'script', 'target': 'x/train.py', 'args': []}, [], frozenset(sys.modules))\n"
        "assert dict(os.environ) == before\npreload.end_idle_threads()\n"
        "print(preload.why_not_fork(), 'torch._dynamo' in sys.modules, sys.path[0])\n"
        "import torch, threading\n"
        "torch.cuda._initialized = True; print(preload.why_not_fork()); torch.cuda._initialized = False\n"
        "torch.cuda._is_in_bad_fork = lambda: True; print(preload.why_not_fork())\n"
        "torch.cuda._is_in_bad_fork = lambda: False\n"
        "threading.Thread(target=threading.Event().wait, daemon=True).start(); print(preload.why_not_fork())\n"
        f"sys.path.append({str(tmp_path / 'root')!r})\n"
        "import mine\nfrom evertrain.worker import version\n"
        f"version.current = version.Version({str(tmp_path / 'root')!r}, {str(tmp_path / 'v2')!r})\n"
        "try: preload.load({'kind': 'script', 'target': 'x/train.py', 'args': []}, [], frozenset(sys.modules))\n"
        "except preload.Unfit as unfit: print(unfit, unfit.instead)\n"
    ).splitlines()
    assert out[0] == f"None True {Path('x').absolute()}"
    assert out[1:4] == [*["CUDA has been initialised by an import"] * 2, "imports have left 2 threads"]
    where = f"module mine was loaded from {tmp_path}/root/mine.py, but its version is {tmp_path}/v2/mine.py"
    assert out[4:] == [f"an import is not of the version that ranks are to run: {where} spawn"]


def test_memory_is_gathered_into_huge_pages_and_stays_what_it_was() -> None:
    out = python(
        "from evertrain.worker import hugepages\n"
        "held = [bytes([number % 251]) * 4096 for number in range(16_000)]\n"
        "hugepages.gather()\n"
        "assert all(page == bytes([number % 251]) * 4096 for number, page in enumerate(held))\n"
        "child = os.fork()\n"
        "if child == 0: os._exit(held[7][0] != 7)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "print(*[line.split()[1] for line in open('/proc/self/smaps_rollup') if line.startswith('AnonHuge')])\n"
    )
    if out.strip() == "0":
        pytest.skip("this kernel does not gather")
    assert int(out) > 32 << 10
