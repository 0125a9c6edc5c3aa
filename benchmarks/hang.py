"""Is the right rank named, of the right class, and how soon? Real hangs of 8 ranks in pipeline, data and tensor groups.

examples/train_3d.py on four local nodes with two ranks each, a fifth stands by (`--quick`: two with four ranks, and a
third); default limits. In each trial one rank does at one step what tests/support/faults.py lists, done from outside of
Evertrain. Measured is the time from the fault, as the faulty rank writes it down, to the moment at which an incident
with rank and class can be read from the controller. A verdict is correct where both are right; an eviction is wrong
unless the process cannot be ended.

`--healthy N`: N runs beside busy processes, in which nothing may be found. `--slow`: one rank computes longer by a
factor, which has to be found, or all of them, which is nobody's fault. `--peers`: the same hangs under torchrun with a
process group's timeout of 30 s instead of 30 min; right is the rank that its summary calls the root cause.

    figures: correct_fraction, wrong_evictions, right_action_fraction, fault_to_named_p50_s, fault_to_named_p100_s, and
             by fault FAULT_correct_fraction, FAULT_named_s; false_verdicts; slow_found_fraction, slow_false
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import own_job
from harness import BIN, ROOT, NotMeasured, clean_environment, parser, print_table, run_to_end, write_report

sys.path.append(str(ROOT / "tests"))

from support import dead_disk, faults, jobs
from support.faults import FAULTS, Fault

SCRIPT = ROOT / "tests/support/scripts/faulty_3d.py"
AT_STEP = 5
QUICK_NODES = 2
START_LIMIT_S, NAMED_LIMIT_S, DONE_LIMIT_S = 150.0, 60.0, 12.0
NAMED_TARGET_S = 15.0
POLL_S = 0.1
HEALTHY_S = 45.0
GROUP_TIMEOUT_S = 30
FACTORS = (1.5, 2.0, 3.0)
SLOW_STEP = 16
SLOW_LIMIT_S = 180.0
SLOW_ARGS = ("--microbatches=4", "--batch=4", "--compute-ms=500")
SLOW_CONFIG = "metrics: {warm_up_steps: 3, baseline_steps: 10, recent_steps: 5}\n"
"""Otherwise a trial would take a quarter of an hour: steps that sleep are even, so that fewer say enough."""
RANKS = (5, 3, 6, 0, 7, 2, 4, 1)
"""The faulty one, of one round after the other."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    rank: int
    named: tuple[int, ...] = ()
    kind: str = ""
    seconds: float | None = None
    """From the fault until it was named; None: never."""
    action: str = "none"
    wrongly_evicted: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()


@contextmanager
def running(args: Sequence[str | Path], nodes: int = faults.NODES, *, config: str = "") -> Iterator[jobs.Job]:
    flags = [f"--local-nodes={nodes + 1}", f"--nnodes={nodes}", "--standby=1", f"--mesh={faults.MESH}"]
    with own_job.running(
        "hang", SCRIPT, nproc=faults.RANKS // nodes, flags=flags, args=[*faults.SIZES, *args], config=config
    ) as job:
        yield job


def measure(fault: Fault, rank: int, nodes: int) -> Trial:
    """One job, one fault, and what is said about it."""
    with ExitStack() as stack:
        args: list[str | Path] = ["--at", f"{rank}:{AT_STEP}", "--note", "note"]
        if not fault.by_signal:
            args += ["--fault", fault.name]
        free: Callable[[], object] = lambda: None  # noqa: E731
        if fault.name == "dead-mount":
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dead-")))
            disk = stack.enter_context(dead_disk.mounted(place))
            args += ["--file", disk.file]
            free = disk.free
        with running(args, nodes) as job:
            try:
                return _watch(job, fault, rank, nodes)
            finally:
                free()  # or nobody could end the rank


