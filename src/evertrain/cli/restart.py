"""`evertrain restart`: end a job's ranks and let them go on, when and where the user wants it.

At the newest step, at an earlier one, with other arguments or environment, or to see whether the last steps come out
the same again. The command waits until training is back; Ctrl-C ends the waiting and nothing else.
"""

from __future__ import annotations

import argparse
import json
import secrets
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from evertrain.cli import changes, client, code, look, narrate, waiting
from evertrain.cli.parsing import Parser
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError

VAIN = "is not restarted"

Json = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    args = _parser().read(argv)
    wish = {
        "restart": secrets.token_hex(8),
        "from_step": args.from_step,
        "verify": args.verify,
        "args": args.args,
        "env": _environment(args.env),
        "digest": "",
        "source": "",
        "reason": args.reason,
        "author": client.author(),
    }
    if args.code is not None:
        code.folder(args.code)
    job = look.find(args.job or args.name, args.run_dir)
    if not look.lives(job):
        raise TroubleError(f"job {job.job} does not run; `evertrain run` resumes it")
    with changes.captured(job, args.code) if args.code is not None else nullcontext() as found:
        if found is not None:
            wish |= {"digest": found.code.digest, "source": str(found.source)}
        _ask(job, wish, found)
        done = _wait(job, wish, found)
    print(json.dumps(done) if args.json else "\n".join(_lines(job, done, found)))
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
    parser.add_argument("--code", metavar="DIR", help="with the code that this folder holds, as `evertrain update`")
    parser.add_argument("--reason", default="", metavar="TEXT", help="what it is for; `evertrain versions` shows it")
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


def _ask(job: KnownJob, wish: Json, found: changes.Captured | None) -> None:
    if found is not None:
        changes.upload(job, found, VAIN)
    look.tell(job, "/v1/restart", wish, VAIN, code=_is_change(wish))


def _is_change(wish: Json) -> bool:
    """Whether ranks will run something else than now."""
    return bool(wish["digest"] or wish["env"]) or wish["args"] is not None


def _wait(job: KnownJob, wish: Json, found: changes.Captured | None) -> Json:
    """Until training is back, and what was to be verified is; raises where it has gone back to what ran before.

    A restart takes an update along that waits for one, so what comes may be another's change.
    """
    name = str(wish["restart"])

    def over(seen: Json) -> bool:
        brings = seen["brings"]
        is_back = seen["back"] and (seen["verify"] is None or seen["verified"] is not None)
        if brings is None and not _is_change(wish):
            return bool(is_back)
        change = changes.seen(job, brings or name)
        if change is None:  # not known, or there was nothing to change
            return bool(is_back and (brings is None or not look.lives(job)))
        if change["outcome"] in changes.FAILED:
            raise TroubleError(changes.failure(job, change, VAIN))
        return bool(is_back and _stays(change, seen["attempt"]))

    return waiting.until(
        job,
        f"/v1/restart/{name}",
        over=over,
        again=lambda: _ask(job, wish, found),
        from_log=lambda database: _from_log(database, name),
        what="restart",
    )


def _stays(change: Json, attempt: int) -> bool:
    """Whether ranks have done a step with it, or training is back with it in a later attempt than its first."""
    return changes.is_back(change) or (change["attempt"] is not None and attempt > change["attempt"])


def _from_log(database: Path, name: str) -> Json | None:
    from evertrain.controller import views

    return views.restart_of(database, name)


def _is_same(verified: Json) -> bool:
    return not verified["problem"] and verified["difference"] is None


def _lines(job: KnownJob, done: Json, found: changes.Captured | None) -> list[str]:
    attempt, resume, asked = done["attempt"], done["resume"], done["from_step"]
    how = f"attempt {attempt} began anew" if resume is None else f"attempt {attempt} resumed from step {resume}"
    took = f" in {done['seconds']:.1f} s" if done["seconds"] is not None else "; its steps cannot be seen yet"
    lines = [f"job {job.job} restarted: {how}{took}"]
    if asked is not None and resume != asked:
        below = "the newest common one below it" if resume is not None and resume < asked else "the oldest there was"
        lines.append(f"step {asked} was overwritten before the ranks had ended; step {resume} is {below}")
    stay = "arguments and environment stay as they are now until the job is run again by its command line"
    if found is not None:
        lines.append(f"code, {stay}: then your own files run in place")
    elif done["args"] is not None or done["env"]:
        lines.append(stay)
    if done["verified"] is not None:
        lines.append(narrate.verified(done["verified"]))
    return lines
