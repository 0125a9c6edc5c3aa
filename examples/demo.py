"""The demonstration behind `make demo`: a GPT is trained twice, in peace and through a kill, a hang and an eviction.

Ends with `bit-identical: yes` if both end with the very same parameters; with exit code 0 only if each fault was also
answered as it should be.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
EVERTRAIN = Path(sys.executable).with_name("evertrain")
RUNS = Path(".evertrain/demo")
STEPS = 120
FAULTS = ("kill:rank=0@save=30", "hang:rank=1@step=60", "gpu-lost:node=1@step=90")
NODES = ("--local-nodes=3", "--nnodes=2", "--standby=1", "--nproc-per-node=2")
"""Two nodes with two ranks each, and a third one that stands by."""


def train(job: str, *flags: str) -> tuple[int, str]:
    """Train with four ranks; the exit code and the hash of the final parameters."""
    out = RUNS / f"{job}.sha256"
    out.unlink(missing_ok=True)
    command = [EVERTRAIN, "run", f"--run-dir={RUNS}", f"--job={job}", "--fresh", *flags]
    script = [HERE / "train_gpt.py", f"--steps={STEPS}", "--evaluate-every=60", f"--out={out}"]
    print(f"\n$ evertrain {' '.join(map(str, [*command[1:], *script]))}", flush=True)
    status = subprocess.run([*command, *script]).returncode
    return status, out.read_text().strip() if out.exists() else "none"


def look(command: str, job: str, *flags: str) -> str:
    words = [EVERTRAIN, command, f"--run-dir={RUNS}", f"--job={job}", *flags]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def main() -> int:
    began = time.monotonic()
    shutil.rmtree(RUNS, ignore_errors=True)  # incidents of earlier demonstrations
    RUNS.mkdir(parents=True)
    print("1. Training in peace.")
    peace_status, peace = train("in-peace", "--nproc-per-node=4")
    print("\n2. The same training on two nodes and a spare one: a rank is killed while it saves, another one")
    print("   hangs, and a node loses its GPU and is evicted.")
    faults = [word for fault in FAULTS for word in ("--inject", fault)]
    hurt_status, hurt = train("with-faults", *NODES, *faults)

    print("\n3. What happened, and what it cost:")
    print(look("incidents", "with-faults"))
    print(look("status", "with-faults"))
    incidents = json.loads(look("incidents", "with-faults", "--json"))
    # what was only watched comes beside them: that others wait for the rank that hangs is seen before it counts as one
    done = [incident["action"] for incident in incidents if incident["action"] != "tolerate"]

    as_told = peace_status == hurt_status == 0 and done == ["restart", "restart", "evict"]
    identical = peace == hurt and len(peace) == 64
    print(f"final parameters in peace:    sha256 {peace}")
    print(f"final parameters with faults: sha256 {hurt}")
    print(f"{len(incidents)} incidents, both runs in {time.monotonic() - began:.0f} s")
    print(f"bit-identical: {'yes' if identical else 'no'}")
    if not as_told:
        print(f"but it did not go as it was to: {', '.join(done) or 'nothing'} was done")
    return 0 if identical and as_told else 1


if __name__ == "__main__":
    sys.exit(main())
