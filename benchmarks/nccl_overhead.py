"""What does the plugin cost NCCL? For machines with at least two GPUs: `python benchmarks/nccl_overhead.py`.

The same all_reduces on all GPUs of this machine with the plugin and without, in turns: over NVLink or PCIe as NCCL
chooses, and with sockets between the ranks (`NCCL_P2P_DISABLE`, `NCCL_SHM_DISABLE`), where its proxies work and every
chunk has callbacks. `overhead_BYTES_WAY` is what an all_reduce takes longer, as a part of what it takes without; the
smaller of zero and noise shows in `noise_…`, the same between two halves of the runs without.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from evertrain.trace import plugin
from harness import BIN, clean_environment, interleave, parser, print_table, run_to_end, write_report

HERE = Path(__file__).resolve().parent
SIZES = (8, 128 << 10, 1 << 20, 64 << 20)
WAYS = {"direct": {}, "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}}
ROUNDS, QUICK_ROUNDS = 8, 4
LIMIT_S = 180.0
FEWEST_FILE_BYTES = 4096


def gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in said.stdout.splitlines())


def measure(folder: Path, count: int, way: str, library: Path | None) -> tuple[dict[int, float], str]:
    """Microseconds by size, and NCCL's version."""
    folder.mkdir()
    given = {"NCCL_PROFILER_PLUGIN": str(library), "EVERTRAIN_TRACE_RING": str(folder / "r")} if library else {}
    environment = clean_environment(**WAYS[way], **given)
    command = [BIN / "torchrun", "--standalone", f"--nproc-per-node={count}", HERE / "nccl_rank.py"]
    if run_to_end([*command, ",".join(map(str, SIZES))], environment, folder / "log", limit_s=LIMIT_S) != 0:
        raise SystemExit(f"the ranks have failed:\n{(folder / 'log').read_text()[-2000:]}")
    if library and len([one for one in folder.glob("*.ring") if one.stat().st_size > FEWEST_FILE_BYTES]) != count:
        raise SystemExit("NCCL has not loaded the plugin; NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT says why")
    told = json.loads(next(line for line in (folder / "log").read_text().splitlines() if line.startswith('{"us"')))
    return {int(size): us for size, us in told["us"].items()}, told["nccl"]


def main() -> int:
    args = parser(__doc__).parse_args()
    count = gpus()
    if count < 2:
        print(f"needs at least two NVIDIA GPUs, a torch for CUDA and a C compiler; this machine has {count} GPUs")
        return 1
    figures: dict[str, float] = {}
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="evertrain-nccl-") as name:
        folder = Path(name)
        library = plugin.find(folder)
        version = ""
        for way in WAYS:
            seen: dict[tuple[bool, int], list[float]] = {}
            for number, traced in interleave((False, True), rounds):
                here = folder / f"{way}-{number}-{traced}"
                found, version = measure(here, count, way, library if traced else None)
                shutil.rmtree(here)
                for size, us in found.items():
                    seen.setdefault((traced, size), []).append(us)
            for size in SIZES:
                plain, traced_us = seen[False, size], seen[True, size]
                figures[f"overhead_{size}_{way}"] = median(traced_us) / median(plain) - 1
                figures[f"noise_{size}_{way}"] = abs(median(plain[::2]) / median(plain[1::2]) - 1)
                figures[f"us_{size}_{way}"] = median(plain)
                rows.append(
                    [f"{size:,}", way, f"{median(plain):.1f}", f"{figures[f'overhead_{size}_{way}']:+.2%}",
                     f"{figures[f'noise_{size}_{way}']:.2%}"]
                )  # fmt: skip
    print_table(("bytes", "way", "us without", "with", "noise"), rows)
    write_report(args.json, figures, dict.fromkeys(figures, rounds), {"nccl": version})
    return 0


if __name__ == "__main__":
    sys.exit(main())
