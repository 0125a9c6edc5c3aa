"""Is the rank named that makes communication slow or stuck, and what is the matter there, and how soon? On a small bed.

Eight ranks of examples/train_3d.py (pipeline, data and tensor parallel), paced, on eight machines that network
namespaces play (`netbed.bed`). A process of its own hurts one after the other (`netbed.faults`) and writes down what
is true; what `evertrain incidents` says meanwhile is compared with it afterwards. Figures are of the faults that were
felt.

The whole measurement is done in parts of less than ten minutes, each kept in a file (`--state`): the same command goes
on where it was interrupted, `--parts 1` does only the next one. `--quick`: each fault once in one job, and 60 s
without.

    figures: localised_fraction, component_right_fraction, detection_p50_s, detection_p100_s,
             rca_after_detection_p50_s, rca_after_detection_p100_s, false_triggers; felt_fraction, detected_fraction,
             pair_fraction (of those localised, named as a pair), first_right_fraction (by the first verdict),
             settled_after_detection_p100_s (until the last change), watched_ranks (that were read while nothing was
             wrong), rank_cores, other_cores, step_ms
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Any

from harness import ROOT, NotMeasured, parser, print_table, write_report
from netbed import bed as beds
from netbed import score, watch
from netbed.bed import with_parent
from netbed.faults import FAULTS, SECONDS
from netbed.job import Cluster, running
from netbed.score import Outcome, Seen, Truth

INJECT = Path(__file__).parent / "netbed/inject.py"
STATE = ROOT / ".evertrain/rca-parts.jsonl"
ROUNDS, HEALTHY = 5, 5
STEPS_FIRST, WARM_S, HEALTHY_S, QUICK_HEALTHY_S = 30, 20.0, 180.0, 60.0
CORES_S = 10.0
GAP_S, QUICK_GAP_S = (12.5, 18.0), (12.2, 14.0)
INJECT_SLACK_S = 60.0
HALF_A_CORE = """
import time
while True:
    until = time.thread_time() + 0.01
    while time.thread_time() < until: pass
    time.sleep(0.01)
