"""`evertrain restart`: end a job's ranks and let them go on, when and where the user wants it.

At the newest step, at an earlier one, with other arguments or environment, or to see whether the last steps come out
the same again. The command waits until training is back; Ctrl-C ends the waiting and nothing else.
"""

from __future__ import annotations

import argparse
import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from evertrain.cli import client, look, narrate
from evertrain.cli.parsing import Parser
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError

Json = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    args = _parser().read(argv)
    wish = {
        "restart": secrets.token_hex(8),
        "from_step": args.from_step,
        "verify": args.verify,
        "args": args.args,
        "env": _environment(args.env),
    }
    job = look.find(args.job or args.name, args.run_dir)
    if not look.lives(job):
        raise TroubleError(f"job {job.job} does not run; `evertrain run` resumes it")
    _ask(job, wish)
    done = _wait(job, wish)
    print(json.dumps(done) if args.json else "\n".join(_lines(job, done)))
    return 0 if done["verify"] is None or _is_same(done["verified"]) else 1


def _parser() -> Parser:
    parser = look.parser("restart", "End the ranks of a running job and let them go on; wait until training is back.")
    parser.add_argument("name", nargs="?", metavar="JOB", help="the same as --job")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--from-step", "--from_step", type=int, metavar="N", help="at this step (default: the newest)")
    where.add_argument(
        "--verify", type=int, metavar="K", help="repeat the last K steps and compare their losses bit by bit"
    )
    parser.add_argument(
        "--env", action="append", default=[], metavar="K=V",
        help="add to the environment of the ranks, until the job is run again by its command line (repeatable)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    parser.add_argument(
        "--args", nargs=argparse.REMAINDER, metavar="…",
        help="the script's arguments, until the job is run again by its command line; has to come last",
    )  # fmt: skip
    return parser


def _environment(given: Sequence[str]) -> dict[str, str]:
    from evertrain.agent import environment

    added = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not equals:
            raise UsageError(f"--env {word}: NAME=VALUE is needed")
        if reason := environment.why_not(name):
            raise UsageError(f"--env {word}: {reason}")
        added[name] = value
    return added


def _ask(job: KnownJob, wish: Json) -> None:
    look.tell(job, "/v1/restart", wish, "is not restarted")


def _wait(job: KnownJob, wish: Json) -> Json:
    """Until training is back, and what was to be verified is."""
    heard = time.monotonic()
    while True:
        lives = look.lives(job)  # asked first: what the last process wrote is read below
        seen: Json | None = None
        try:
            seen = client.of_run_dir(job.run_dir).get(f"/v1/restart/{wish['restart']}")
            heard = time.monotonic()
        except client.Refused:
            # the controller that was asked died before it had written anything down
            _ask(job, wish)
        except client.Unreachable:
            if not lives:
                seen = _from_log(job, wish["restart"])
        if seen is not None and seen["back"] and (seen["verify"] is None or seen["verified"] is not None):
            return seen
        if not lives or (seen is not None and seen["ended"] is not None):
            why = seen["ended"] if seen is not None and seen["ended"] is not None else "nothing of it lives any more"
            raise TroubleError(f"job {job.job} ended before the restart was done: {why}")
        if time.monotonic() - heard > look.CONTROLLER_AWAY_S:
            raise TroubleError(
                f"job {job.job}: its controller has not answered for {look.CONTROLLER_AWAY_S:.0f} s; "
                "the restart may go on without this command, see `evertrain status`"
            )
        time.sleep(look.POLL_S)


def _from_log(job: KnownJob, name: str) -> Json | None:
    from evertrain.controller import views

    return look.read(job, lambda database: views.restart_of(database, name))


def _is_same(verified: Json) -> bool:
    return not verified["problem"] and verified["difference"] is None


def _lines(job: KnownJob, done: Json) -> list[str]:
    attempt, resume, asked = done["attempt"], done["resume"], done["from_step"]
    how = f"attempt {attempt} began anew" if resume is None else f"attempt {attempt} resumed from step {resume}"
    took = f" in {done['seconds']:.1f} s" if done["seconds"] is not None else "; its steps cannot be seen yet"
    lines = [f"job {job.job} restarted: {how}{took}"]
    if asked is not None and resume != asked:
        below = "the newest common one below it" if resume is not None and resume < asked else "the oldest there was"
        lines.append(f"step {asked} was overwritten before the ranks had ended; step {resume} is {below}")
    if done["args"] is not None or done["env"]:
        lines.append("arguments and environment stay as they are now until the job is run again by its command line")
    if done["verified"] is not None:
        lines.append(narrate.verified(done["verified"]))
    return lines
