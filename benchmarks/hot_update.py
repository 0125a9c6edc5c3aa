"""What is a hot update worth? Seconds without training while a job gets new code, and what a new start of it costs.

`hot_update` is `evertrain update --urgent` with a changed tree: nodes, keepers and checkpoints stay, and ranks train
on until every node has the code and has imported it. `requeue` is the usual way: SIGTERM to the whole command, and the
same command with the new code in place, which resumes from the step that went to disk; `torchrun_requeue` is the same
with torchrun, and a checkpoint that the script writes every 5 steps (no queue, no image, no scheduling is counted in
either). Four ranks each, the toy of the other benchmarks, in turn. All count from the last step that all ranks had
finished before to the first new one of the slowest rank.

Source: ByteRobust, table 7 (hot update 11 times faster than requeueing, on a cluster's scheduler).
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from harness import BIN, interleave, parser, print_table, write_report
from lab import LIMIT_S, TOY, Lab, NotMeasured

NODES = 4
CHANGE_STEP = 25
STEPS = 60
ENDLESS = 100_000
"""Training goes on while nodes import the new code, for as long as that takes."""
TARGET = 10.0


def tree(folder: Path, version: int) -> Path:
    """The toy in a folder of its own, with a line that tells one version from another."""
    folder.mkdir(parents=True)
    script = folder / TOY.name
    script.write_text(TOY.read_text().replace("import json\n", f"import json  # version {version}\n", 1))
    return script


class Change:
    """A job that gets other code at a step."""

    def __init__(self, name: str, steps: int = STEPS) -> None:
        self.home = Path(tempfile.mkdtemp(prefix=f"hot-update-{name}-"))
        self.script = tree(self.home / "code", 1)
        self.new = tree(self.home / "new", 2)
        self.lab = Lab(name, NODES, 0, steps=steps, script=self.script)

    def seconds(self, asked: float) -> float:
        """Without training, around the change that was asked for at that moment."""
        steps = self.lab.steps()
        again = self.first_start(asked)
        before = [event for event in steps if event["time"] < again]
        done = {rank: max(event["step"] for event in before if event["rank"] == rank) for rank in range(NODES)}
        reached, common = max(done.values()), min(done.values())
        stopped = max(event["time"] for event in before if event["step"] == common)
        new = {event["rank"]: event["time"] for event in reversed(steps) if event["step"] == reached + 1}
        if len(new) != NODES or min(new.values()) < again:
            raise NotMeasured(f"not every rank did step {reached + 1} again; see {self.lab.folder}")
        return max(new.values()) - stopped

    def first_start(self, since: float) -> float:
        """When the first rank of the new code began."""
        old = {event["pid"] for event in self.lab.steps() if event["time"] < since}
        begun = [event["time"] for event in self.lab.steps() if event["pid"] not in old and event["time"] > since]
        if not begun:
            raise NotMeasured(f"nothing was started after the change; see {self.lab.folder}")
        return float(min(begun))

    def close(self) -> None:
        self.lab.close()
        shutil.rmtree(self.home)


def hot_update() -> float:
    change = Change("update", ENDLESS)
    with change.lab.running() as job:
        change.lab.wait_for_step(CHANGE_STEP, job)
        asked = time.time()
        # it returns when a step has been done with the new code
        change.lab.tell("update", "--job=lab", "--code", change.new.parent, "--urgent")
        change.lab.wait_for_step(max(event["step"] for event in change.lab.steps()) + 5, job)
    seconds = change.seconds(asked)
    change.close()
    return seconds


def requeue() -> float:
    change = Change("requeue")
    with change.lab.running() as first:
        change.lab.wait_for_step(CHANGE_STEP, first)
        asked = time.time()
        first.send_signal(signal.SIGTERM)
        first.wait(LIMIT_S)
    shutil.copyfile(change.new, change.script)
    change.lab.run()
    seconds = change.seconds(asked)
    change.close()
    return seconds


def torchrun_requeue() -> float:
    change = Change("torchrun")
    change.lab.environment["TOY_SAVE"] = "disk"
    change.lab.command = (BIN / "torchrun", f"--nproc-per-node={NODES}", "--standalone")
    with change.lab.running() as first:
        change.lab.wait_for_step(CHANGE_STEP, first)
        asked = time.time()
        first.send_signal(signal.SIGTERM)
        first.wait(LIMIT_S)
    shutil.copyfile(change.new, change.script)
    change.lab.run()
    seconds = change.seconds(asked)
    change.close()
    return seconds


WAYS: dict[str, Callable[[], float]] = {
    "hot_update": hot_update,
    "requeue": requeue,
    "torchrun_requeue": torchrun_requeue,
}


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--runs", type=int, default=7, help="runs of each")
    options = flags.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    failed = False
    for number, name in interleave(list(WAYS), min(options.runs, 3) if options.quick else options.runs):
        try:
            seconds[name].append(WAYS[name]())
        except (NotMeasured, subprocess.TimeoutExpired) as error:
            failed = True
            print(f"round {number + 1}: {name}: {error}", flush=True)
            continue
        print(f"round {number + 1}: {name}: {seconds[name][-1]:.2f} s", flush=True)
    figures = {f"{name}_s": median(values) for name, values in seconds.items() if values}
    samples = {f"{name}_s": len(values) for name, values in seconds.items()}
    for name in ("requeue", "torchrun_requeue"):
        if {f"{name}_s", "hot_update_s"} <= figures.keys():
            figures[f"{name}_over_hot_update"] = figures[f"{name}_s"] / figures["hot_update_s"]
            samples[f"{name}_over_hot_update"] = min(samples[f"{name}_s"], samples["hot_update_s"])
    show(seconds, figures)
    write_report(options.json, figures, samples)
    return 1 if failed else 0


def show(seconds: dict[str, list[float]], figures: dict[str, float]) -> None:
    print()
    rows: list[Sequence[str]] = [
        [name, str(len(values)), f"{median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}"]
        for name, values in seconds.items()
        if values
    ]
    print_table(["way", "runs", "without training, s", "range"], rows)
    if (ratio := figures.get("requeue_over_hot_update")) is not None:
        print(f"\nrequeue_over_hot_update {ratio:.1f}, target {TARGET:g}: {'met' if ratio >= TARGET else 'MISSED'}")


if __name__ == "__main__":
    sys.exit(main())
