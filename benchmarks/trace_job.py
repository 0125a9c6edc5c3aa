"""What does tracing cost a real job? Four ranks of examples/train_3d.py, looked at from outside while they train.

Used by trace_overhead.py, which knows what a single call of the hook costs.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import psutil

from evertrain.agent.tracing import THREAD
from evertrain.trace import layout
from evertrain.trace.reading import Reader
from harness import BIN, ROOT, clean_environment, interleave

SCRIPT = ROOT / "examples/train_3d.py"
RANKS = 4
WARM_UP_STEPS = 5
START_S = 120.0
# 97.5 % points of Student's t by degrees of freedom
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Watched:
    """One job, while it trained."""

    step_s: float
    sampler_core_fraction: float
    """Of the agent's tracing thread, of a core and for each rank."""
    operations_per_step: float
    """Of each rank, on average."""
    bytes_per_rank_second: float


@contextmanager
def job(*, traced: bool) -> Iterator[Path]:
    """Its folder, from when it has warmed up until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="trace-overhead-"))
    (folder / "config.yaml").write_text(f"trace: {{enabled: {str(traced).lower()}}}\n")
    words = [
        BIN / "evertrain", "run", "--job=traced", f"--config={folder / 'config.yaml'}", f"--nproc-per-node={RANKS}",
        "--mesh=pp=2,dp=2", SCRIPT, "--steps=100000",
    ]  # fmt: skip
    environment = clean_environment(EVERTRAIN_RUN_DIR=str(folder / "runs"), XDG_STATE_HOME=str(folder / "state"))
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, cwd=folder)
    try:
        deadline = time.monotonic() + START_S
        while (step(folder) or 0) < WARM_UP_STEPS:
            if time.monotonic() > deadline or process.poll() is not None:
                sys.exit(f"the job does not train: see {folder}/output.txt")
            time.sleep(0.5)
        yield folder
    finally:
        process.terminate()
        process.wait()
    shutil.rmtree(folder)


def step(folder: Path) -> int | None:
    words = [BIN / "evertrain", "status", "--job=traced", "--run-dir", folder / "runs", "--json"]
    said = subprocess.run(words, capture_output=True, text=True)
    found: int | None = json.loads(said.stdout)["step"] if said.returncode == 0 else None
    return found


def step_seconds(folder: Path, seconds: float) -> tuple[float, float]:
    """Of one step, over so much time; and how much time that was."""
    began, first = time.monotonic(), step(folder)
    time.sleep(seconds)
    ended, last = time.monotonic(), step(folder)
    if first is None or last is None or last <= first:
        sys.exit(f"the job makes no steps: see {folder}/output.txt")
    return (ended - began) / (last - first), ended - began


def watch(seconds: float) -> Watched:
    with job(traced=True) as folder:
        run_folder = Path(json.loads((folder / "runs/traced/job.json").read_text())["run_folder"])
        thread = _thread(run_folder)
        heads, cpu, began = _heads(run_folder), _cpu_s(thread), time.monotonic()
        step_s, _ = step_seconds(folder, seconds)
        passed = time.monotonic() - began
        used, later = _cpu_s(thread) - cpu, _heads(run_folder)
    records = {name: later[name] - heads[name] for name in heads}
    operations = sum(count for name, count in records.items() if "-hook" in name)
    return Watched(
        step_s,
        used / passed / RANKS,
        operations / RANKS / (passed / step_s),
        sum(records.values()) * layout.RECORD_BYTES / RANKS / passed,
    )


def difference(rounds: int, seconds: float) -> tuple[float, float]:
    """How much longer a step takes with tracing, as a fraction; and half of the 95 % interval. Runs in turn."""
    seen: dict[bool, list[float]] = {True: [], False: []}
    for _, traced in interleave((True, False), rounds):
        with job(traced=traced) as folder:
            seen[traced].append(step_seconds(folder, seconds)[0])
    ratios = [with_it / without - 1 for with_it, without in zip(seen[True], seen[False], strict=True)]
    if len(ratios) < 2:
        return mean(ratios), math.inf
    point = STUDENT[min(len(ratios) - 2, len(STUDENT) - 1)]
    return mean(ratios), point * stdev(ratios) / math.sqrt(len(ratios))


def _thread(run_folder: Path) -> Path:
    """Of the agent's thread that traces: what the kernel says of its time."""
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        if "evertrain.agent" in words and any(word.startswith(str(run_folder)) for word in words):
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                if (task / "comm").read_text().strip() == THREAD[:15]:
                    return task / "schedstat"
    sys.exit("the agent does not trace")


def _cpu_s(schedstat: Path) -> float:
    return int(schedstat.read_text().split()[0]) / 1e9


def _heads(run_folder: Path) -> dict[str, int]:
    """By ring, the number of its newest record."""
    found: dict[str, int] = {}
    for path in sorted(run_folder.glob("*/trace/*.ring")):
        with Reader(path) as reader:
            found[path.name] = reader.head()
    return found


def figures(watched: Watched, hook_us: float) -> dict[str, float]:
    return {
        "sampler_core_fraction": watched.sampler_core_fraction,
        "bytes_per_rank_second": watched.bytes_per_rank_second,
        "iteration_overhead_fraction": watched.operations_per_step * hook_us / 1e6 / watched.step_s
        + watched.sampler_core_fraction,
        "operations_per_step": watched.operations_per_step,
        "step_s": watched.step_s,
    }
