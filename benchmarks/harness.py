"""What all benchmarks share: their flags, runs with a deadline, medians, the table and the JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
END_LIMIT_S = 15.0

Tool = TypeVar("Tool")


class NotMeasured(Exception):
    """A job that did not do what was to be measured."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark takes."""
    flags = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    flags.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    flags.add_argument("--quick", action="store_true", help="fewer runs: at most 8 minutes")
    return flags


def interleave(tools: Sequence[Tool], rounds: int) -> Iterator[tuple[int, Tool]]:
    """Each tool once, then each again: what disturbs the machine for a minute disturbs all of them."""
    for round_number in range(rounds):
        # a different one begins each time, so that none always follows the same neighbour
        shift = round_number % len(tools)
        for tool in (*tools[shift:], *tools[:shift]):
            yield round_number, tool


def run_to_end(
    command: Sequence[str | Path], environment: Mapping[str, str], log: Path, *, limit_s: float
) -> int | None:
    """Run a command in a session of its own; its exit code, or None where it had to be ended at the limit."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without what an outer launcher or Python set; one OpenMP thread a rank, as launchers do."""
    dropped = ("PYTHON", "OMP_", "PET_", "TORCHELASTIC_", "EVERTRAIN_", "TOY_", "MASTER_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: median(values) for name, values in samples.items() if values}


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_figures(figures: Mapping[str, float], at_most: Mapping[str, float]) -> None:
    """All figures, and whether those that have a target are within it."""
    rows = []
    for name, value in figures.items():
        target = at_most.get(name)
        verdict = "" if target is None else f"{target:g} {'met' if value <= target else 'MISSED'}"
        rows.append([name, f"{value:.5g}", verdict])
    print_table(["figure", "value", "target"], rows)


def write_report(
    file: Path | None, figures: Mapping[str, float], samples: Mapping[str, int], more_versions: Mapping[str, str] = {}
) -> None:
    """The figures as JSON, with all that somebody needs who wants to measure them again."""
    if file is None:
        return
    report = {
        "figures": {name: round(value, 6) for name, value in figures.items()},
        "n": dict(samples),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **versions("evertrain", "torch", "numpy"), **more_versions},
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    file.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwritten to {file}")


def machine() -> str:
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {os.cpu_count()} cores, {gigabytes:.0f} GiB, Linux {platform.release()}"


def versions(*packages: str) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
