"""A job on a bed: `evertrain run` on each of its machines, as a user starts it, and what can be asked of it.

Its own ways of dealing with hangs and slow jobs must not end it while a fault lasts, and looks at stacks would take the
processor that ranks share here: `--observe-only`, and limits that no fault of ten seconds reaches (CONFIG).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import NotMeasured
from netbed import bed as beds
from netbed.bed import Bed, Machine, cpu_s
from support import jobs

SCRIPT = Path(__file__).with_name("paced_3d.py")
MESH = "pp=2,dp=2,tp=2"
SIZES = (
    "--pp=2", "--dp=2", "--tp=2", "--layers=2", "--width=192", "--context=32", "--batch=4", "--microbatches=2",
    "--steps=1000000", "--evaluate-every=1000000", "--print-every=100",
)  # fmt: skip
CONFIG = """\
hang: {still_limit_s: 60 s}
metrics: {slow_s: 600 s}
"""
PORT = 29400
START_LIMIT_S = 240.0
ENV = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "data0"}

Json = dict[str, Any]


class Cluster:
    """The job, seen from the network of the switch: `status` and `incidents` are for threads that are in it."""

    def __init__(self, bed: Bed, runs: Sequence[jobs.Job]) -> None:
        self.bed = bed
        self.runs = list(runs)
        self._began = time.monotonic()

    def ask(self, what: str) -> Any:
        """What `evertrain status --json` and `evertrain incidents --json` print; None while nobody answers."""
        return self.runs[0].fetch(what)

    def steps(self) -> list[float]:
        """When each step of rank 0 began."""
        try:
            return [float(line) for line in (self.bed.control / "steps.log").read_text().splitlines()]
        except FileNotFoundError:
            return []

    def alarms(self) -> list[tuple[float, str]]:
        """When the controller noticed that collectives are odd, and in which way; what looked slow may be stuck."""
        log = (self.runs[0].job_dir / "logs/controller.log").read_text(errors="replace")
        found = re.finditer(r"CollectivesOdd\(time=([0-9.]+),.*symptom='(\w+)'", log)
        return [(float(one[1]), one[2]) for one in found]

    def wait_for_steps(self, count: int) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while len(self.steps()) < count:
            self.check()
            if time.monotonic() > deadline:
                raise NotMeasured(f"no {count} steps within {START_LIMIT_S:g} s\n{self.story()}")
            time.sleep(0.2)

    def check(self) -> None:
        """That all of it still runs."""
        for rank, one in enumerate(self.runs):
            if one.process.poll() is not None:
                raise NotMeasured(
                    f"{self.bed.name(rank)} has ended with exit code {one.process.returncode}\n{self.story()}"
                )

    def story(self) -> str:
        return "\n".join(one.story(12) for one in self.runs[:2])

    def cores(self, over_s: float) -> tuple[float, float]:
        """Of a core: all ranks together, and all that Evertrain runs beside them."""
        ranks = {self.bed.pid(rank) for rank in range(self.bed.ranks)}
        before = cpu_s([one.pid for one in self.bed.processes()])
        began = time.monotonic()
        time.sleep(over_s)
        after = cpu_s(list(before))
        seconds = time.monotonic() - began
        used = {pid: (after[pid] - before[pid]) / seconds for pid in after}
        own = sum(value for pid, value in used.items() if pid in ranks)
        return own, sum(used.values()) - own


@contextmanager
def running(*flags: str, priority: int = 0) -> Iterator[Cluster]:
    """A bed and a job on it; nothing is left of either in the end."""
    with beds.made(priority=priority) as (bed, machines):
        (bed.folder / "config.yaml").write_text(CONFIG)
        runs: list[jobs.Job] = []
        try:
            for rank, machine in enumerate(machines):
                runs.append(_start(bed, rank, machine, flags))
            cluster = Cluster(bed, runs)
            yield cluster
        finally:
            if runs:
                runs[0].end()
            for one in runs:
                one.end()


def _start(bed: Bed, rank: int, machine: Machine, flags: Sequence[str]) -> jobs.Job:
    endpoint = f"--rdzv-endpoint={bed.management_address(0)}:{PORT}"
    whole = [f"--nnodes={bed.ranks}", f"--node-rank={rank}", endpoint, f"--mesh={MESH}", "--observe-only",
             "--config=config.yaml", f"--code={SCRIPT.parent}", *flags]  # fmt: skip
    args: list[str | Path] = [*SIZES, f"--control={bed.control}"]
    if bed.groups.folder is not None:
        args.append(f"--cgroups={bed.groups.folder}")
    return jobs.start(
        bed.folder, SCRIPT, nproc=1, flags=whole, args=args, job=bed.token, environment=ENV, without=("PYTHON", "OMP_"),
        prefix=machine.prefix,
    )  # fmt: skip
