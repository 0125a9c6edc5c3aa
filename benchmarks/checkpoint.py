"""What does a checkpoint at every step cost, and how fast is it back?

One rank with 256 MiB and 1 GiB of state (half parameters, half optimizer), then four ranks with 256 MiB each. Times are
told as multiples of a memcpy of the same state, taken in the same minute by the same process; `blocked` is what the
training thread spends in `save()` and in waiting for the copy before the next optimizer step, where forward and
backward take two and a half memcpys, the rank runs on one core and its copier on another.

A single copy and `save()` without a copier are compared with the memcpy in CPU time. A restore may use all cores;
`memory_restore` fills memory that is there, as the memcpy does, `first_restore` gets the optimizer's from the kernel.

Beside it: `torch.save` and PyTorch's `async_save`, both into shared memory, which favours them, the latter also in its
best form (a process, staging beside training in memory that is used again), on both cores; nvidia-resiliency-ext where
it runs on a CPU. Last, a rank's state that comes from another node, against a plain TCP connection (`transfers`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import transfers
from harness import ROOT, clean_environment, interleave, parser, print_table, write_report
from peers import NotInstalled, launcher

RANK = ROOT / "benchmarks/checkpoint_rank.py"
MEMORY = Path("/dev/shm")
LIMIT_S = 420.0
SMALL_MIB, LARGE_MIB = 256, 1024
RANKS = 4

AT_MOST = {"copy_over_memcpy": 1.1, "blocked_over_memcpy": 0.1, "unhidden_blocked_over_memcpy": 1.1}
AT_LEAST = {
    "torch_save_over_blocked": 50.0,
    "dcp_async_over_blocked": 1.0,
    "dcp_best_over_blocked": 1.0,
    "memory_restore_over_memcpy": 0.5,
    "peer_restore_over_raw_socket": 0.5,
}

BESIDE = {
    "copy": "memcpy_cpu",
    "unhidden": "memcpy_cpu",
    "restore": "memcpy_at_restore",
    "first_restore": "memcpy_at_restore",
}
"""Which memcpy a sample is compared with, where it is not the one of its round."""

Seen = Mapping[str, Sequence[float]]


class Failed(Exception):
    """A way of saving that does not run here; the text is its last line on stderr."""


def run(way: str, mib: int, rounds: int, *, ranks: int = 1, cores: str = "", python: Path | None = None) -> list[Seen]:
    """What the ranks saw, each in a process of its own, all at the same time."""
    folder = Path(tempfile.mkdtemp(prefix="evertrain-benchmark-", dir=MEMORY))
    pinned = ["taskset", "-c", cores] if cores else []
    command = [*pinned, str(python or sys.executable), str(RANK), way, str(mib), str(rounds)]
    environment = clean_environment(TORCH_CPP_LOG_LEVEL="ERROR", LOCAL_WORLD_SIZE=str(ranks))
    started = [
        subprocess.Popen(
            [*command, str(folder / str(rank))], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=LIMIT_S) for process in started]
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {LIMIT_S:g} s") from None
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(folder, ignore_errors=True)
    for process, (_, errors) in zip(started, said, strict=True):
        if process.returncode:
            raise Failed((errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1])
    return [json.loads(output.splitlines()[0]) for output, _ in said]


class Samples:
    """All that was seen of one kind of run; each sample beside the memcpy of its process."""

    def __init__(self) -> None:
        self._over: dict[str, list[float]] = defaultdict(list)

    def add(self, seen: Seen) -> None:
        for name, values in seen.items():
            beside = seen[BESIDE.get(name, "memcpy")]
            self._over[name] += [value / copy for value, copy in zip(values, beside, strict=False)]

    def over_memcpy(self, name: str) -> float:
        return median(self._over[name])

    def count(self, name: str) -> int:
        return len(self._over[name])


def our_figures(ours: Samples, suffix: str) -> dict[str, float]:
    elongation = ours.over_memcpy("gradients_beside") - ours.over_memcpy("gradients")
    return {
        f"copy_over_memcpy{suffix}": ours.over_memcpy("copy"),
        f"blocked_over_memcpy{suffix}": ours.over_memcpy("blocked"),
        f"unhidden_blocked_over_memcpy{suffix}": ours.over_memcpy("unhidden"),
        f"step_elongation_over_memcpy{suffix}": elongation + ours.over_memcpy("blocked"),
        f"memory_restore_over_memcpy{suffix}": 1 / ours.over_memcpy("restore"),
        f"first_restore_over_memcpy{suffix}": 1 / ours.over_memcpy("first_restore"),
    }


def one_rank(mib: int, processes: int, rounds: int, suffix: str) -> tuple[dict[str, float], dict[str, int]]:
    """Ours against the others, process by process in turn."""
    ways = {"ours": "0", "torch_save": "0", "dcp": "", "dcp_best": ""}
    samples = {way: Samples() for way in ways}
    for number, way in interleave(tuple(ways), processes):
        (seen,) = run(way, mib, rounds, cores=ways[way])
        samples[way].add(seen)
        blocked = median(seen["blocked"]) * 1000
        print(f"{mib} MiB, run {number + 1}: {way} holds training up for {blocked:.1f} ms", flush=True)
    blocked_by_us = samples["ours"].over_memcpy("blocked")
    figures = our_figures(samples["ours"], suffix)
    for way, name in (("torch_save", "torch_save"), ("dcp", "dcp_async"), ("dcp_best", "dcp_best")):
        figures[f"{name}_over_blocked{suffix}"] = samples[way].over_memcpy("blocked") / blocked_by_us
    return figures, dict.fromkeys(figures, samples["ours"].count("blocked"))


def four_ranks(rounds: int) -> tuple[dict[str, float], dict[str, int]]:
    """All at once; with fewer cores than ranks and copiers they hold each other up, which is part of the figures."""
    samples = Samples()
    for seen in run("ours", SMALL_MIB, rounds, ranks=RANKS):
        samples.add(seen)
    figures = our_figures(samples, "_4_ranks")
    return figures, dict.fromkeys(figures, samples.count("blocked"))


def resiliency_extension(cache: Path, rounds: int, blocked: float) -> tuple[dict[str, float], str]:
    """nvidia-resiliency-ext's asynchronous save, or why there is no figure of it."""
    try:
        python = launcher("ft_launcher", cache).with_name("python")
        (seen,) = run("nvrx", SMALL_MIB, rounds, python=python)
    except (NotInstalled, Failed) as problem:
        return {}, str(problem)
    samples = Samples()
    samples.add(seen)
    return {"nvrx_async_over_blocked_256mib": samples.over_memcpy("blocked") / blocked}, ""


