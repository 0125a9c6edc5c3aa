"""How long does training stand still after `kill -9`, a hang or a stop of one rank? Evertrain and others, same script.

Measured from the kill, 20 ms into step 13 when 12 are done, to the moment at which the slowest rank has finished the
first step higher than any rank had reached before. Evertrain runs in its normal mode and saves every step; the others
save to disk every 5 steps, so their time includes two steps done again. They get TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1:
without it a gloo job never comes back from a restart under torch 2.13.

Hangs (a rank sleeps) and stops (SIGSTOP) are run with Evertrain's default limits. torchrun notices a hang only when
the process group's timeout is over: the toy gives it 20 s instead of torch's 1,800 s, and its figure follows from that.

`node_loss_to_step_s`: one of two nodes is gone for good, and a standby trains in its place (default settings).
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import peers
import standby
from harness import (
    BIN,
    ROOT,
    NotMeasured,
    clean_environment,
    interleave,
    parser,
    print_table,
    run_to_end,
    write_report,
)

TOY = ROOT / "benchmarks/toy.py"
KILL_STEP = 13
LIMIT_S = 120.0
GROUP_TIMEOUT_S = 20
TARGETS = {
    "evertrain_kill_median_s": 0.35,
    "evertrain_kill_median_s_8": 0.5,
    "kill_ratio_to_best_peer": 0.08,
    "kill_ratio_to_best_peer_8": 0.08,
    "start_ratio_to_torchrun": 0.5,
    "evertrain_hang_median_s": 12.0,
    "evertrain_stop_median_s": 12.0,
    "node_loss_to_step_s": 15.0,
}


@dataclass(frozen=True)
class Tool:
    """A launcher as the benchmark calls it."""

    name: str
    command: tuple[str | Path, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """One job, killed once and run to its end."""

    start_s: float
    recovery_s: float
    steps_redone: int


class NotRecovered(Exception):
    """A job that did not train on after the kill."""


def evertrain(ranks: int) -> Tool:
    command = (BIN / "evertrain", "run", f"--nproc-per-node={ranks}", "--fresh", TOY)
    return Tool("evertrain", command, {"TOY_SAVE": "evertrain"})


def peer(name: str, launcher: Path, ranks: int) -> Tool:
    command = (launcher, "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=3", TOY)
    return Tool(name, command, {"TOY_SAVE": "disk", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})


def measure(tool: Tool, ranks: int, fault: str = "kill") -> Outcome:
    """Run the job once in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix=f"recovery-{tool.name}-"))
    events_file = folder / "events.jsonl"
    environment = clean_environment(
        **tool.environment,
        TOY_LOG=str(events_file),
        TOY_KILL=f"{ranks // 2}:{KILL_STEP}",
        TOY_FAULT=fault,
        EVERTRAIN_RUN_DIR=str(folder / "runs"),
        XDG_STATE_HOME=str(folder / "state"),
    )
    began = time.time()
    status = run_to_end(tool.command, environment, folder / "output.txt", limit_s=LIMIT_S)
    try:
        events = [json.loads(line) for line in events_file.read_text().splitlines()]
        outcome = read_outcome(events, ranks, began)
        if status != 0:
            raise NotRecovered(f"exit code {status}")
    except (OSError, NotRecovered) as error:
        raise NotRecovered(f"{tool.name}, {ranks} ranks: {error}; see {folder}") from error
    shutil.rmtree(folder)
    return outcome


def read_outcome(events: Sequence[dict[str, Any]], ranks: int, began: float) -> Outcome:
    """What the events of one job say; `began` is the time at which its command was started."""
    kills = [event["time"] for event in events if event["event"] == "kill"]
    if len(kills) != 1:
        raise NotRecovered(f"{len(kills)} kills instead of one")
    steps = [event for event in events if event["event"] == "step"]
    before = [event for event in steps if event["time"] <= kills[0]]
    reached = int(max(event["step"] for event in before))
    again = {event["rank"]: event["time"] for event in reversed(steps) if event["step"] == reached + 1}
    if len(again) != ranks:
        raise NotRecovered(f"{len(again)} of {ranks} ranks finished step {reached + 1}")
    resumed = int(min(event["step"] for event in events if event["event"] == "ready" and event["time"] > kills[0]))
    first = [event["time"] for event in before if event["step"] == 1]
    return Outcome(max(first) - began, max(again.values()) - kills[0], reached - resumed)


def figures_of(outcomes: Mapping[tuple[str, int], Sequence[Outcome]]) -> dict[str, float]:
    """The named figures; eight ranks carry the suffix `_8`."""
    figures: dict[str, float] = {}
    kill = {key: median(one.recovery_s for one in runs) for key, runs in outcomes.items() if runs}
    for (name, ranks), value in kill.items():
        figures[f"{name}_kill_median_s{_suffix(ranks)}"] = value
    for ranks in sorted({ranks for name, ranks in kill if name == "evertrain"}):
        others = [value for (name, size), value in kill.items() if size == ranks and name != "evertrain"]
        if others:
            figures[f"kill_ratio_to_best_peer{_suffix(ranks)}"] = kill["evertrain", ranks] / min(others)
    start = {key: median(one.start_s for one in runs) for key, runs in outcomes.items() if runs}
    if ("evertrain", 4) in start and ("torchrun", 4) in start:
        figures["start_ratio_to_torchrun"] = start["evertrain", 4] / start["torchrun", 4]
    return figures


