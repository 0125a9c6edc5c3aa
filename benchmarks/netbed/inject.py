"""Does to a bed what a plan says, in a process of its own, and writes down what was true; it tells nobody else.

    inject.py BED.json PLAN.json TRUTH.jsonl

A plan is a list of {"fault", "rank", "after_s", "seed"}: so long after the end of the one before.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from netbed.bed import Bed
from netbed.faults import FAULTS, SECONDS


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is being done is undone on the way out
    where, plan, truth = map(Path, sys.argv[1:])
    known = json.loads(where.read_bytes())
    bed = Bed(known["token"], Path(known["folder"]), known["ranks"])
    with truth.open("a", buffering=1) as file:
        for number, one in enumerate(json.loads(plan.read_bytes())):
            time.sleep(one["after_s"])
            with FAULTS[one["fault"]].way(bed, one["rank"], random.Random(one["seed"])) as details:
                began = time.time()
                file.write(json.dumps({"number": number, "fault": one["fault"], "began": began}) + "\n")
                time.sleep(SECONDS)
                ended = time.time()
            whole = {"number": number, "fault": one["fault"], "ranks": [one["rank"]], "began": began, "ended": ended}
            file.write(json.dumps(whole | details) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
