"""What is a warm standby worth? Seconds from the word that a node is broken to the first new step, with and without.

With a standby the node is evicted, the standby takes over its ranks and training goes on; everybody else stays. Without
one, the usual way is to stop the whole command and to start it anew (on other nodes; a queue in front of that is not
counted here): `requeue` sends SIGTERM and calls the same command again, which resumes from the step that went to disk.
Four nodes with a rank each, the toy of the other benchmarks, in turn. Both count to the moment at which the slowest
rank has finished the first step that is higher than any rank had reached before.
"""

from __future__ import annotations

import sys

from harness import NotMeasured, parser
from lab import Lab, compare, report

NODES, STANDBY = 4, 1
FAULT_STEP = 25
STEPS = 45
TARGET = 10.0


def until_standby_trains(fault: str, **size: int) -> float:
    """Seconds from a fault of a node, as the incident dates it, until its standby's ranks do the first new step."""
    lab = Lab(fault, **{"nodes": NODES, "standby": STANDBY, **size}, steps=STEPS)
    lab.run("--inject", f"{fault}:node=1@step={FAULT_STEP}")
    incidents = lab.incidents()
    if [one["action"] for one in incidents] != ["evict"]:
        raise NotMeasured(f"no single eviction but {[one['action'] for one in incidents]}; see {lab.folder}")
    seconds = lab.first_new_step(incidents[0]["time"]) - float(incidents[0]["time"])
    lab.close()
    return seconds


def requeue() -> float:
    """Seconds from the order to stop until the same command, called again, does the first new step."""
    lab = Lab("requeue", NODES, 0, steps=STEPS)
    asked = lab.stop_at(FAULT_STEP)
    lab.run()
    seconds = lab.first_new_step(asked) - asked
    lab.close()
    return seconds


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument("--runs", type=int, default=7, help="runs of each")
    options = flags.parse_args()
    ways = {"standby": lambda: until_standby_trains("gpu-lost"), "requeue": requeue}
    seconds, failed = compare(ways, min(options.runs, 3) if options.quick else options.runs)
    report(seconds, "standby", TARGET, "to the first new step, s", options.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
