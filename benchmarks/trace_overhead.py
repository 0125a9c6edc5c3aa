"""What does it cost to write down every collective?

    hook_us                      what one operation takes longer because it is seen: kernel, page, place in the table,
                                 `wait()`, record
    empty_kernel_us              ... because a kernel in Python hands it on that does nothing else; on a machine that is
    hook_over_empty_kernel       shared with others the two vary together, and their ratio says more
    sampler_core_fraction        CPU time of the agent's tracing thread, of a core and for each rank
    bytes_per_rank_second        written into the rings of one rank and of the agent on its behalf
    iteration_overhead_fraction  hook_us x operations of a step / its time, and sampler_core_fraction
    measured_difference          steps with tracing against steps without, in turn; 95 % interval beside it

`hook_us` comes from pinned loops of a one-rank `all_reduce` (hook_costs.py), hooked and plain in turn. That is the
smallest operation there is: between two ranks of one machine it takes fifty times as long. The rest comes from four
ranks of examples/train_3d.py. Two runs of the very same thing differ by several percent on a shared machine, so
`measured_difference` can only convict when its whole interval lies above the limit.
"""

from __future__ import annotations

import sys

import trace_job
from harness import parser, print_figures, write_report
from overhead import COST_ROUNDS, single_costs_us

TARGETS = {"hook_us": 16.0, "sampler_core_fraction": 0.01, "iteration_overhead_fraction": 0.01}
ROUNDS, WATCH_S, COMPARE_S = 5, 60.0, 40.0
QUICK_ROUNDS, QUICK_WATCH_S, QUICK_COMPARE_S = 2, 30.0, 20.0


def main() -> int:
    options = parser(__doc__).parse_args()
    rounds, watch_s, compare_s = (
        (QUICK_ROUNDS, QUICK_WATCH_S, QUICK_COMPARE_S) if options.quick else (ROUNDS, WATCH_S, COMPARE_S)
    )
    costs = single_costs_us()
    figures = {"hook_us": costs["collective"], "empty_kernel_us": costs["empty_kernel"]}
    figures["hook_over_empty_kernel"] = costs["collective"] / costs["empty_kernel"]
    figures |= trace_job.figures(trace_job.watch(watch_s), figures["hook_us"])
    difference, half = trace_job.difference(rounds, compare_s)
    figures |= {"measured_difference": difference, "measured_difference_half_interval": half}
    print_figures(figures, TARGETS)
    write_report(options.json, figures, {"hook_us": COST_ROUNDS, "measured_difference": rounds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
