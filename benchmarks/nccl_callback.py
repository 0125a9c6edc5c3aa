"""What does a callback of the NCCL plugin cost, and is everything counted at 500,000 of them a second?

A driver in C plays NCCL (tests/trace/nccl): it calls the plugin as the newest interface does, first as fast as it can,
then at that rate for 60 s (`--quick`: 10 s), while this script reads the file as an agent would.

    callback_median_ns     one callback of a step, with what NCCL (the driver) does to fill in a descriptor
    lost_records           operations and flows that ended and were not read whole, or were read with other counters
    sampler_core_fraction  processor time of the plugin's own thread
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import numpy as np

from harness import ROOT, parser, print_table, write_report

sys.path.append(str(ROOT / "tests"))  # what plays NCCL for the tests plays it here too

from evertrain.trace.reading import Array, Reader
from support import nccl

RATE = 500_000
SECONDS, QUICK_SECONDS = 60, 10
VERSION = 6
MEASURED, PACED = 40, 41
"""Communicators of the two parts."""
TARGETS = {"callback_median_ns": 40, "lost_records": 0}


def play(built: nccl.Built, folder: Path, seconds: float) -> tuple[str, list[Array], int]:
    """What the driver said, all records of what has ended, and how many the plugin or this reader had no room for."""
    output = folder / "truth"
    with output.open("w") as file:
        process = subprocess.Popen(
            [built.driver, built.library, str(VERSION), "bench"], stdout=file, stderr=subprocess.DEVNULL,
            env={**nccl.environment(folder), "BENCH_RATE": str(RATE), "BENCH_SECONDS": str(seconds)},
        )  # fmt: skip
    try:
        while not nccl.files(folder):
            if process.poll() is not None:
                raise SystemExit("the driver has ended without a trace")
            time.sleep(0.01)
        done: list[Array] = []
        seen = missed = 0
        with nccl.read(folder) as reader:
            while True:
                is_over = process.poll() is not None
                seen, fresh = _read(reader, seen, done)
                missed += fresh
                if is_over:
                    break
                time.sleep(0.5)
            missed += _read(reader, seen, done)[1] + reader.lost()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
    if process.returncode:
        raise SystemExit(f"the driver has ended with {process.returncode}")
    return output.read_text(), done, missed


def _read(reader: Reader, seen: int, done: list[Array]) -> tuple[int, int]:
    records = reader.since(seen)
    done.append(nccl.of_kind(records.operations, "done"))
    return records.last, records.missed


def lost(truth: nccl.Truth, done: Array, missed: int) -> int:
    """Missed ones, and what does not agree with the driver's truth."""
    paced = done[done["comm"] == PACED]
    counted = nccl.counted_flows(paced)
    wrong = {name: abs(counted[name] - truth.flows[name]) for name in counted.keys() | truth.flows.keys()}
    flows = sum(difference for name, difference in wrong.items() if name[-1] == "times")
    counters = sum(1 for name, difference in wrong.items() if name[-1] != "times" and difference)
    ops = Counter(truth.ops)
    ops.subtract(nccl.ended_ops(paced))
    return missed + flows + counters + sum(abs(number) for number in ops.values())


def main() -> None:
    args = parser(__doc__).parse_args()
    if nccl.MISSING:
        raise SystemExit(nccl.MISSING)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="evertrain-nccl-") as name:
        folder = Path(name)
        built = nccl.Built(folder)
        # the last core: the first one takes most interrupts
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        text, done, missed = play(built, folder, QUICK_SECONDS if args.quick else SECONDS)
    said = [line.split() for line in text.splitlines()]
    each = [float(words[1]) for words in said if words[0] == "callback_ns"]
    told = {words[0]: float(words[1]) for words in said if words[0] in ("rate", "sampler_core_fraction")}
    truth = nccl.Truth("\n".join(line for line in text.splitlines() if line.startswith(("flow", "op"))), "")
    figures = {
        "callback_median_ns": median(each),
        "callback_p90_ns": float(np.quantile(each, 0.9)),
        "lost_records": lost(truth, np.concatenate(done), missed),
        "callbacks_per_s": told["rate"],
        "sampler_core_fraction": told["sampler_core_fraction"],
    }
    rows = [[key, f"{value:,.4g}", str(TARGETS.get(key, ""))] for key, value in figures.items()]
    print_table(("figure", "value", "at most"), rows)
    records = sum(map(len, done))
    write_report(args.json, figures, {**dict.fromkeys(figures, len(each)), "lost_records": records})


if __name__ == "__main__":
    main()
