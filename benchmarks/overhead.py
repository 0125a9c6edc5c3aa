"""What does Evertrain cost while nothing goes wrong? It must stay below 1 % of a step.

    step_overhead_fraction = cost of all hook calls and reports of one step / median step
                           + CPU time of agent and keeper / CPU time of the ranks, over the same steps

Costs of single calls come from pinned loops (hook_costs.py), calls per step are counted in a real job. Beside it stands
`measured_difference`: median step under `evertrain run` against torchrun, same script, in turn, with its 95 % interval.
Two runs of the very same thing differ by several percent on a shared machine, so that figure can only convict when
its whole interval lies above the limit.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import psutil

from harness import BIN, ROOT, clean_environment, interleave, parser, print_figures, run_to_end, write_report

TOY = ROOT / "benchmarks/toy.py"
RANKS = 4
WARM_UP_STEPS = 20
COST_ROUNDS = 3
LIMIT_S = 120.0
TARGETS = {"step_overhead_fraction": 0.01, "report_us": 5.0, "cli_help_s": 0.3}
DIFFERENCE_LIMIT = 0.01

# 97.5 % points of Student's t by degrees of freedom; beyond the table the normal value is close enough
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


@dataclass(frozen=True)
class Watched:
    """What one job under Evertrain showed."""

    step_s: float
    collectives_per_step: float
    agent_keeper_fraction: float
    controller_fraction: float


def single_costs_us() -> dict[str, float]:
    """Microseconds of one call of each hook and of `report()`."""
    seen: dict[str, list[dict[str, float]]] = {"plain": [], "hooked": [], "empty": []}
    for _, kind in interleave(tuple(seen), COST_ROUNDS):
        seen[kind].append(_costs_in_a_process(kind))

    def middle(kind: str, call: str) -> float:
        return median(costs[call] for costs in seen[kind])

    return {
        "collective": middle("hooked", "all_reduce") - middle("plain", "all_reduce"),
        "empty_kernel": middle("empty", "all_reduce") - middle("plain", "all_reduce"),
        "optimizer_step": middle("hooked", "optimizer_step") - middle("plain", "optimizer_step"),
        "report": middle("hooked", "report"),
    }


def _costs_in_a_process(kind: str) -> dict[str, float]:
    command: list[str | Path] = [sys.executable, ROOT / "benchmarks/hook_costs.py", kind]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        sys.exit(f"hook_costs.py {kind} failed:\n{done.stderr}")
    costs: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return costs


class Job:
    """The toy, undisturbed, saving nothing and reporting every step, in a folder of its own.

    It does not sleep: ranks that compute pay for the CPU time that others use, ranks that wait for something do not.
    """

    def __init__(self, launcher: Sequence[str | Path], steps: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="overhead-"))
        self.events_file = self.folder / "events.jsonl"
        self.command = (*launcher, f"--nproc-per-node={RANKS}", TOY)
        self.environment = clean_environment(
            TOY_LOG=str(self.events_file),
            TOY_STEPS=str(steps),
            TOY_SAVE="none",
            TOY_SLEEP="0",
            EVERTRAIN_RUN_DIR=str(self.folder / "runs"),
            XDG_STATE_HOME=str(self.folder / "state"),
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        if not self.events_file.exists():
            return []
        lines = (json.loads(line) for line in self.events_file.read_text().splitlines())
        return [event for event in lines if event["event"] == kind]

    def median_step_s(self) -> float:
        """Over all steps of rank 0 (DDP keeps the ranks in step) but the first few."""
        times = [event["time"] for event in self.events("step") if event["rank"] == 0][WARM_UP_STEPS:]
        middle: float = median(later - earlier for earlier, later in pairwise(times))
        return middle


def step_seconds(launcher: Sequence[str | Path], steps: int) -> float:
    """Median step of one whole run."""
    job = Job(launcher, steps)
    status = run_to_end(job.command, job.environment, job.folder / "output.txt", limit_s=LIMIT_S)
    if status != 0:
        sys.exit(f"{launcher[0]} ended with {status}: see {job.folder}")
    seconds = job.median_step_s()
    shutil.rmtree(job.folder)
    return seconds


def watch(launcher: Sequence[str | Path], steps: int) -> Watched:
    """One job under Evertrain; CPU times are read at the beginning and the end of its steady part."""
    job = Job(launcher, steps)
    with (job.folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(job.command, env=job.environment, stdout=output, stderr=output)
    try:
        _wait_for_step(job, process, WARM_UP_STEPS)
        before = _cpu_seconds(job)
        _wait_for_step(job, process, steps - 2)
        used = {kind: later - before[kind] for kind, later in _cpu_seconds(job).items()}
        if process.wait(LIMIT_S) != 0:
            sys.exit(f"evertrain ended with {process.returncode}: see {job.folder}")
    finally:
        process.terminate()
        process.wait()
    counts = [event["collectives"] for event in job.events("step") if event["rank"] == 0]
    seen = Watched(
        job.median_step_s(),
        (counts[-1] - counts[WARM_UP_STEPS]) / (len(counts) - 1 - WARM_UP_STEPS),
        (used["agent"] + used["keeper"]) / used["rank"],
        used["controller"] / used["rank"],
    )
    shutil.rmtree(job.folder)
    return seen


def _wait_for_step(job: Job, process: subprocess.Popen[bytes], step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not any(event["step"] >= step for event in job.events("step")):
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit(f"evertrain did not reach step {step}: see {job.folder}")
        time.sleep(0.2)


def _cpu_seconds(job: Job) -> dict[str, float]:
    """CPU seconds used so far by the ranks, and by each kind of Evertrain's own processes."""
    used = {"rank": 0.0, "agent": 0.0, "keeper": 0.0, "controller": 0.0}
    for rank in job.events("ready"):
        used["rank"] += _cpu_of(rank["pid"])
    for file in job.folder.glob("runs/*/processes/*.json"):
        kind = file.stem.partition("-")[0]
        if kind in used:
            used[kind] += _cpu_of(json.loads(file.read_text())["pid"])
    return used