def verdict(name: str, value: float) -> str:
    base = name.removesuffix("_256mib")
    if base in AT_MOST:
        return f"<= {AT_MOST[base]:g} {'met' if value <= AT_MOST[base] else 'MISSED'}"
    if base in AT_LEAST:
        return f">= {AT_LEAST[base]:g} {'met' if value >= AT_LEAST[base] else 'MISSED'}"
    return ""


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache/evertrain/peers", help="where others are installed"
    )
    options = flags.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("two cores are needed: one for the rank, one for its copier")
    processes, rounds = (2, 9) if options.quick else (3, 15)

    figures, counts = one_rank(SMALL_MIB, processes, rounds, "_256mib")
    for more, counted in (one_rank(LARGE_MIB, processes, rounds, ""), four_ranks(rounds)):
        figures |= more
        counts |= counted
    restore = transfers.peer_restore(LARGE_MIB, rounds)
    raw_s = median(restore.plain)
    figures["peer_restore_over_raw_socket"] = raw_s / median(restore.ours)
    figures["peer_restore_whole_over_raw_socket"] = raw_s / median(restore.whole)
    counts |= dict.fromkeys(("peer_restore_over_raw_socket", "peer_restore_whole_over_raw_socket"), rounds)
    extension, reason = resiliency_extension(options.cache, rounds, figures["blocked_over_memcpy_256mib"])
    figures |= extension
    counts |= dict.fromkeys(extension, rounds)

    print()
    print_table(
        ["figure", "value", "target"], [[name, f"{value:.4g}", verdict(name, value)] for name, value in figures.items()]
    )
    if reason:
        print(f"nvidia-resiliency-ext saves nothing here: {reason}")
    write_report(options.json, figures, counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
