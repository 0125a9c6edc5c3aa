"""`evertrain rollback [JOB] [VERSION]`: a running job goes back to a version of its code that it has run before.

At once, and training goes back with it: to the newest checkpoint that was saved with that version. The command waits
until training is back; Ctrl-C ends the waiting and nothing else.
"""

from __future__ import annotations

import re
import secrets
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from evertrain.cli import changes, client, look
from evertrain.cli.parsing import Parser
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError

Json = dict[str, Any]
DIGITS = 6
"""So many of a digest name a version at least."""


def main(argv: Sequence[str]) -> int:
    args = _parser().read(argv)
    name, version = _meant(args)
    if version is not None:
        _check(version)
    job = _find(name, args)
    if not look.lives(job):
        raise TroubleError(f"job {job.job} does not run; `evertrain run` runs your own files as they are then")
    body = {
        "change": secrets.token_hex(8),
        "kind": "rollback",
        "digest": "",
        "source": "",
        "version": _number(job, version) if version is not None else None,
        "urgent": True,
        "within_s": None,
        "keep_progress": args.keep_progress,
        "reason": args.reason,
        "author": client.author(),
    }
    wish = changes.Wish(job, body, "is not rolled back")
    wish.ask()
    return changes.show(wish, wish.wait(changes.is_back), lambda change: _lines(job, change), as_json=args.json)


def _parser() -> Parser:
    parser = look.parser(
        "rollback",
        "Have a running job go back to a version of its code that it has run before, at once; wait until training is "
        "back. Without VERSION: the newest one before this that has proven itself.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="JOB VERSION",
        help="JOB: the same as --job; VERSION: a number, or the first digits of a digest, as `evertrain versions` "
        "shows them. VERSION without JOB takes --job NAME",
    )  # fmt: skip
    parser.add_argument(
        "--keep-progress", "--keep_progress", action="store_true",
        help="go on from the newest step of all, also where another version has saved it",
    )  # fmt: skip
    parser.add_argument("--reason", default="", metavar="TEXT", help="what it is for; `evertrain versions` shows it")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    return parser


def _meant(args: Namespace) -> tuple[str | None, str | None]:
    """Job and version, as far as they are given."""
    words = list(args.words)
    if args.job is not None and len(words) == 2 and words[0] == args.job:
        words.pop(0)
    if len(words) > (1 if args.job is not None else 2):
        raise UsageError(f"unexpected argument {words[-1]!r} (see `evertrain rollback --help`)")
    if args.job is not None:
        return args.job, words[0] if words else None
    return words[0] if words else None, words[1] if len(words) > 1 else None


def _check(version: str) -> None:
    if version.isascii() and version.isdigit():
        return
    if not re.fullmatch("[0-9a-f]{1,64}", version.lower()):
        raise UsageError(f"{version!r} is neither the number nor the digest of a version (see `evertrain versions`)")
    if len(version) < DIGITS:
        raise UsageError(f"{version}: at least {DIGITS} digits of a digest are needed (see `evertrain versions`)")


def _find(name: str | None, args: Namespace) -> KnownJob:
    try:
        return look.find(name, args.run_dir)
    except TroubleError as error:
        if args.job is None and name is not None and re.fullmatch("[0-9]+|[0-9a-f]{6,64}", name):
            raise UsageError(f"{error}; where a version is meant, the job is, too: --job NAME {name}") from error
        raise


def _number(job: KnownJob, version: str) -> int:
    """Of the version that is named so."""
    if version.isdigit() and len(version) < DIGITS:
        return int(version)
    answers = look.ask(job, "/v1/versions")
    if answers is None:
        raise TroubleError(f"job {job.job}: its controller does not answer; which version is {version}?")
    known = answers[0]["versions"]
    if version.isdigit() and any(one["version"] == int(version) for one in known):
        return int(version)
    # the same code may have run with other arguments
    found = [int(one["version"]) for one in known if one["digest"].startswith(version.lower())]
    if not found:
        raise UsageError(f"job {job.job} has no version {version}; `evertrain versions` lists them")
    if len(found) > 1:
        raise UsageError(f"{version} may be version {' or '.join(map(str, found))} of job {job.job}: give its number")
    return found[0]


def _lines(job: KnownJob, change: Json) -> list[str]:
    return [*changes.runs(job, change), _goes_on(change)]


def _goes_on(change: Json) -> str:
    resume, version, saved_by = change["resume"], change["version"], change["resume_version"]
    if not change["goes_back"]:
        where = "at its beginning" if resume is None else f"from step {resume}"
        return f"training goes on {where}; what other versions have trained is kept"
    if resume is None:
        return f"training goes back to its beginning: there is no checkpoint of version {version}"
    if saved_by is not None and saved_by != version:
        return f"training goes on from step {resume} of version {saved_by}: no checkpoint of version {version} is left"
    return f"training goes back to step {resume}, the newest checkpoint of version {version}"