def _watch(job: jobs.Job, fault: Fault, rank: int, nodes: int) -> Trial:
    began = _hurt(job, fault, rank)
    incident = _wait(lambda: _named(job, fault), NAMED_LIMIT_S)
    seconds = time.time() - began if incident and (incident["ranks"] or fault.in_circle) else None
    if incident is None:
        return Trial(rank)
    _wait(lambda: _newest(job, incident)["action"] not in ("none", "capture", "inspect"), DONE_LIMIT_S)
    incident = _newest(job, incident)
    evicted = {node["id"] for node in (job.peek() or {}).get("nodes", ()) if node["state"] == "evicted"}
    if any(one["action"] == "evict" for one in job.peek_incidents()):
        evicted |= set(incident["nodes"])
    wrong = evicted - ({f"node-{rank // (faults.RANKS // nodes)}"} if fault.may_evict else set())
    return Trial(
        rank, tuple(incident["ranks"]), faults.kind_of(incident), seconds, incident["action"], tuple(sorted(wrong)),
        tuple(incident["evidence"]),
    )  # fmt: skip


def _hurt(job: jobs.Job, fault: Fault, rank: int) -> float:
    """When it happened."""
    if fault.by_signal:
        job.wait_for_step(AT_STEP, within_s=START_LIMIT_S)
        job.kill_rank(rank, signal.SIGSTOP)
        return time.time()
    note = job.wait_for_file("note", within_s=START_LIMIT_S)
    lines = _wait(lambda: note.read_text().splitlines(), 5)
    return float(json.loads((lines or ["{}"])[0])["time"])


def _named(job: jobs.Job, fault: Fault) -> Json | None:
    """The first incident that says who it is, or for which something was done without saying it."""
    found = [one for one in job.peek_incidents() if faults.by_stacks(one)]
    if not fault.in_circle:
        found = [one for one in found if one["ranks"] or one["action"] not in ("none", "capture")]
    return found[0] if found else None


def _newest(job: jobs.Job, incident: Json) -> Json:
    return next((one for one in job.peek_incidents() if one["id"] == incident["id"]), incident)


def _wait(look: Callable[[], Any], limit_s: float) -> Any:
    """What it returns once that is true; None after the limit."""
    deadline = time.monotonic() + limit_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    return seen


# --- what is no hang