def show(outcomes: Mapping[tuple[str, int], Sequence[Outcome]], figures: Mapping[str, float]) -> None:
    rows = []
    for (name, ranks), runs in sorted(outcomes.items(), key=lambda item: (item[0][1], item[0][0])):
        seconds = sorted(one.recovery_s for one in runs)
        spread = f"{seconds[0]:.2f} to {seconds[-1]:.2f}" if runs else "never"
        middle = f"{median(seconds):.3f}" if runs else "-"
        start = f"{median(one.start_s for one in runs):.2f}" if runs else "-"
        redone = "/".join(str(steps) for steps in sorted({one.steps_redone for one in runs}))
        rows.append([name, str(ranks), str(len(runs)), middle, spread, redone, start])
    print()
    print_table(
        ["launcher", "ranks", "runs", "kill to new step, s", "range", "steps redone", "start to step 1, s"], rows
    )
    print()
    for name, target in TARGETS.items():
        if name in figures:
            verdict = "met" if figures[name] <= target else "MISSED"
            print(f"{name} {figures[name]:.3f}, target {target:g}: {verdict}")


def _suffix(ranks: int) -> str:
    return "" if ranks == 4 else f"_{ranks}"


def _runs_behind(figure: str, outcomes: Mapping[tuple[str, int], Sequence[Outcome]]) -> int:
    """How many runs a figure rests on; a ratio is as good as the launcher with the fewest."""
    for (name, ranks), runs in outcomes.items():
        if figure == f"{name}_kill_median_s{_suffix(ranks)}":
            return len(runs)
    ranks = 8 if figure.endswith("_8") else 4
    return min(len(runs) for (_, size), runs in outcomes.items() if size == ranks and runs)


def measure_hangs(tools: Sequence[Tool], runs: int) -> dict[str, list[float]]:
    """Seconds from hang or stop to the first new step, four ranks; by figure."""
    found: dict[str, list[float]] = defaultdict(list)
    for _, (fault, tool) in interleave([(fault, tool) for fault in ("hang", "stop") for tool in tools], runs):
        if tool.name != "evertrain" and fault == "stop":
            continue  # SIGTERM does not reach a stopped rank: torchrun waits out its grace as well
        try:
            outcome = measure(tool, 4, fault)
        except NotRecovered as error:
            print(f"{fault}: {error}", flush=True)
            continue
        found[f"{tool.name}_{fault}_median_s"].append(outcome.recovery_s)
        print(f"{fault}: {tool.name}, 4 ranks: {outcome.recovery_s:.2f} s", flush=True)
    return found


def measure_node_losses(runs: int) -> dict[str, list[float]]:
    """Seconds from the loss of a node to the first new step on a standby."""
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(runs):
        try:
            found["node_loss_to_step_s"].append(standby.until_standby_trains("node-loss", nodes=2))
        except NotMeasured as error:
            print(f"node loss: {error}", flush=True)
            continue
        print(f"node loss: {found['node_loss_to_step_s'][-1]:.2f} s", flush=True)
    return found


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--tools", default="evertrain,torchrun,ft_launcher,dlrover", help="launchers to compare")
    flags.add_argument("--ranks", default="4,8")
    flags.add_argument("--runs", type=int, default=7, help="runs of each launcher and number of ranks")
    flags.add_argument("--cache", type=Path, default=Path.home() / ".cache/evertrain/peers", help="where peers live")
    options = flags.parse_args()
    names = ["evertrain", "torchrun"] if options.quick else options.tools.split(",")
    runs = min(options.runs, 3) if options.quick else options.runs

    launchers: dict[str, Path] = {}
    for name in [name for name in names if name != "evertrain"]:
        try:
            launchers[name] = peers.launcher(name, options.cache)
        except peers.NotInstalled as error:
            print(f"{name} is left out: {error}")
    sizes = [int(size) for size in options.ranks.split(",")]
    tools = [
        (ranks, evertrain(ranks) if name == "evertrain" else peer(name, launchers[name], ranks))
        for ranks in sizes
        for name in names
        if name == "evertrain" or name in launchers
    ]

    outcomes: dict[tuple[str, int], list[Outcome]] = defaultdict(list)
    failed = False
    for round_number, (ranks, tool) in interleave(tools, runs):
        runs_of_tool = outcomes[tool.name, ranks]
        try:
            outcome = measure(tool, ranks)
        except NotRecovered as error:
            failed |= tool.name == "evertrain"
            print(f"round {round_number + 1}: {error}", flush=True)
            continue
        runs_of_tool.append(outcome)
        print(
            f"round {round_number + 1}: {tool.name}, {ranks} ranks: {outcome.recovery_s:.3f} s "
            f"(first step after {outcome.start_s:.2f} s)",
            flush=True,
        )

    with_timeout = {"TOY_TIMEOUT_S": str(GROUP_TIMEOUT_S)}
    patient = [
        replace(tool, environment={**tool.environment, **({} if tool.name == "evertrain" else with_timeout)})
        for ranks, tool in tools
        if ranks == sizes[0] and tool.name in ("evertrain", *(() if options.quick else ("torchrun",)))
    ]
    hangs = measure_hangs(patient, 1 if options.quick else 3)
    if "evertrain" in names:
        hangs |= measure_node_losses(1 if options.quick else 3)
    figures = {**figures_of(outcomes), **{name: median(seconds) for name, seconds in hangs.items()}}
    show(outcomes, figures)
    samples = {name: len(hangs[name]) if name in hangs else _runs_behind(name, outcomes) for name in figures}
    peer_versions = {name: " ".join(peers.PEERS[name].requirements) for name in launchers if name in peers.PEERS}
    write_report(options.json, figures, samples, peer_versions)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
