"""Do the tests of stopped nodes find the node that is wrong, and nobody else, and how long do they take?

    python benchmarks/diagnose.py [--runs N] [--quick] [--json FILE]

Six local nodes of one rank each; the test programs are real (gloo), and so are the rules that choose tests and judge
them; only the job around them is left out, which would take most of the time (`nan_suite_s` is of whole jobs).

`sdc_found_fraction`      one node flips one bit of one matrix product in every run: it is the one that is accused
`sdc_p01_found_fraction`  ... in one run of ten
`healthy_accused`         nodes accused in any trial that were well; as many trials have no fault at all
`link_named_fraction`     four machines (network namespaces, as root), a link of their ring at a tenth of the others or
                          with 2 % of its packets lost, in turn: the link is named, and nobody accused
`replay_found_fraction`   whole jobs on six nodes that are replayed in groups (benchmarks/replays.py); one node computes
                          wrongly in every start of the script: it is the one that goes. With `--only replays`, as a job
                          takes a minute
`replay_p01_found_fraction`  ... in one start of ten, which takes some minutes
`nan_suite_s`             of a job on six local nodes whose loss became NaN: all tests, from order to last answer
`suite_s_N`               the same tests on N nodes of this machine, which compete for its processors
`links_s_N`               the tests between N machines whose cables carry 100 Mbit/s, so that they wait for the network

Which node, product and bit is drawn anew in each trial, with the trial's number as the seed.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harness import ROOT, NotMeasured, parser, print_table, run_to_end, write_report
from lab import Lab
from replays import replay

sys.path.append(str(ROOT / "tests"))  # what plays nodes and machines for the tests plays them here too

from evertrain.decide.state import Exam
from support import examined, fleet, machines
from support.fleet import Fleet
from support.machines import Host

USUAL_PARTS = ("trials", "links", "sizes", "job")
PARTS = (*USUAL_PARTS, "replays")
NODES = 6
SIZES = (2, 4, 6)
LINK_SIZES = (2, 4, 6, 8)
BUDGET_S = 120.0
USUAL, TENTH, WAITS = 200, 20, 100
"""Megabits a second: of links, of one that is slow, and where all should wait for theirs."""
LOST = 2
"""Of a hundred packets."""
PRODUCTS, BITS = 60, 8
"""Of the training step's matrix products the first so many, and of the mantissa's bits the highest, are drawn from."""
JOB_S = 240.0
REPEATS = 40
"""Of a replay, where the fault shows in one of ten."""


class Found(NamedTuple):
    """What one trial came to."""

    accused: frozenset[str]
    notes: tuple[str, ...]
    seconds: float


class Counts:
    """Trials that came out as they should, of how many."""

    def __init__(self) -> None:
        self.good: dict[str, int] = {}
        self.all: dict[str, int] = {}
        self.innocent = 0

    def add(self, name: str, is_good: bool, innocent: int) -> None:
        self.all[name] = self.all.get(name, 0) + 1
        self.good[name] = self.good.get(name, 0) + is_good
        self.innocent += innocent


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--runs", type=int, default=20, help="trials of each kind (default 20)")
    flags.add_argument("--only", choices=PARTS, action="append", help="not all of it; may be given more than once")
    options = flags.parse_args()
    with tempfile.TemporaryDirectory(prefix="diagnose-") as folder:
        with fleet.server(Path(folder) / "socket") as server:
            return measure(options, server, Path(folder))


def measure(options: Namespace, server: Path, folder: Path) -> int:
    runs = min(options.runs, 5) if options.quick else options.runs
    counts = Counts()
    figures: dict[str, float] = {}
    samples: dict[str, int] = {}
    parts = options.only or USUAL_PARTS
    for number in range(runs if "trials" in parts else 0):
        for kind, share in (("sdc", 1.0), ("sdc_p01", 0.1), ("healthy", 0.0)):
            one_trial(counts, server, folder, kind, share, number)
    for number in range(runs if "replays" in parts else 0):
        for kind, p in (("replay", 1.0), ("replay_p01", 0.1), ("replay_healthy", 0.0)):
            one_replay(counts, kind, p, number)
    why = machines.why_not()
    for number in range(runs if "links" in parts and not why else 0):
        one_link(counts, server, folder, number)
    for count in SIZES if "sizes" in parts else ():
        seconds = [local(server, folder, count).seconds for _ in range(1 if options.quick else 3)]
        figures[f"suite_s_{count}"], samples[f"suite_s_{count}"] = median(seconds), len(seconds)
    for count in LINK_SIZES if "sizes" in parts and not why else ():
        seconds = [waiting(server, folder, count) for _ in range(1 if options.quick else 3)]
        figures[f"links_s_{count}"], samples[f"links_s_{count}"] = median(seconds), len(seconds)
    try:
        suites = [nan_suite() for _ in range((1 if options.quick else 3) if "job" in parts else 0)]
        if suites:
            figures["nan_suite_s"], samples["nan_suite_s"] = median(suites), len(suites)
    except NotMeasured as error:
        print(f"nan_suite_s: {error}")
    for name, figure in (("sdc", "sdc_found_fraction"), ("sdc_p01", "sdc_p01_found_fraction"),
                         ("replay", "replay_found_fraction"), ("replay_p01", "replay_p01_found_fraction"),
                         ("link", "link_named_fraction")):  # fmt: skip
        if counts.all.get(name):
            figures[figure], samples[figure] = counts.good[name] / counts.all[name], counts.all[name]
    figures["healthy_accused"], samples["healthy_accused"] = counts.innocent, sum(counts.all.values())
    print()
    print_table(
        ("figure", "value", "n"),
        [(name, f"{value:.3g}", str(samples[name])) for name, value in sorted(figures.items())],
    )
    if why:
        print(f"left out: links: {why}")
    write_report(options.json, figures, samples)
    is_whole = "nan_suite_s" in figures or "job" not in parts
    return 0 if is_whole and counts.innocent == 0 else 1


# -- trials ------------------------------------------------------------------------------------------------------------


def one_trial(counts: Counts, server: Path, folder: Path, kind: str, share: float, number: int) -> None:
    draw = random.Random(f"{kind} {number}")
    bad = f"node-{draw.randrange(NODES)}"
    fault = f"flip:node={bad},p={share},matmul={draw.randrange(PRODUCTS)},bit={draw.randrange(BITS)},seed={number}"
    found = local(server, folder, NODES, fault if share else "")
    expected = frozenset({bad} if share else ())
    counts.add(kind, found.accused == expected, len(found.accused - expected))
    told(kind, number, found, fault if share else "no fault")


def one_replay(counts: Counts, kind: str, p: float, number: int) -> None:
    node = f"node-{random.Random(f'{kind} {number}').randrange(NODES)}" if p else ""
    try:
        trial = replay(node, p=p, seed=number, repeats=REPEATS if 0 < p < 1 else 3)
    except NotMeasured as error:
        print(f"{kind} {number + 1}: {error}", flush=True)
        return
    counts.add(kind, trial.is_right, len({*trial.named, *trial.evicted} - {node}))
    print(f"{kind} {number + 1}: {trial}", flush=True)


def one_link(counts: Counts, server: Path, folder: Path, number: int) -> None:
    draw, is_slow = random.Random(f"link {number}"), number % 2 == 0
    with machines.mesh(4) as hosts:
        # of the ring: other links carry nothing in these tests
        at = draw.randrange(4)
        one, other = draw.sample((hosts[at], hosts[(at + 1) % 4]), 2)
        for host in hosts:
            towards = {one.name: other.name, other.name: one.name}.get(host.name, "")
            host.shape(USUAL, {towards: TENTH} if is_slow and towards else {})
        if not is_slow and (why := other.lose(LOST, [one.address])):
            print(f"link {number + 1}: left out: {why}", flush=True)
            return
        found = between(hosts, server, folder)
    links = [note for note in found.notes if "the link of" in note]
    names = (f"the link of {one.name} and {other.name} is", f"the link of {other.name} and {one.name} is")
    is_named = len(links) == 1 and any(name in links[0] for name in names)
    counts.add("link", is_named and not found.accused, len(found.accused))
    told("link", number, found, f"{one.name} and {other.name}: {'a tenth' if is_slow else f'{LOST} % lost'}")


def told(kind: str, number: int, found: Found, what: str) -> None:
    said = f"accused: {', '.join(sorted(found.accused)) or 'nobody'}"
    print(f"{kind} {number + 1}: {what}: {said}; {'; '.join(found.notes[:2])} ({found.seconds:.1f} s)", flush=True)


def local(server: Path, folder: Path, count: int, fault: str = "") -> Found:
    """The suite for numbers that are none, on nodes of this machine."""
    with opened(server, folder) as nodes:
        names = [f"node-{at}" for at in range(count)]
        made = {name: nodes.node(name, fault=fault) for name in names}
        job = examined.Job(made, store=nodes.store())
        return timed(job, "nan")


def between(hosts: list[Host], server: Path, folder: Path) -> Found:
    """The suite for trouble with the network."""
    with opened(server, folder) as nodes:
        made = {
            host.name: nodes.node(host.name, netns=host.namespace, environ={"GLOO_SOCKET_IFNAME": Host.HOME})
            for host in hosts
        }
        store = nodes.store(hosts[0].address, hosts[0].namespace)
        return timed(examined.Job(made, store=store, addresses={host.name: host.address for host in hosts}), "nccl")


def waiting(server: Path, folder: Path, count: int) -> float:
    with machines.mesh(count) as hosts:
        for host in hosts:
            host.shape(WAITS)
        found = between(hosts, server, folder)
    if found.accused or found.notes:
        print(f"{count} machines that are well: {sorted(found.accused)} {found.notes}", flush=True)
    return found.seconds


def timed(job: examined.Job, symptom: Any) -> Found:
    began = time.monotonic()
    exam: Exam = job.examine(symptom, BUDGET_S)
    seconds = time.monotonic() - began
    notes = [note for note in examined.notes(exam) if "absent" not in note]
    return Found(frozenset(exam.accused), tuple(notes), seconds)


@contextmanager
def opened(server: Path, folder: Path) -> Iterator[Fleet]:
    nodes = Fleet(server, folder)
    try:
        yield nodes
    finally:
        nodes.close()


def nan_suite() -> float:
    """Seconds that the tests of a whole job took, interpreters and all."""
    lab = Lab("diagnose", NODES, 0, steps=0, script=ROOT / "tests/support/scripts/train.py")
    command = [*lab.command, "--inject", "nan:rank=1@step=5", lab.script, "--sleep", "0.3"]
    status = run_to_end(command, lab.environment, lab.folder / "output.txt", limit_s=JOB_S)
    if status != 0:
        raise NotMeasured(f"exit code {status}; see {lab.folder}")
    checks: list[Mapping[str, Any]] = lab.incidents()[0]["checks"]
    if len({one["name"] for one in checks}) < 5 or any(one["accused"] for one in checks):
        raise NotMeasured(f"{[(one['name'], one['accused']) for one in checks]}; see {lab.folder}")
    seconds = sum(one["seconds"] for one in checks)
    each = ", ".join(f"{one['name']} {one['seconds']:.1f} s" for one in checks)
    print(f"nan suite of a job: {each}", flush=True)
    lab.close()
    return float(seconds)


if __name__ == "__main__":
    sys.exit(main())