def _cpu_of(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def help_seconds(runs: int) -> float:
    """Median wall time of `evertrain --help`."""
    seen = []
    for _ in range(runs):
        began = time.perf_counter()
        subprocess.run([BIN / "evertrain", "--help"], stdout=subprocess.DEVNULL, check=True)
        seen.append(time.perf_counter() - began)
    return median(seen)


def interval_95(values: Sequence[float]) -> tuple[float, float]:
    """Student's interval for the mean."""
    if len(values) < 2:
        return -math.inf, math.inf
    degrees = len(values) - 1
    student = STUDENT[degrees - 1] if degrees <= len(STUDENT) else 2.1
    half = student * stdev(values) / math.sqrt(len(values))
    return mean(values) - half, mean(values) + half


def measured_differences(rounds: int, steps: int) -> list[float]:
    """(Evertrain - torchrun) / torchrun of the median step, once a round."""
    measure: dict[str, Callable[[], float]] = {
        "evertrain": lambda: step_seconds((BIN / "evertrain", "run", "--fresh"), steps),
        "torchrun": lambda: step_seconds((BIN / "torchrun", "--standalone"), steps),
    }
    seconds: dict[str, list[float]] = {name: [] for name in measure}
    for round_number, name in interleave(tuple(measure), rounds):
        seconds[name].append(measure[name]())
        print(f"round {round_number + 1}: {name}: median step {seconds[name][-1] * 1000:.1f} ms", flush=True)
    pairs = zip(seconds["evertrain"], seconds["torchrun"], strict=True)
    return [(ours - theirs) / theirs for ours, theirs in pairs]


def main() -> int:
    options = parser(__doc__).parse_args()
    steps, rounds = (300, 4) if options.quick else (600, 10)

    costs_us = single_costs_us()
    seen = watch((BIN / "evertrain", "run", "--fresh"), 2 * steps)
    calls = {"collective": seen.collectives_per_step, "optimizer_step": 1.0, "report": 1.0}
    # a hook that costs less than the loops can tell may come out below nothing
    in_ranks = sum(max(0.0, costs_us[name]) * calls[name] for name in calls) / 1e6 / seen.step_s
    differences = measured_differences(rounds, steps)
    low, high = interval_95(differences)
    figures = {
        "step_overhead_fraction": in_ranks + seen.agent_keeper_fraction,
        "hooks_fraction": in_ranks,
        "agent_keeper_fraction": seen.agent_keeper_fraction,
        "controller_fraction": seen.controller_fraction,
        "measured_difference": mean(differences),
        "measured_difference_low": low,
        "measured_difference_high": high,
        "collective_hook_us": costs_us["collective"],
        "optimizer_hook_us": costs_us["optimizer_step"],
        "report_us": costs_us["report"],
        "collectives_per_step": seen.collectives_per_step,
        "step_ms": seen.step_s * 1000,
        "cli_help_s": help_seconds(7),
    }
    print()
    print_figures(figures, TARGETS)
    if low > DIFFERENCE_LIMIT:
        print(f"MISSED: the whole interval of measured_difference lies above {DIFFERENCE_LIMIT:g}")

    samples = dict.fromkeys(figures, 1) | {name: rounds for name in figures if name.startswith("measured")}
    write_report(options.json, figures, samples | {"cli_help_s": 7})
    return 0


if __name__ == "__main__":
    sys.exit(main())
