"""`evertrain stacks`: where does every process of a job stand, and on whom do the others wait?

Of a job that runs, a fresh look; afterwards, or with `--incident` or `--capture`, one that was kept. Exit code 0:
shown; 1: there is nothing to show, or nobody answers; 2: wrong usage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evertrain.cli import client, look
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError

if TYPE_CHECKING:
    from evertrain.controller.capture_files import Kept

FRESH_S = 10.0
"""So long a fresh capture is waited for."""
ANSWER_S = 20.0
"""So long it may take until all of a large one has come."""
_NONE = "`evertrain run` looks at the processes when a job hangs, and this command while it runs"


def main(argv: Sequence[str]) -> int:
    parser = look.parser(
        "stacks",
        "Where does every process stand, and on whom do the others wait? A fresh look while the job runs; afterwards "
        "the last one that was kept.",
    )
    parser.add_argument("name", nargs="?", metavar="JOB", help="the same as --job")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--incident", metavar="ID", help="the last look before something was done about this incident")
    which.add_argument("--capture", metavar="N", help="the look of this number")
    parser.add_argument("--json", action="store_true", help="JSON on stdout and nothing else")
    parser.add_argument("--speedscope", metavar="FILE", help="write all stacks there, for speedscope's flame graphs")
    parser.add_argument(
        "--flight-recorder", metavar="DIR", help="write the flight recorders' dumps there, for torch's own analyzer"
    )
    args = parser.read(argv)
    capture, incident = _number("--capture", args.capture), _number("--incident", args.incident)
    job = look.find(args.job or args.name, args.run_dir)
    dumps = args.flight_recorder
    kept = _of_incident(job, incident) if incident is not None else _one(job, capture, dumps=dumps is not None)
    written: Sequence[str] = ()
    if dumps is not None:
        from evertrain.cli import recorders

        written = recorders.write(job, kept, Path(dumps))
    _show(kept, args.speedscope, written, as_json=args.json)
    return 0


def _number(flag: str, text: str | None) -> int | None:
    if text is None or (text.isascii() and text.isdigit() and len(text) < 10):
        return None if text is None else int(text)
    raise UsageError(f"{flag} {text}: not a number")


# -- which one ---------------------------------------------------------------------------------------------------------


def _one(job: KnownJob, number: int | None, *, dumps: bool) -> Kept:
    from evertrain.controller import capture_files

    if number is not None:
        return _kept(job, number)
    if look.lives(job):
        return _fresh(job, dumps=dumps)
    there = capture_files.numbers(job.run_dir)
    if not there:
        raise TroubleError(f"of job {job.job} no stacks were kept; {_NONE}")
    return _kept(job, there[-1])


def _of_incident(job: KnownJob, incident: int) -> Kept:
    found = next((one for one in look.at(job).incidents if one["id"] == incident), None)
    if found is None:
        raise TroubleError(f"job {job.job} has no incident {incident}; `evertrain incidents` lists them")
    if not found.get("captures"):
        raise TroubleError(f"incident {incident} of job {job.job} ({found['cause']}) was named without stacks")
    return _kept(job, max(found["captures"]))


def _fresh(job: KnownJob, *, dumps: bool) -> Kept:
    number = int(look.tell(job, "/v1/captures", {"dumps": dumps}, "shows no stacks")["capture"])
    deadline, waits = time.monotonic() + FRESH_S, "its controller"
    while time.monotonic() < deadline:
        try:
            answer = _get(job, number)
            if not isinstance(answer, dict):
                return answer
            waits = ", ".join(answer["waits_for"][:8]) or "the verdict"
        except client.Refused as refused:
            raise TroubleError(f"job {job.job} shows no stacks: {refused.reason}") from refused
        except client.Unreachable:
            pass
        if not look.lives(job):
            raise TroubleError(f"job {job.job} does not run any more; the same command shows what was kept")
        time.sleep(look.POLL_S)
    raise TroubleError(
        f"job {job.job}: capture {number} is not there after {FRESH_S:.0f} s ({waits} still to answer); "
        f"`evertrain stacks --capture {number}` may show it later"
    )


def _kept(job: KnownJob, number: int) -> Kept:
    """From the live controller, else from the file that it has left."""
    from evertrain.controller import capture_files

    if look.lives(job):
        try:
            answer = _get(job, number)
            if not isinstance(answer, dict):
                return answer
            raise TroubleError(f"capture {number} of job {job.job} is not over yet; ask again")
        except client.Refused as refused:
            raise TroubleError(f"job {job.job}: {refused.reason}") from refused
        except client.Unreachable:
            pass  # its file may lie here
    try:
        kept = capture_files.read(job.run_dir, number)
    except ValueError as error:
        raise TroubleError(str(error)) from error
    if kept is None:
        there = capture_files.numbers(job.run_dir)
        known = f"kept are {', '.join(map(str, there))}" if there else f"none were kept; {_NONE}"
        raise TroubleError(f"job {job.job} has no stacks of capture {number}: {known}")
    return kept


def _get(job: KnownJob, number: int) -> Kept | dict[str, Any]:
    """The capture, or how it stands with it."""
    import msgspec

    from evertrain.controller.capture_files import Kept

    with client.of_run_dir(job.run_dir, ANSWER_S) as controller:
        answer = controller.get(f"/v1/captures/{number}")
    if "merged" not in answer:
        return dict(answer)
    try:
        # JSON's keys are text
        return msgspec.convert(answer, Kept, strict=False, str_keys=True)
    except msgspec.ValidationError as error:
        raise TroubleError(f"the answer of {job.job}'s controller is not one of this version: {error}") from error


# -- showing -----------------------------------------------------------------------------------------------------------


def _show(kept: Kept, speedscope: str | None, written: Sequence[str], *, as_json: bool) -> None:
    from evertrain.cli import stack_export, stack_view

    if speedscope is not None:
        Path(speedscope).write_text(json.dumps(stack_export.speedscope(kept)))
    if as_json:
        print(json.dumps(stack_view.as_json(kept)))
        return
    from evertrain.cli import tables

    out = tables.console()
    for line in stack_view.lines(kept):
        out.print(line)
    if speedscope is not None:
        out.print(f"written for speedscope: {speedscope}")
    for line in written:
        out.print(line, markup=False, soft_wrap=True)
