"""`evertrain diagnose [JOB]`: does this machine, or do the nodes of a job, compute, remember and move data well?

The tests that a job has its stopped nodes run, here and now and without a job: they use the machine, so nothing else
should train on it meanwhile. With a job that has ended, as its nodes were tested: with as many ranks, and compared with
the bits that they agreed on. With one that lives and waits, or with nodes of it that have no ranks (`--nodes`), there,
all at the same time (`cli.examine`). The exit code is that of `evertrain check`: 0 all well; 1 something is odd; 2
something is broken for certain; 3 nothing could be tested, or the command line was wrong.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evertrain.agent.inspection import CRITICAL, OK, UNKNOWN, WARNING
from evertrain.cli import durations, readings
from evertrain.cli.check import WORDS
from evertrain.cli.parsing import Parser
from evertrain.cli.registry import KnownJob
from evertrain.model.diagnosis import Inspected, InspectOrder, Run, Setting, StageAsked, Symptom
from evertrain.model.errors import TroubleError, UsageError

SUITES: dict[str, Symptom] = {
    "crash": "crash", "nan": "nan", "nccl": "nccl", "illegal-access": "illegal_access", "slow": "slow",
}  # fmt: skip
_LOG = f"evertrain-diagnose-{os.getuid()}.log"

Json = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    try:
        args = _parser().read(argv)
        budget_s = durations.of_flag("--budget", args.budget, at_once="no test at all")
        if (job := _live_job(args)) is not None:
            from evertrain.cli import examine

            checks = examine.run(job, args.nodes, SUITES[args.suite or "crash"], budget_s, quiet=args.json)
            return report(checks, {}, as_json=args.json)
        ranks, golden, symptom = _given(args)
        from evertrain.cli import plan

        python = plan.interpreter(args.python, os.environ)
    except (UsageError, TroubleError) as error:
        # 1 and 2 would say something about this machine
        print(f"evertrain: {error}", file=sys.stderr)
        return UNKNOWN
    if ranks is None:
        from evertrain.cli import sizes

        ranks = sizes.count_gpus(os.environ) or 1
    checks = asyncio.run(_run(python, ranks, symptom, golden, budget_s, quiet=args.json))
    return report(checks, {"ranks": ranks}, as_json=args.json)


def report(checks: Sequence[Json], about: Json, *, as_json: bool) -> int:
    """Print what the tests have come to; the exit code."""
    status = worst(checks)
    if as_json:
        print(json.dumps({"status": WORDS[status].lower(), **about, "checks": checks}))
        return status
    from evertrain.cli import tables

    if (numbers := readings.table(checks)) is not None:
        tables.console().print(numbers)
    print(f"{WORDS[status]} - {_in_short(status, checks)}")
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="evertrain diagnose",
        description="Does this machine compute, remember and move data as it should? Tests that use it: nothing else "
        "should train here meanwhile. Exit code 0: yes; 1: something is odd; 2: broken; 3: unknown.",
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="one that has ended: this machine, as its nodes were tested; one that waits: all of its nodes",
    )
    parser.add_argument(
        "--nodes",
        type=_names,
        default=(),
        metavar="NODE,…",
        help="these nodes of a live job (default: the newest here); those without ranks also while it trains",
    )
    parser.add_argument(
        "--run-dir", "--run_dir", metavar="DIR", help="where its folder lies, if not in the usual place"
    )
    parser.add_argument(
        "--suite",
        choices=tuple(SUITES),
        help="which tests, by what was seen (default: crash; all but transfers, disks)",
    )
    parser.add_argument("--budget", default="10m", metavar="TIME", help="for all tests together (default 10m)")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes that take part (default: one a GPU, else 1)")
    parser.add_argument("--python", metavar="FILE", help="interpreter with torch (default: the active environment's)")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else, with every number")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _live_job(args: Any) -> KnownJob | None:
    """The job whose agents are to test; None: it is this machine that is tested."""
    if args.job is None and not args.nodes:
        return None
    from evertrain.cli import look

    job = look.find(args.job, args.run_dir)
    if look.lives(job):
        if args.ranks is not None or args.python is not None:
            raise UsageError("--ranks and --python are for this machine; the nodes of a live job have their own")
        return job
    if args.nodes:
        raise TroubleError(f"job {job.job} does not run, so nobody reaches its nodes; on each: `evertrain diagnose`")
    return None


def _given(args: Any) -> tuple[int | None, Mapping[Setting, Run], Symptom]:
    """Ranks, bits to compare with, and which suite."""
    if args.ranks is not None and not 1 <= args.ranks <= 64:
        raise UsageError(f"--ranks {args.ranks}: from 1 to 64")
    symptom: Symptom | None = SUITES[args.suite] if args.suite else None
    if args.job is None:
        return args.ranks, {}, symptom or "crash"
    from evertrain.cli import look
    from evertrain.controller.store import read_log
    from evertrain.decide import inspection
    from evertrain.decide.applying import fold

    job = look.find(args.job, args.run_dir)
    if job.served_by or not job.database.exists():
        raise TroubleError(f"the log of job {job.job} is not on this machine; without a job: `evertrain diagnose`")
    state = fold(read_log(job.database))
    if symptom is None and state.incidents:
        opened = state.incidents[max(state.incidents)].opened
        symptom = inspection.symptom_of(opened.category, opened.cause)
    return args.ranks or (state.run.nproc_per_node if state.run is not None else None), state.golden, symptom or "crash"


async def _run(
    python: str, ranks: int, symptom: Symptom, golden: Mapping[Setting, Run], budget_s: float, *, quiet: bool
) -> list[Json]:
    """Every test of the suite that a machine can do alone, until one accuses it."""
    from evertrain.agent.diagnosing import Server, Trouble
    from evertrain.decide import inspection

    node, deadline = os.uname().nodename, time.monotonic() + budget_s
    checks: list[Json] = []
    server: Server | None = None
    with tempfile.TemporaryDirectory(prefix="evertrain-diagnose-") as folder:
        try:
            tests = [test for test in inspection.SUITES[symptom] if not test.pairs]
            for number, test in enumerate(tests, 1):
                left_s = deadline - time.monotonic()
                if left_s < inspection.LEAST_S:
                    break
                order = InspectOrder(
                    number=number, ranks=ranks, program=test.program, budget_s=min(test.budget_s, left_s)
                )
                began = time.monotonic()
                try:
                    if server is None:
                        given = {"node": node, "ranks": ranks, "folder": folder}
                        server = await Server.start(python, given, Path(tempfile.gettempdir()) / _LOG)
                    found = await server.test(order)
                except Trouble as error:
                    found = Inspected(
                        number=number, outcome="late" if server is not None else "absent", because=str(error)
                    )
                    if server is not None:
                        await server.close()
                        server = None
                checks.append(check(node, symptom, test.name, order, found, golden, time.monotonic() - began))
                if not quiet:
                    print("\n".join(readings.lines(checks[-1:])), flush=True)
                if checks[-1]["accused"] or (server is None and found.outcome == "absent"):
                    break
        finally:
            if server is not None:
                await server.close()
    return checks


def check(
    node: str,
    symptom: Symptom,
    name: str,
    order: InspectOrder,
    found: Inspected,
    golden: Mapping[Setting, Run],
    seconds: float,
) -> Json:
    """What a test has come to, as incidents show it."""
    import msgspec

    from evertrain.decide import inspected, inspection

    asked = StageAsked(
        time=0.0, stage=order.number, incident=0, symptom=symptom, name=name, program=order.program,
        parameters=order.parameters, budget_s=order.budget_s, nodes=(node,), groups=((node,),),
    )  # fmt: skip
    judged = inspected.alone(asked, {node: found}, {}, golden)
    return {
        "name": name,
        "again": False,
        "groups": [[node]],
        "seconds": round(seconds, 3),
        "accused": dict(judged.accused),
        "notes": list(judged.notes),
        "results": {node: msgspec.to_builtins(inspection.kept(found))},
    }


def worst(checks: Sequence[Json]) -> int:
    """As the exit code says it. What there is not here is well."""
    outcomes = [result["outcome"] for one in checks for result in one["results"].values()]
    if any(one["accused"] for one in checks):
        return CRITICAL
    if any(outcome in ("late", "crashed") for outcome in outcomes):
        return WARNING
    return OK if "passed" in outcomes else UNKNOWN


def _in_short(status: int, checks: Sequence[Json]) -> str:
    if status == CRITICAL:
        return "; ".join(line for one in checks for line in one["accused"].values())
    if status == OK:
        passed = [one["name"] for one in checks if any(r["outcome"] == "passed" for r in one["results"].values())]
        return f"{', '.join(passed)}: passed"
    return "; ".join(note for one in checks for note in one["notes"]) or "there was no time for a test"
