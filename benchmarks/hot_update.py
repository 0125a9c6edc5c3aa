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
import sys
import tempfile
import time
from pathlib import Path

from harness import BIN, NotMeasured, parser
from lab import TOY, Lab, compare, report

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
    return _again(Change("requeue"))


def torchrun_requeue() -> float:
    change = Change("torchrun")
    change.lab.environment["TOY_SAVE"] = "disk"
    change.lab.command = (BIN / "torchrun", f"--nproc-per-node={NODES}", "--standalone")
    return _again(change)


def _again(change: Change) -> float:
    """The same command, called again with the new code in place."""
    asked = change.lab.stop_at(CHANGE_STEP)
    shutil.copyfile(change.new, change.script)
    change.lab.run()
    seconds = change.seconds(asked)
    change.close()
    return seconds


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--runs", type=int, default=7, help="runs of each")
    options = flags.parse_args()
    ways = {"hot_update": hot_update, "requeue": requeue, "torchrun_requeue": torchrun_requeue}
    seconds, failed = compare(ways, min(options.runs, 3) if options.quick else options.runs)
    report(seconds, "hot_update", TARGET, "without training, s", options.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
