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
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from evertrain.cli.parsing import Parser
from evertrain.model.errors import UsageError

if TYPE_CHECKING:
    from evertrain.agent.sensing import Sensor
    from evertrain.model.sensing import Seen, Sign

GROUPS: Mapping[str, tuple[str, ...]] = {
    "host": ("host", "kernel"),
    "gpu": ("gpu", "dcgm"),
    "network": ("network",),
}
OK, WARNING, CRITICAL, UNKNOWN = 0, 1, 2, 3
WORDS = ("OK", "WARNING", "CRITICAL", "UNKNOWN")
_LEAST_PAUSE_S = 0.5
_MOST_NAMED = 3

Json = dict[str, Any]


class Found(NamedTuple):
    """What one sensor has come to."""

    name: str
    status: int
    line: str
    signs: tuple[Sign, ...] = ()
    absent: str = ""
    """Why there is nothing to look at on this machine."""


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


def look(sensors: Sequence[Sensor], seconds: float) -> list[Found]:
    """Have all of them look, again and again, for so long; each in a thread of its own."""
    watched = [_Watched(sensor, time.monotonic() + seconds) for sensor in sensors]
    for one in watched:
        one.start()
    for one in watched:
        one.join(max(0.0, one.latest - time.monotonic()))
    return [one.found() for one in watched]


class _Watched(threading.Thread):
    def __init__(self, sensor: Sensor, until: float) -> None:
        super().__init__(name=f"check {sensor.name}", daemon=True)
        self._sensor = sensor
        self._until = until
        self.latest = until + sensor.limit_s
        """A look that begins at the last moment may take that long."""
        self._seen: list[Seen] = []
        self._trouble = ""

    def run(self) -> None:
        while True:
            try:
                self._seen.append(self._sensor.look(time.monotonic()))
            except Exception as error:
                self._trouble = f"the sensor itself failed: {type(error).__name__}: {error}"
                return
            pause_s = max(_LEAST_PAUSE_S, min(1.0, self._sensor.period_s))
            if self._seen[-1].absent or time.monotonic() + pause_s > self._until:
                return
            time.sleep(pause_s)

    def found(self) -> Found:
        name = self._sensor.name
        seen = list(self._seen)
        signs = {sign.key: sign for one in seen for sign in one.signs}
        last = seen[-1] if seen else None
        if signs:
            from evertrain.detect import readings

            is_fault = any(readings.grade(sign.kind) == "fault" for sign in signs.values())
            lines = [sign.evidence for sign in signs.values()]
            more = f"; and {len(lines) - _MOST_NAMED} more" if len(lines) > _MOST_NAMED else ""
            line = "; ".join(lines[:_MOST_NAMED]) + more
            return Found(name, CRITICAL if is_fault else WARNING, line, tuple(signs.values()))
        if self._trouble:
            return Found(name, UNKNOWN, self._trouble)
        if last is None or self.is_alive():
            return Found(name, UNKNOWN, f"no answer within {self._sensor.limit_s:g} s")
        if last.blind:
            return Found(name, UNKNOWN, f"cannot see: {last.blind}")
        if last.absent:
            return Found(name, OK, f"none here: {last.absent}", absent=last.absent)
        return Found(name, OK, last.last)


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
