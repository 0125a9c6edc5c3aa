"""What does it cost to write down every collective?

    hook_us     what one operation takes longer because it is seen: kernel, page, place in the table, `wait()`, record

From pinned loops of a one-rank `all_reduce` (hook_costs.py), hooked and plain in turn. That is the smallest operation
there is: between two ranks of one machine it takes fifty times as long.
"""

from __future__ import annotations

import sys

from harness import parser, print_table, write_report
from overhead import COST_ROUNDS, single_costs_us

TARGETS = {"hook_us": 16.0}


def main() -> int:
    options = parser(__doc__).parse_args()
    figures = {"hook_us": single_costs_us()["collective"]}
    rows = []
    for name, value in figures.items():
        target = TARGETS.get(name)
        verdict = "" if target is None else f"{target:g} {'met' if value <= target else 'MISSED'}"
        rows.append([name, f"{value:.5g}", verdict])
    print_table(["figure", "value", "target"], rows)
    write_report(options.json, figures, {"hook_us": COST_ROUNDS})
    return 0


if __name__ == "__main__":
    sys.exit(main())
