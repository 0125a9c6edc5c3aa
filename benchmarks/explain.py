"""How fast is an explanation? `evertrain explain` on mixed logs of 256 ranks with one failure and its followers.

    python benchmarks/explain.py [--quick] [--json FILE]

The logs are what such a job writes: progress of each rank, NCCL's and the launcher's information, warnings, and in the
end one memory error, after which every other rank fails with a traceback of its own. Measured are wall time and the
largest memory of the command, start included, in a process of its own.
"""

from __future__ import annotations

import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

from harness import BIN, clean_environment, medians, parser, print_table, write_report

RANKS = 256
CULPRIT = 77
CULPRIT_HOST = f"node-{CULPRIT // 8:02d}"
NORMAL = """\
[rank{rank}]: 2026-03-01 10:{m:02d}:{s:02d},{ms:03d} | INFO | trainer | iteration {i}/500000 | elapsed time per \
iteration (s): 10.5 | lm loss: 2.11E+00 | grad norm: 0.14 | skipped iterations: 0 |
node-{host:02d}:{pid}:{pid} [{gpu}] NCCL INFO Channel {ch:02d}/0 : {rank}[{gpu}] -> {peer}[0] [send] via NET/IB/3
[rank{rank}]: batch {i} loaded in {ms} ms, 4096 tokens, queue 7/8
node-{host:02d}: 2026-03-01 10:{m:02d}:{s:02d} DEBUG checkpoint manager: shard {rank} of step {i} written, {ms} MiB
[rank{rank}]:[W301 10:{m:02d}:{s:02d}.000000 ProcessGroupNCCL.cpp:4115] Warning: using GPU {gpu} to perform barrier\
""".splitlines()
WEIGHTS = (60, 15, 15, 9, 1)
FOLLOWER = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 81, in wrapper
[rank{rank}]:     return func(*args, **kwargs)
[rank{rank}]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited or there was \
a network error
[rank{rank}]: Last error:
[rank{rank}]: socketProgressOpt: Call to recv from 10.0.0.{host}<33759> failed : Connection reset by peer
"""


def write_log(path: Path, size: int) -> None:
    """Lines of all ranks mixed, one cause, 255 followers."""
    chance = random.Random(7)
    written = 0
    with path.open("w") as out:
        number = 0
        while written < size:
            number += 1
            rank = chance.randrange(RANKS)
            line = chance.choices(NORMAL, WEIGHTS)[0].format(
                rank=rank, host=rank // 8, gpu=rank % 8, pid=3000 + rank, ch=number % 24, peer=(rank + 8) % RANKS,
                i=number // RANKS, m=number // 60000 % 60, s=number // 1000 % 60, ms=number % 1000,
            )  # fmt: skip
            written += out.write(line + "\n")
        out.write(f"{CULPRIT_HOST}: [rank{CULPRIT}]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
        for rank in range(RANKS):
            if rank != CULPRIT:
                out.write(FOLLOWER.format(rank=rank, host=rank // 8))


def measure(path: Path) -> tuple[float, float]:
    """Seconds, and MiB at the largest, of one run; the verdict must be right."""
    began = time.monotonic()
    process = subprocess.Popen(
        [BIN / "evertrain", "explain", path, "--json"], stdout=subprocess.PIPE, env=clean_environment()
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - began
    if process.returncode or CULPRIT_HOST not in output.decode():
        raise SystemExit(f"the verdict is wrong: {output[:500]!r}")
    return seconds, used.ru_maxrss / 1024


def main() -> None:
    flags = parser(__doc__).parse_args()
    size_mb, runs = (20, 2) if flags.quick else (100, 5)
    samples: dict[str, list[float]] = {"explain_s": [], "explain_peak_mib": [], "explain_mb_per_s": []}
    with tempfile.TemporaryDirectory(prefix="evertrain-explain-") as folder:
        path = Path(folder, "job.log")
        write_log(path, size_mb * 1_000_000)
        for _ in range(runs):
            seconds, peak_mib = measure(path)
            samples["explain_s"].append(seconds)
            samples["explain_peak_mib"].append(peak_mib)
            samples["explain_mb_per_s"].append(size_mb / seconds)
    found = medians(samples)
    print_table(("figure", f"{size_mb} MB"), [(name, f"{value:.2f}") for name, value in found.items()])
    write_report(flags.json, found, {name: len(values) for name, values in samples.items()})


if __name__ == "__main__":
    main()
