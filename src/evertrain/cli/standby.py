"""`evertrain standby`: how many spare nodes are enough? The number for `--standby`, and what it rests on.

The failure rate is given, or learnt from the event logs of the jobs here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evertrain.cli import look, registry
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError
from evertrain.model.words import counted

if TYPE_CHECKING:
    from evertrain.decide.history import History
    from evertrain.decide.sizing import Rate

MOST_NODES = 100_000


def main(argv: Sequence[str]) -> int:
    parser = look.parser(
        "standby", "How many spare nodes are enough? As many as fail within a day, on all but one day in a hundred."
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes that train (default: those of the job)")
    parser.add_argument(
        "--daily-failure-rate", "--daily_failure_rate", type=float, metavar="P",
        help="of one node, as 0.0012 (default: learnt from all jobs of the run dir, or from --job NAME)",
    )  # fmt: skip
    parser.add_argument(
        "--quantile", type=float, default=0.99, metavar="Q", help="share of days on which they suffice (default 0.99)"
    )
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    args = parser.read(argv)
    if args.nodes is not None and not 1 <= args.nodes <= MOST_NODES:
        raise UsageError(f"--nodes {args.nodes}: 1 to {MOST_NODES} nodes")
    if args.daily_failure_rate is not None and not 0 <= args.daily_failure_rate <= 1:
        raise UsageError(f"--daily-failure-rate {args.daily_failure_rate:g}: a share of the nodes, 0 to 1, as 0.0012")
    if not 0 < args.quantile < 1:
        raise UsageError(f"--quantile {args.quantile:g}: between 0 and 1, as 0.99")

    from evertrain.decide import sizing

    root = Path(args.run_dir) if args.run_dir is not None else None
    nodes = args.nodes if args.nodes is not None else _nodes(look.find(args.job, args.run_dir))
    rate = _rate(args.daily_failure_rate, args.job, root)
    number = sizing.standbys(nodes, rate.daily, args.quantile)
    if args.json:
        answer = {
            "standby": number,
            "nodes": nodes,
            "daily_failure_rate": rate.daily,
            "quantile": args.quantile,
            "rate_is_upper_bound": rate.is_bound,
            "rate_because": rate.because,
        }
        print(json.dumps(answer))
        return 0
    spare = f"{counted(number, 'standby node')} for {counted(nodes, 'node')}"
    print(f"{spare}: on {args.quantile:.4g} of all days no more than {number} of them fail (--standby {number})")
    print(f"failures per node and day: {rate.daily:g} ({rate.because})")
    return 0


def _rate(given: float | None, job: str | None, root: Path | None) -> Rate:
    from evertrain.decide import sizing

    if given is not None:
        return sizing.Rate(daily=given, is_bound=False, because="as given")
    history, where = _history(job, root)
    if history.node_days == 0:
        raise TroubleError(
            f"nothing has run yet {where} from which a failure rate could be learnt; give one, as "
            f"--daily-failure-rate {sizing.USUAL_RATE:g} (ByteRobust's machines)"
        )
    rate: Rate = sizing.learnt(history)
    return rate


def _history(job: str | None, root: Path | None) -> tuple[History, str]:
    """What the jobs that are meant have gone through, and where that was looked for."""
    from evertrain.controller.store import read_log
    from evertrain.decide import history

    if job is not None:
        return look.read(registry.find(job, root, os.environ), lambda file: history.of_log(read_log(file))), f"in {job}"
    total = history.History()
    for known in registry.below(root, os.environ):
        # those that are served by another machine are counted there
        if not known.served_by and known.database.exists():
            total += look.read(known, lambda file: history.of_log(read_log(file)))
    return total, f"below {root if root is not None else registry.default_root(os.environ)}"


def _nodes(job: KnownJob) -> int:
    """How many nodes of the job train; of one that has shrunk, how many should."""
    from evertrain.controller.store import read_log
    from evertrain.decide import eviction
    from evertrain.decide.applying import fold

    state = look.read(job, lambda file: fold(read_log(file)))
    if state.run is None:
        raise TroubleError(f"job {job.job} has written nothing down yet; --nodes N says how many nodes there are")
    return eviction.full_size(state)
