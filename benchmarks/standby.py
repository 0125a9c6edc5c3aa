"""What is a warm standby worth? Seconds from the word that a node is broken to the first new step, with and without.

With a standby the node is evicted, the standby takes over its ranks and training goes on; everybody else stays. Without
one, the usual way is to stop the whole command and to start it anew (on other nodes; a queue in front of that is not
counted here): `requeue` sends SIGTERM and calls the same command again, which resumes from the step that went to disk.
Four nodes with a rank each, the toy of the other benchmarks, in turn. Both count to the moment at which the slowest
rank has finished the first step that is higher than any rank had reached before.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from harness import BIN, ROOT, clean_environment, interleave, parser, print_table, run_to_end, write_report

TOY = ROOT / "benchmarks/toy.py"
NODES, STANDBY = 4, 1
FAULT_STEP = 25
STEPS = 45
LIMIT_S = 120.0
TARGET = 10.0

Json = dict[str, Any]


class NotMeasured(Exception):
    """A job that did not do what was to be measured."""


class Lab:
    """A job of local nodes in a folder of its own."""

    def __init__(self, name: str, nodes: int = NODES, standby: int = STANDBY, **environment: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"standby-{name}-"))
        self.ranks = nodes
        self.environment = clean_environment(
            TOY_SAVE="evertrain",
            TOY_STEPS=str(STEPS),
            TOY_LOG=str(self.folder / "events.jsonl"),
            EVERTRAIN_RUN_DIR=str(self.folder / "runs"),
            XDG_STATE_HOME=str(self.folder / "state"),
            **environment,
        )
        size = (f"--local-nodes={nodes + standby}", f"--nnodes={nodes}", f"--standby={standby}", "--nproc-per-node=1")
        self.command = (BIN / "evertrain", "run", "--job=lab", *size)

    def run(self, *flags: str) -> None:
        status = run_to_end([*self.command, *flags, TOY], self.environment, self.folder / "output.txt", limit_s=LIMIT_S)
        if status != 0:
            raise NotMeasured(f"exit code {status}; see {self.folder}")

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


def until_standby_trains(fault: str, **size: int) -> float:
    """Seconds from a fault of a node, as the incident dates it, until its standby's ranks do the first new step."""
    lab = Lab(fault, **size)
    lab.run("--inject", f"{fault}:node=1@step={FAULT_STEP}")
    incidents = lab.incidents()
    if [one["action"] for one in incidents] != ["evict"]:
        raise NotMeasured(f"no single eviction but {[one['action'] for one in incidents]}; see {lab.folder}")
    seconds = lab.first_new_step(incidents[0]["time"]) - float(incidents[0]["time"])
    lab.close()
    return seconds


def requeue() -> float:
    """Seconds from the order to stop until the same command, called again, does the first new step."""
    lab = Lab("requeue", standby=0)
    with (lab.folder / "first.txt").open("wb") as output:
        first = subprocess.Popen([*lab.command, TOY], env=lab.environment, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + LIMIT_S
        while max((event["step"] for event in lab.steps()), default=0) < FAULT_STEP:
            if first.poll() is not None or time.monotonic() > deadline:
                raise NotMeasured(f"it never came to step {FAULT_STEP}; see {lab.folder}")
            time.sleep(0.01)
        asked = time.time()
        first.send_signal(signal.SIGTERM)
        first.wait(LIMIT_S)
    finally:
        if first.poll() is None:
            first.kill()
            first.wait()
    lab.run()
    seconds = lab.first_new_step(asked) - asked
    lab.close()
    return seconds


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--runs", type=int, default=7, help="runs of each")
    options = flags.parse_args()
    ways = {"standby": lambda: until_standby_trains("gpu-lost"), "requeue": requeue}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    failed = False
    for number, name in interleave(list(ways), min(options.runs, 3) if options.quick else options.runs):
        try:
            seconds[name].append(ways[name]())
        except NotMeasured as error:
            failed = True
            print(f"round {number + 1}: {name}: {error}", flush=True)
            continue
        print(f"round {number + 1}: {name}: {seconds[name][-1]:.2f} s", flush=True)
    figures = {f"{name}_s": median(values) for name, values in seconds.items() if values}
    if len(figures) == len(ways):
        figures["requeue_over_standby"] = figures["requeue_s"] / figures["standby_s"]
    show(seconds, figures)
    samples = {f"{name}_s": len(values) for name, values in seconds.items()}
    write_report(options.json, figures, {**samples, "requeue_over_standby": min(map(len, seconds.values()))})
    return 1 if failed else 0


def show(seconds: dict[str, list[float]], figures: dict[str, float]) -> None:
    print()
    rows: list[Sequence[str]] = [
        [name, str(len(values)), f"{median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"]
        for name, values in seconds.items()
        if values
    ]
    print_table(["way", "runs", "to the first new step, s", "range"], rows)
    if (ratio := figures.get("requeue_over_standby")) is not None:
        print(f"\nrequeue_over_standby {ratio:.1f}, target {TARGET:g}: {'met' if ratio >= TARGET else 'MISSED'}")


if __name__ == "__main__":
    sys.exit(main())
