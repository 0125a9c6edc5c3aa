"""Where does `evertrain trace` get records from? A living job, an incident that was kept, or a dead job's files."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evertrain.cli import client, look
from evertrain.cli.parsing import Parser
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError

if TYPE_CHECKING:
    from evertrain.model.windows import JobWindow
    from evertrain.trace.scene import Scene

ANSWER_S = 10.0
"""So long a window is waited for; its nodes have less."""
SECONDS = 60.0
_LARGE_S = 60.0
_NOT_TRACED = "is it older than tracing, or is `trace.enabled` off? `evertrain status` says what is blind"


def parser(command: str, description: str) -> Parser:
    made = look.parser(f"trace {command}", description)
    made.add_argument("name", nargs="?", metavar="JOB|DIR", help="a job, or a folder with the rings of a dead one")
    made.add_argument("--incident", metavar="ID", help="what was kept of the seconds before this incident")
    made.add_argument("--seconds", metavar="N", default=f"{SECONDS:g}", help="so much of the past (default: 60)")
    return made


def scene(args: Any) -> Scene:
    """By the flags of `parser`. Raises TroubleError where there is nothing."""
    from evertrain.trace import scene as scenes

    seconds = seconds_of(args.seconds)
    if args.name is not None and args.job is None and (path := Path(args.name)).exists() and args.incident is None:
        return _checked(scenes.of_folder(path), str(path))
    job = look.find(args.job or args.name, args.run_dir)
    if args.incident is not None:
        return _of_incident(job, args.incident)
    if look.lives(job):
        return window(job, seconds)
    if job.run_folder.exists() and scenes.ring_files(job.run_folder):
        return _checked(scenes.of_folder(job.run_folder), job.job)
    from evertrain.controller import window_files

    kept = window_files.incidents(job.run_dir)
    names = f"; --incident {', '.join(map(str, kept))} shows what was kept" if kept else ""
    raise TroubleError(f"job {job.job} does not run any more, and its rings went with it{names}")


def seconds_of(text: str, flag: str = "--seconds") -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 3600:
        raise UsageError(f"{flag} {text}: a number above 0, at most 3600")
    return seconds


def window(job: KnownJob, seconds: float, *, brief: bool = False) -> Scene:
    """What the rings of a living job hold now."""
    from evertrain.trace import scene as scenes

    found = fetched(job, {"seconds": seconds, "brief": brief})
    try:
        return _checked(scenes.of_window(found), job.job)
    except ValueError as error:
        raise TroubleError(f"job {job.job}: {error}") from error


def fetched(job: KnownJob, wish: dict[str, Any]) -> JobWindow:
    """What the agents of a living job send when they are asked this."""
    from evertrain.model import windows

    number = int(look.tell(job, "/v1/windows", wish, "shows no trace")["window"])
    deadline, waits = time.monotonic() + ANSWER_S, "its controller"
    while time.monotonic() < deadline:
        try:
            with client.of_run_dir(job.run_dir, _LARGE_S) as controller:
                content = controller.get_bytes(f"/v1/windows/{number}")
            if not content.startswith(b"{"):
                return windows.decode(content)
            waits = ", ".join(json.loads(content)["waits_for"][:8]) or waits
        except client.Refused as refused:
            raise TroubleError(f"job {job.job} shows no trace: {refused.reason}") from refused
        except client.Unreachable:
            if not look.lives(job):
                raise TroubleError(f"job {job.job} does not run any more") from None
        except ValueError as error:
            raise TroubleError(f"job {job.job}: {error}") from error
        time.sleep(look.POLL_S)
    raise TroubleError(f"job {job.job}: the trace is not there after {ANSWER_S:.0f} s ({waits} still to answer)")


def _of_incident(job: KnownJob, text: str) -> Scene:
    from evertrain.controller import window_files
    from evertrain.trace import scene as scenes

    if not text.isascii() or not text.isdigit():
        raise UsageError(f"--incident {text}: not a number")
    try:
        kept = window_files.read(job.run_dir, int(text))
        if kept is not None:
            return _checked(scenes.of_window(kept), f"incident {text} of {job.job}")
    except ValueError as error:
        raise TroubleError(str(error)) from error
    there = ", ".join(map(str, window_files.incidents(job.run_dir))) or "none"
    raise TroubleError(f"of incident {text} of job {job.job} no trace is kept (kept are: {there})")


def _checked(found: Scene, what: str) -> Scene:
    if not found.tracks:
        why = "; ".join((*found.problems[:3], *found.missing[:3])) or f"it has no trace rings; {_NOT_TRACED}"
        raise TroubleError(f"{what}: {why}")
    return found
