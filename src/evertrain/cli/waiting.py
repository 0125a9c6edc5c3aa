"""How long is something waited for that a running job was asked to do? Until it is done, or the job has ended.

Ctrl-C ends the waiting and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evertrain.cli import client, look
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError

Json = dict[str, Any]


def until(
    job: KnownJob,
    path: str,
    *,
    over: Callable[[Json], bool],
    again: Callable[[], None],
    from_log: Callable[[Path], Json | None],
    what: str,
) -> Json:
    """Look at what the controller says there until it is `over`; `again` tells a controller that knows nothing of it.

    Raises where the job ends before, or its controller stays away.
    """
    heard = time.monotonic()
    while True:
        lives = look.lives(job)  # asked first: what the last process wrote is read below
        seen: Json | None = None
        try:
            with client.of_run_dir(job.run_dir) as controller:
                seen = controller.get(path)
            heard = time.monotonic()
        except client.Refused as refused:
            # the controller that was asked died before it had written anything down
            if refused.status < 500:
                again()
        except client.Unreachable:
            if not lives:
                seen = look.read(job, from_log)
        if seen is not None and over(seen):
            return seen
        if not lives or (seen is not None and seen["ended"] is not None):
            why = seen["ended"] if seen is not None and seen["ended"] is not None else "nothing of it lives any more"
            raise TroubleError(f"job {job.job} ended before the {what} was done: {why}")
        if time.monotonic() - heard > look.CONTROLLER_AWAY_S:
            raise TroubleError(
                f"job {job.job}: its controller has not answered for {look.CONTROLLER_AWAY_S:.0f} s; "
                f"the {what} may go on without this command, see `evertrain status`"
            )
        time.sleep(look.POLL_S)
