"""What do benchmarks of whole jobs share? A job of local nodes in a folder of its own, and what can be seen of it.

Each rank of the toy writes down which step it has finished when; all figures are read off there.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from harness import BIN, ROOT, NotMeasured, clean_environment, interleave, print_table, run_to_end, write_report

TOY = ROOT / "benchmarks/toy.py"
LIMIT_S = 120.0

Json = dict[str, Any]


class Lab:
    """A job of `nodes` local nodes with a rank each, and `standby` spare ones."""

    def __init__(self, name: str, nodes: int, standby: int, *, steps: int, script: Path = TOY) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"lab-{name}-"))
        self.ranks = nodes
        self.script = script
        self.environment = clean_environment(
            TOY_SAVE="evertrain",
            TOY_STEPS=str(steps),
            TOY_LOG=str(self.folder / "events.jsonl"),
            EVERTRAIN_RUN_DIR=str(self.folder / "runs"),
            XDG_STATE_HOME=str(self.folder / "state"),
        )
        size = (f"--local-nodes={nodes + standby}", f"--nnodes={nodes}", f"--standby={standby}", "--nproc-per-node=1")
        self.command = (BIN / "evertrain", "run", "--job=lab", *size)

    def run(self, *flags: str) -> None:
        status = run_to_end(
            [*self.command, *flags, self.script], self.environment, self.folder / "output.txt", limit_s=LIMIT_S
        )
        if status != 0:
            raise NotMeasured(f"exit code {status}; see {self.folder}")

    @contextmanager
    def running(self, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
        """The same beside what a benchmark does with it."""
        with (self.folder / "running.txt").open("wb") as output:
            command = [*self.command, *flags, self.script]
            process = subprocess.Popen(command, env=self.environment, stdout=output, stderr=output)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(LIMIT_S / 2)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def stop_at(self, step: int) -> float:
        """Run it, and end the whole command by SIGTERM when it has come to that step; when that was sent."""
        with self.running() as process:
            self.wait_for_step(step, process)
            asked = time.time()
            process.send_signal(signal.SIGTERM)
            process.wait(LIMIT_S)
        return asked

    def wait_for_step(self, step: int, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while max((event["step"] for event in self.steps()), default=0) < step:
            if process.poll() is not None or time.monotonic() > deadline:
                raise NotMeasured(f"it never came to step {step}; see {self.folder}")
            time.sleep(0.01)

    def tell(self, *words: str | Path) -> None:
        """Run a command about the job, which has to succeed."""
        asked = [BIN / "evertrain", *words]
        answer = subprocess.run(asked, env=self.environment, capture_output=True, text=True, timeout=LIMIT_S)
        if answer.returncode != 0:
            raise NotMeasured(f"{' '.join(map(str, words))}: {answer.stderr.strip()}; see {self.folder}")

    def incidents(self) -> list[Json]:
        asked = [BIN / "evertrain", "incidents", "--job=lab", "--json"]
        answer = subprocess.run(asked, env=self.environment, capture_output=True, check=True, timeout=30)
        found: list[Json] = json.loads(answer.stdout)
        return found

    def steps(self) -> list[Json]:
        file = self.folder / "events.jsonl"
        events = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
        return [event for event in events if event["event"] == "step"]

    def first_new_step(self, since: float) -> float:
        """When the slowest rank had done the first step that no rank had done before that time."""
        steps = self.steps()
        reached = max(event["step"] for event in steps if event["time"] <= since)
        again: dict[int, float] = {}
        for event in steps:
            if event["step"] == reached + 1 and event["time"] > since:
                again.setdefault(event["rank"], event["time"])
        if len(again) != self.ranks:
            raise NotMeasured(f"{len(again)} of {self.ranks} ranks finished step {reached + 1}; see {self.folder}")
        return max(again.values())

    def close(self) -> None:
        shutil.rmtree(self.folder)


def compare(ways: Mapping[str, Callable[[], float]], rounds: int) -> tuple[dict[str, list[float]], bool]:
    """Seconds of each way, in turn, and whether any could not be measured."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    failed = False
    for number, name in interleave(list(ways), rounds):
        try:
            seconds[name].append(ways[name]())
        except (NotMeasured, subprocess.TimeoutExpired) as error:
            failed = True
            print(f"round {number + 1}: {name}: {error}", flush=True)
            continue
        print(f"round {number + 1}: {name}: {seconds[name][-1]:.2f} s", flush=True)
    return seconds, failed


def report(seconds: Mapping[str, list[float]], best: str, target: float, what: str, file: Path | None) -> None:
    """The table, and how many times longer each other way takes than the `best`; the first of them has a target."""
    figures = {f"{name}_s": median(values) for name, values in seconds.items() if values}
    samples = {f"{name}_s": len(values) for name, values in seconds.items()}
    others = [name for name in seconds if name != best and {f"{name}_s", f"{best}_s"} <= figures.keys()]
    for name in others:
        figures[f"{name}_over_{best}"] = figures[f"{name}_s"] / figures[f"{best}_s"]
        samples[f"{name}_over_{best}"] = min(samples[f"{name}_s"], samples[f"{best}_s"])
    rows: list[Sequence[str]] = [
        [name, str(len(values)), f"{median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"]
        for name, values in seconds.items()
        if values
    ]
    print()
    print_table(["way", "runs", what, "range"], rows)
    for name in others[:1]:
        ratio = figures[f"{name}_over_{best}"]
        print(f"\n{name}_over_{best} {ratio:.1f}, target {target:g}: {'met' if ratio >= target else 'MISSED'}")
    write_report(file, figures, samples)