@contextmanager
def load(count: int) -> Iterator[None]:
    """Busy loops beside the job, at its own priority."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure_healthy(loops: int) -> int:
    """How many incidents a run has in which nothing is wrong."""
    with load(loops), running(["--loaders", "--evaluate-every=10"]) as job:
        job.wait_for_step(2, within_s=START_LIMIT_S)
        _wait(lambda: job.peek_incidents(), HEALTHY_S)
        found = job.peek_incidents()
        for one in found:
            print(f"  {one['cause']}, ranks {one['ranks']}: {one['action']}; {one['evidence']}", flush=True)
        attempt = (job.peek() or {}).get("attempt") or 1
        return max(len(found), attempt - 1)


def measure_slow(factor: float, rank: int | None) -> Trial:
    """One job in which a rank, or None: all, becomes slower by a factor at one step."""
    args = [
        "--at",
        f"{'all' if rank is None else rank}:{SLOW_STEP}",
        "--slow",
        str(factor),
        "--note",
        "note",
        *SLOW_ARGS,
    ]
    with running(args, config=SLOW_CONFIG) as job:
        note = job.wait_for_file("note", within_s=START_LIMIT_S + 180)
        began = float(json.loads(note.read_text().splitlines()[0])["time"])
        incident = _wait(lambda: next((one for one in job.peek_incidents() if one["ranks"]), None), SLOW_LIMIT_S)
        if incident is None:
            return Trial(-1 if rank is None else rank)
        return Trial(
            -1 if rank is None else rank, tuple(incident["ranks"]), faults.kind_of(incident), time.time() - began,
            incident["action"], evidence=tuple(incident["evidence"]),
        )  # fmt: skip


# --- the usual way


def measure_torchrun(fault: Fault, rank: int) -> Trial:
    """The same under torchrun, which ends when some rank has waited for so long; the rank that it calls the cause."""
    with tempfile.TemporaryDirectory(prefix="hang-torchrun-") as name:
        folder = Path(name)
        note, output = folder / "note", folder / "output"
        how = ("--at", f"{rank}:{AT_STEP}", "--fault", fault.name, "--note", note)
        limit = f"--group-timeout={GROUP_TIMEOUT_S}"
        launcher = (BIN / "torchrun", "--standalone", f"--nproc-per-node={faults.RANKS}", SCRIPT)
        environment = clean_environment(TMPDIR=name)
        run_to_end(
            [*launcher, *faults.SIZES, *how, limit], environment, output, limit_s=START_LIMIT_S + GROUP_TIMEOUT_S
        )
        ended = time.time()
        lines = note.read_text().splitlines() if note.exists() else []
        if not lines:
            raise NotMeasured(f"the fault never happened: {output.read_text(errors='replace')[-500:]}")
        _, _, cause = output.read_text(errors="replace").partition("Root Cause")
        found = re.search(r"rank\s*: (\d+)", cause)
        if found is None:
            return Trial(rank)
        return Trial(rank, (int(found[1]),), "", ended - float(json.loads(lines[0])["time"]))


# --- the table


def show(outcomes: dict[str, list[Trial]]) -> dict[str, float]:
    """Prints a row a fault; the figures."""
    figures: dict[str, float] = {}
    rows = []
    for name, trials in outcomes.items():
        fault = FAULTS[name]
        right = [fault.is_right(one.rank, one.named, one.kind) for one in trials]
        seconds = [one.seconds for one in trials if one.seconds is not None]
        figures[f"{name}_correct_fraction"] = sum(right) / len(trials)
        if seconds:
            figures[f"{name}_named_s"] = median(seconds)
        last = trials[-1]
        rows.append(
            [
                name, fault.what, f"{sum(right)} of {len(trials)}", f"{median(seconds):.1f}" if seconds else "never",
                f"{max(seconds):.1f}" if seconds else "-", f"rank {last.rank}", f"{last.kind} {list(last.named)}",
                last.action,
            ]
        )  # fmt: skip
    print()
    print_table(["fault", "", "correct", "named, s", "at most", "truth", "last verdict", "action"], rows)
    every = [(FAULTS[name], one) for name, trials in outcomes.items() for one in trials]
    if every:
        seconds = [one.seconds for _, one in every if one.seconds is not None]
        right = [fault.is_right(one.rank, one.named, one.kind) for fault, one in every]
        figures["correct_fraction"] = sum(right) / len(right)
        figures["wrong_evictions"] = sum(bool(one.wrongly_evicted) for _, one in every)
        figures["right_action_fraction"] = sum(fault.may_lead_to(one.action) for fault, one in every) / len(every)
        if len(seconds) == len(every):
            figures["fault_to_named_p50_s"] = median(seconds)
            figures["fault_to_named_p100_s"] = max(seconds)
    return figures


TARGETS: dict[str, Callable[[float], bool]] = {
    "correct_fraction": lambda value: value == 1,
    "wrong_evictions": lambda value: value == 0,
    "right_action_fraction": lambda value: value == 1,
    "fault_to_named_p100_s": lambda value: value <= NAMED_TARGET_S,
    "false_verdicts": lambda value: value == 0,
    "slow_found_fraction": lambda value: value == 1,
    "slow_false": lambda value: value == 0,
}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    options = _options()
    names = (
        options.faults.split(",")
        if options.faults
        else [n for n, one in FAULTS.items() if one.is_quick or not options.quick]
    )
    if unknown := [name for name in names if name not in FAULTS]:
        raise SystemExit(f"{', '.join(unknown)}: no such fault; there are {', '.join(FAULTS)}")
    rounds = 1 if options.quick else options.runs
    nodes = QUICK_NODES if options.quick else faults.NODES
    figures: dict[str, float] = {}
    samples: dict[str, int] = {}
    failed = False

    outcomes: dict[str, list[Trial]] = defaultdict(list)
    only_others = options.healthy or options.slow or options.peers
    for number in range(0 if only_others else rounds):
        for at, name in enumerate(names):
            rank = RANKS[(number + at) % len(RANKS)]
            failed |= not _try(
                f"round {number + 1}: {name}", partial(measure, FAULTS[name], rank, nodes), outcomes[name]
            )
    if outcomes:
        figures |= show(outcomes)
    samples |= {name: sum(map(len, outcomes.values())) for name in figures}
    samples |= {
        f"{name}_{what}": len(runs) for name, runs in outcomes.items() for what in ("correct_fraction", "named_s")
    }

    if options.healthy:
        found: list[int] = []
        for number in range(options.healthy):
            failed |= not _try(f"healthy {number + 1}", partial(measure_healthy, options.loops), found)
        figures["false_verdicts"], samples["false_verdicts"] = sum(found), len(found)
    if options.slow:
        one_slow: list[Trial] = []
        all_slow: list[Trial] = []
        for number in range(rounds):
            for at, factor in enumerate(FACTORS):
                rank = RANKS[(number + at) % len(RANKS)]
                failed |= not _try(f"slow x {factor:g}", partial(measure_slow, factor, rank), one_slow)
            failed |= not _try("all slow x 2", partial(measure_slow, 2.0, None), all_slow)
        right = [one.named == (one.rank,) and one.kind in ("slow", "compute") for one in one_slow]
        figures["slow_found_fraction"] = sum(right) / len(right) if right else 0.0
        figures["slow_false"] = sum(bool(one.named) for one in (*one_slow, *all_slow)) - sum(right)
        samples |= {"slow_found_fraction": len(right), "slow_false": len(right) + len(all_slow)}
    if options.peers:
        of_torchrun: list[Trial] = []
        for at, name in enumerate(one for one in names if one != "dead-mount" and not FAULTS[one].by_signal):
            rank = RANKS[at % len(RANKS)]
            _try(f"torchrun: {name}", partial(measure_torchrun, FAULTS[name], rank), of_torchrun)
        if seconds := [one.seconds for one in of_torchrun if one.seconds is not None]:
            figures["torchrun_named_s"] = median(seconds)
            figures["torchrun_correct_fraction"] = sum(one.named == (one.rank,) for one in of_torchrun) / len(
                of_torchrun
            )
            samples |= {"torchrun_named_s": len(seconds), "torchrun_correct_fraction": len(of_torchrun)}

    print()
    for name, is_met in TARGETS.items():
        if name in figures:
            print(f"{name} {figures[name]:.3g}: {'met' if is_met(figures[name]) else 'MISSED'}")
    write_report(options.json, figures, {name: samples[name] for name in figures})
    return 1 if failed else 0


def _try(what: str, measured: Callable[[], Any], into: list[Any]) -> bool:
    """Add an outcome to the others, and say what it was; whether there was one."""
    began = time.monotonic()
    try:
        into.append(measured())
    except (NotMeasured, OSError) as error:
        print(f"{what}: {error}", flush=True)
        return False
    print(f"{what}: {into[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    return True


def _options() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--runs", type=int, default=3, help="trials of each fault")
    flags.add_argument("--faults", default="", metavar="NAMES", help=f"of {', '.join(FAULTS)}")
    flags.add_argument("--healthy", type=int, default=0, metavar="N", help="healthy runs on a loaded machine, instead")
    flags.add_argument("--loops", type=int, default=2, help="busy processes beside them")
    flags.add_argument("--slow", action="store_true", help="slow ranks, instead")
    flags.add_argument("--peers", action="store_true", help="hangs under torchrun, instead")
    return flags.parse_args()


if __name__ == "__main__":
    sys.exit(main())
