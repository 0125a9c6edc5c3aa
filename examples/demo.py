"""The demonstration behind `make demo`: a GPT is trained twice, once in peace, once with two ranks killed on the way.

Ends with `bit-identical: yes` and exit code 0 only if both end with the very same parameters.
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
KILLS = ("kill:rank=2@step=40", "kill:rank=0@save=80")


def train(job: str, *flags: str) -> tuple[int, str]:
    """Train with 4 ranks; the exit code and the hash of the final parameters."""
    out = RUNS / f"{job}.sha256"
    out.unlink(missing_ok=True)
    command = [EVERTRAIN, "run", "--nproc-per-node=4", f"--run-dir={RUNS}", f"--job={job}", "--fresh", *flags]
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
    peace_status, peace = train("in-peace")
    print("\n2. The same training; one rank is killed in the middle of a step, another while it saves.")
    kills = [word for kill in KILLS for word in ("--inject", kill)]
    killed_status, killed = train("with-kills", *kills)

    print("\n3. What happened, and what it cost:")
    print(look("incidents", "with-kills"))
    print(look("status", "with-kills"))
    incidents = json.loads(look("incidents", "with-kills", "--json"))
    ranks_killed = [incident["ranks"] for incident in incidents]

    identical = (
        peace_status == killed_status == 0 and ranks_killed == [[2], [0]] and peace == killed and len(peace) == 64
    )
    print(f"final parameters in peace:   sha256 {peace}")
    print(f"final parameters with kills: sha256 {killed}")
    print(f"{len(incidents)} incidents, both runs in {time.monotonic() - began:.0f} s")
    print(f"bit-identical: {'yes' if identical else 'no'}")
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