"""

Json = dict[str, Any]

TARGETS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "localised_fraction": (">= 0.95", lambda value: value >= 0.95),
    "component_right_fraction": (">= 0.85", lambda value: value >= 0.85),
    "detection_p50_s": ("<= 5", lambda value: value <= 5),
    "detection_p100_s": ("<= 10", lambda value: value <= 10),
    "rca_after_detection_p100_s": ("<= 2", lambda value: value <= 2),
    "false_triggers": ("0", lambda value: value == 0),
    "watched_ranks": ("<= 10", lambda value: 0 < value <= 10),
    "felt_fraction": (">= 0.9", lambda value: value >= 0.9),
}


# --- one part


def plan_of(names: Sequence[str], seed: str, gap_s: tuple[float, float]) -> list[Json]:
    """Each once, in any order, on any rank, at any time."""
    chance = random.Random(seed)
    order = list(names)
    chance.shuffle(order)
    return [
        {
            "fault": name,
            "rank": chance.randrange(beds.RANKS),
            "after_s": chance.uniform(*gap_s),
            "seed": chance.randrange(1 << 30),
        }
        for name in order
    ]


def measure(plan: Sequence[Json], healthy_s: float, options: argparse.Namespace, *, busy: bool = False) -> Json:
    """One job: well for so long, then one fault after the other."""
    with half_a_core() if busy else nullcontext(), running(priority=options.priority) as cluster:
        cluster.wait_for_steps(STEPS_FIRST)
        time.sleep(WARM_S)
        watched: list[int] = []
        with watch.watching(cluster, lambda status: watched.append(len(status["watched"]))) as seen:
            began = time.time()
            cores = cluster.cores(min(CORES_S, healthy_s))
            _let_pass(cluster, began + healthy_s)
            truths = _hurt(cluster, plan) if plan else []
            if plan:
                _let_pass(cluster, time.time() + score.LATE_S + 4)
            ended = time.time()
        cluster.check()
        return {
            "truths": truths,
            "steps": cluster.steps(),
            "seen": [[one.time, one.incident] for one in seen],
            "alarms": cluster.alarms(),
            "cores": cores,
            "watched": max(watched),
            "nodes": [cluster.bed.name(rank) for rank in range(cluster.bed.ranks)],
            "began": began,
            "ended": ended,
        }


def _let_pass(cluster: Cluster, until: float) -> None:
    while time.time() < until:
        time.sleep(min(1.0, max(0.0, until - time.time())))
        cluster.check()


def _hurt(cluster: Cluster, plan: Sequence[Json]) -> list[Json]:
    """In a process of its own, which nobody here listens to; what it wrote down, once it is over."""
    folder = cluster.bed.folder
    where, what, truth = folder / "bed.json", folder / "plan.json", folder / "truth.jsonl"
    where.write_text(
        json.dumps({"token": cluster.bed.token, "folder": str(cluster.bed.folder), "ranks": cluster.bed.ranks})
    )
    what.write_text(json.dumps(plan))
    limit_s = sum(one["after_s"] + SECONDS for one in plan) + INJECT_SLACK_S
    process = subprocess.Popen([*with_parent("TERM"), sys.executable, INJECT, where, what, truth])
    deadline = time.monotonic() + limit_s
    try:
        while process.poll() is None:
            cluster.check()
            if time.monotonic() > deadline:
                raise NotMeasured("the process that hurts ranks does not end")
            time.sleep(0.5)
    finally:
        process.terminate()
        process.wait(20)
    if process.returncode:
        raise NotMeasured(f"the process that hurts ranks has ended with exit code {process.returncode}")
    return [one for line in truth.read_text().splitlines() if "ended" in (one := json.loads(line))]


@contextmanager
def half_a_core() -> Iterator[None]:
    """A third process, which has nothing to do with the job."""
    process = subprocess.Popen([*with_parent("KILL"), sys.executable, "-I", "-c", HALF_A_CORE])
    try:
        yield
    finally:
        process.kill()
        process.wait()


# --- all parts


def parts_of(options: argparse.Namespace, names: Sequence[str]) -> dict[str, Callable[[], Json]]:
    def round_of(number: int) -> Callable[[], Json]:
        plan = plan_of(names, f"{options.seed}-{number}", GAP_S)
        return lambda: measure(plan, CORES_S, options)

    def quick() -> Json:
        return measure(plan_of(names, f"{options.seed}-quick", QUICK_GAP_S), QUICK_HEALTHY_S, options)

    if options.quick:
        return {"quick": quick}
    parts = {f"faults {number + 1}": round_of(number) for number in range(options.rounds)}
    for number in range(options.healthy):
        parts[f"healthy {number + 1}"] = lambda: measure((), HEALTHY_S, options)
        parts[f"healthy beside half a core {number + 1}"] = lambda: measure((), HEALTHY_S, options, busy=True)
    return parts


def known(file: Path | None) -> dict[str, Json]:
    if file is None or not file.exists():
        return {}
    return {one["part"]: one for line in file.read_text().splitlines() if (one := json.loads(line))}


def keep(file: Path | None, part: Json) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as lines:
            lines.write(json.dumps(part) + "\n")


# --- the tables


def truths_of(part: Json) -> list[Truth]:
    return [Truth(one["fault"], tuple(one["ranks"]), one["began"], one["ended"]) for one in part["truths"]]


def outcomes_of(part: Json) -> list[Outcome]:
    truths, seen = truths_of(part), [Seen(*one) for one in part["seen"]]
    usual_s = score.usual_step_s(part["steps"], truths)
    alarms = [time for time, _ in part["alarms"]]
    return [score.judge(one, score.effect(one, part["steps"], usual_s), alarms, seen) for one in truths]


def show_effects(outcomes: Sequence[Outcome]) -> None:
    """That the faults are real."""
    print("\nmean step of rank 0, ms")
    rows = [
        [
            one.truth.fault,
            ",".join(map(str, one.truth.ranks)),
            f"{1e3 * one.effect.before:.0f}",
            f"{1e3 * one.effect.during:.0f}",
            f"{1e3 * one.effect.after:.0f}",
            f"{1e3 * one.effect.longest:.0f}",
            f"{one.effect.ratio:.2f}",
            "" if one.effect.is_felt else "too weak",
        ]
        for one in sorted(outcomes, key=lambda one: (list(FAULTS).index(one.truth.fault), one.truth.began))
    ]
    print_table(["fault", "rank", "before", "during", "after", "longest", "x usual", ""], rows)


def show_verdicts(outcomes: Sequence[Outcome]) -> None:
    print()
    rows = []
    for one in sorted(outcomes, key=lambda one: (list(FAULTS).index(one.truth.fault), one.truth.began)):
        fault, last = FAULTS[one.truth.fault], one.last
        said = (
            "nothing"
            if last is None
            else f"{last.component} {list(last.ranks)}" + f" {list(last.link)}" * bool(last.link)
        )
        is_right = score.is_localised(one, is_network=fault.is_network)
        rows.append(
            [
                one.truth.fault, str(list(one.truth.ranks)), _seconds(one.detected_s), _seconds(one.named_s),
                _seconds(one.settled_s), said, "yes" if is_right else "NO",
                "yes" if last is not None and last.component in fault.components else "NO",
                "" if one.effect.is_felt else "does not count",
            ]
        )  # fmt: skip
    print_table(
        ["fault", "ranks", "detected, s", "named, + s", "settled, + s", "said", "localised", "component", ""], rows
    )


def show_confusion(outcomes: Sequence[Outcome]) -> None:
    said = Counter(
        (one.truth.fault, one.last.component if one.last is not None else "nothing")
        for one in outcomes
        if one.effect.is_felt
    )
    columns = sorted({component for _, component in said})
    names = [name for name in FAULTS if any(name == fault for fault, _ in said)]
    print("\ncomponents that were named")
    print_table(
        ["fault", "right", *columns],
        [
            [name, "|".join(FAULTS[name].components), *(str(said[name, column] or "") for column in columns)]
            for name in names
        ],
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def show(parts: Sequence[Json]) -> tuple[dict[str, float], dict[str, int]]:
    outcomes = [one for part in parts for one in outcomes_of(part)]
    false: list[str] = []
    watched_s = 0.0
    for part in parts:
        truths = truths_of(part)
        alarms, seen = [time for time, _ in part["alarms"]], [Seen(*one) for one in part["seen"]]
        false += [f"{part['part']}: {line}" for line in score.false_triggers(truths, alarms, seen, part["nodes"])]
        watched_s += part["ended"] - part["began"] - sum(one.ended + score.LATE_S - one.began for one in truths)
    figures: dict[str, float] = {}
    if outcomes:
        show_effects(outcomes)
        show_verdicts(outcomes)
        show_confusion(outcomes)
        is_network = {name: fault.is_network for name, fault in FAULTS.items()}
        components = {name: fault.components for name, fault in FAULTS.items()}
        figures |= score.figures(outcomes, is_network, components)
    samples = dict.fromkeys(figures, sum(one.effect.is_felt for one in outcomes)) | {"felt_fraction": len(outcomes)}
    for line in false:
        print(f"FALSE: {line}")
    print(f"\n{watched_s:.0f} s without a fault were watched")
    figures["false_triggers"] = len(false)
    figures["watched_ranks"] = max(part["watched"] for part in parts)
    figures["rank_cores"] = mean(part["cores"][0] for part in parts)
    figures["other_cores"] = mean(part["cores"][1] for part in parts)
    figures["step_ms"] = 1e3 * median(score.usual_step_s(part["steps"], truths_of(part)) for part in parts)
    samples |= dict.fromkeys(("false_triggers", "watched_ranks", "rank_cores", "other_cores", "step_ms"), len(parts))
    return figures, {name: samples[name] for name in figures}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended on the way out
    options = _options()
    if reason := beds.why_not():
        print(f"NOTHING IS MEASURED: {reason}")
        return 1
    for lack in beds.lacks():
        print(f"this machine lacks something: {lack}", flush=True)
    names = options.faults.split(",") if options.faults else list(FAULTS)
    if unknown := [name for name in names if name not in FAULTS]:
        raise SystemExit(f"{', '.join(unknown)}: no such fault; there are {', '.join(FAULTS)}")
    for name in [*names]:
        if reason := FAULTS[name].why_not():
            print(f"LEFT OUT: {name}: {reason}", flush=True)
            names.remove(name)
    state = options.state or (None if options.quick else STATE)
    done = known(state)
    parts = parts_of(options, names)
    left = [name for name in parts if name not in done]
    failed = False
    for name in left[: options.parts]:
        try:
            with beds.alone():
                began = time.monotonic()
                part = {"part": name} | parts[name]()
        except (NotMeasured, RuntimeError, OSError) as error:
            print(f"{name}: NOT MEASURED: {error}", flush=True)
            failed = True
            continue
        keep(state, part)
        done[name] = part
        print(f"{name}: {len(part['truths'])} faults, {time.monotonic() - began:.0f} s", flush=True)
    mine = [done[name] for name in parts if name in done]
    if not mine:
        return 1
    figures, samples = show(mine)
    print()
    for name, (target, is_met) in TARGETS.items():
        if name in figures:
            print(f"{name} {figures[name]:.3g} ({target}): {'met' if is_met(figures[name]) else 'MISSED'}")
    if missing := [name for name in parts if name not in done]:
        print(f"\nnot measured yet: {', '.join(missing)}; the same command goes on")
    write_report(options.json, figures, samples)
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    flags = parser(__doc__)
    flags.add_argument("--faults", default="", metavar="NAMES", help=f"of {', '.join(FAULTS)}")
    flags.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="each fault so often")
    flags.add_argument(
        "--healthy", type=int, default=HEALTHY, metavar="N", help="healthy runs, alone and beside others"
    )
    flags.add_argument("--parts", type=int, metavar="N", help="do the next N parts only")
    flags.add_argument("--state", type=Path, metavar="FILE", help=f"keeps the parts that are done ({STATE})")
    flags.add_argument("--seed", default="1", help="of ranks, order and moments")
    flags.add_argument(
        "--priority",
        type=int,
        default=0,
        metavar="N",
        help="of the job, as of nice: below 0 where others use the machine",
    )
    return flags.parse_args()


if __name__ == "__main__":
    sys.exit(main())
