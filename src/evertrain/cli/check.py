"""`evertrain check [host|gpu|network|all]`: is this machine fit to train on? For people and schedulers, without a job.

The sensors of the agent look for a few seconds, in threads of their own; what hangs is left behind. The exit code is
that of monitoring plug-ins, so it can be a Slurm prolog, epilog or HealthCheckProgram as it is: 0 all well; 1 something
is odd; 2 something is broken for certain; 3 nothing could be seen, or the command line was wrong. What this machine has
none of is well as part of all; whoever names it wants to know how it is, and that nobody can say.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from evertrain.agent.inspection import CRITICAL, GROUPS, OK, UNKNOWN, WARNING, Found, look
from evertrain.cli.parsing import Parser
from evertrain.model.errors import UsageError

WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")

Json = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    try:
        args = _parser().read(argv)
        if not 0 < args.seconds <= 600:
            raise UsageError(f"--seconds {args.seconds:g}: more than 0, 600 at most")
    except UsageError as error:
        # 2 would say that this machine is broken
        print(f"evertrain: {error}", file=sys.stderr)
        return UNKNOWN
    from evertrain.agent import sensing

    wanted = [name for group, names in GROUPS.items() if args.what in (group, "all") for name in names]
    sensors = [sensor for sensor in sensing.sensors_here(os.getcwd()) if sensor.name in wanted]
    found = look(sensors, args.seconds)
    if args.what != "all":
        found = as_named(found)
    status = worst(found)
    if args.json:
        print(json.dumps(_as_json(status, found)))
    else:
        print("\n".join(_lines(args.what, status, found)))
    return status


def _parser() -> Parser:
    parser = Parser(
        prog="evertrain check",
        description="Is this machine fit to train on? Exit code 0: yes; 1: something is odd; 2: broken; 3: unknown.",
    )
    parser.add_argument("what", nargs="?", choices=(*GROUPS, "all"), default="all", help="what is looked at (all)")
    parser.add_argument(
        "--seconds", type=float, default=3.0, metavar="S",
        help="look for so long (default 3): counters and temperatures are odd only when they stay so",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    return parser


def as_named(found: Sequence[Found]) -> list[Found]:
    """Of one group that was asked for: a machine that has nothing of that kind is not a machine where it is well."""
    if not all(one.absent for one in found):
        return list(found)
    return [one._replace(status=UNKNOWN, line=f"nothing of that kind here: {one.absent}") for one in found]


def worst(found: Sequence[Found]) -> int:
    """What is broken outweighs what is odd, and both what could not be seen."""
    statuses = {one.status for one in found}
    return next((status for status in (CRITICAL, WARNING, UNKNOWN) if status in statuses), OK if found else UNKNOWN)


def _lines(what: str, status: int, found: Sequence[Found]) -> list[str]:
    """The first line is all that a monitoring system shows."""
    telling = [one for one in found if one.status == status] if status != OK else found
    first = f"{WORDS[status]} - {what}: " + "; ".join(f"{one.name}: {one.line}" for one in telling)
    return [first, *(f"{one.name}: {WORDS[one.status]}: {one.line}" for one in found)]


def _as_json(status: int, found: Sequence[Found]) -> Json:
    return {
        "status": WORDS[status].lower(),
        "checks": [
            {
                "name": one.name,
                "status": WORDS[one.status].lower(),
                "line": one.line,
                "signs": [{"kind": sign.kind, "device": sign.device, "evidence": sign.evidence} for sign in one.signs],
            }
            for one in found
        ],
    }
