"""`evertrain update --code DIR`: a running job gets other code, with its next restart or at once.

Not urgent, the command ends when it is known what comes and when. Urgent, it waits until training is back with the new
code; Ctrl-C ends the waiting and nothing else.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from evertrain.cli import changes, client, code, durations, look
from evertrain.cli.parsing import Parser
from evertrain.model.errors import TroubleError, UsageError


def main(argv: Sequence[str]) -> int:
    args = _parser().read(argv)
    if args.urgent and args.within is not None:
        raise UsageError("--urgent comes at once, --within with the next restart; which of them?")
    within_s = durations.of_flag("--within", args.within, at_once="--urgent") if args.within is not None else None
    code.folder(args.code)
    job = look.find(args.job or args.name, args.run_dir)
    if not look.lives(job):
        raise TroubleError(f"job {job.job} does not run; `evertrain run` runs your own files as they are then")
    with changes.captured(job, args.code) as found:
        body = {
            "change": secrets.token_hex(8),
            "kind": "update",
            "digest": found.code.digest,
            "source": str(found.source),
            "version": None,
            "urgent": args.urgent,
            "within_s": within_s,
            "keep_progress": True,
            "reason": args.reason,
            "author": client.author(),
        }
        wish = changes.Wish(job, body, "is not updated", found)
        wish.ask()
        # what comes later is not waited for, only what it is
        seen = wish.wait(changes.is_back if args.urgent else lambda change: True)
    lines = changes.pending if seen["outcome"] == "pending" else changes.runs
    return changes.show(wish, seen, lambda change: lines(job, change), as_json=args.json)


def _parser() -> Parser:
    parser = look.parser(
        "update",
        "Have a running job go on with other code. Its nodes, processes and checkpoints stay; if the new code fails "
        "soon, the job goes back to the old one.",
    )
    parser.add_argument("name", nargs="?", metavar="JOB", help="the same as --job")
    parser.add_argument("--code", required=True, metavar="DIR", help="the folder that holds the new code")
    parser.add_argument("--urgent", action="store_true", help="at once, and wait until training is back")
    parser.add_argument(
        "--within", metavar="TIME",
        help="with the next restart, but within this time, as 90s, 30m, 24h or 2d (default 24h: code.within_s)",
    )  # fmt: skip
    parser.add_argument("--reason", default="", metavar="TEXT", help="what it is for; `evertrain versions` shows it")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    return parser
