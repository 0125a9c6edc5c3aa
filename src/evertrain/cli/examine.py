"""Tests of the nodes of a live job: asked of its controller, run by its agents, all at the same time.

Each test is told when it is over. A command that is ended does not end the tests: they have their own limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from evertrain.cli import client, look, readings
from evertrain.cli.registry import KnownJob
from evertrain.model.diagnosis import Symptom
from evertrain.model.errors import TroubleError

POLL_S = 0.5
"""So often: the answer has every number of every rank."""
BEYOND_S = 60.0
"""So long after their limit the end of the tests must be known."""

Json = dict[str, Any]


def run(job: KnownJob, nodes: Sequence[str], symptom: Symptom, budget_s: float, *, quiet: bool) -> list[Json]:
    """What each test has come to, as incidents show it. Raises TroubleError where there are none, or not to the end."""
    wish = {"nodes": list(nodes), "suite": symptom, "budget_s": budget_s}
    number = look.tell(job, "/v1/exams", wish, "is not tested")["exam"]
    heard = time.monotonic()
    deadline = heard + budget_s + BEYOND_S
    told = 0
    while True:
        lives = look.lives(job)
        try:
            with client.of_run_dir(job.run_dir, look.ASK_S) as controller:
                seen: Json = controller.get(f"/v1/exams/{number}")
            heard = time.monotonic()
            done = [check for check in seen["checks"] if check["seconds"] is not None]
            if not quiet and done[told:]:
                print("\n".join(readings.lines(done[told:])), flush=True)
            told = len(done)
            if seen["over"]:
                if seen["outcome"] == "given_up":
                    raise TroubleError(f"job {job.job}: the tests were given up: {seen['because']}")
                return done
        except client.Refused as refused:
            if refused.status != 404:  # else it is just being written down
                raise TroubleError(f"job {job.job} is not tested: {refused.reason}") from refused
        except client.Unreachable:
            pass
        away_s = time.monotonic() - heard
        if not lives or away_s > look.CONTROLLER_AWAY_S or time.monotonic() > deadline:
            why = "it has ended meanwhile" if not lives else f"no word of the tests for {away_s:.0f} s"
            raise TroubleError(f"job {job.job} is not tested to the end: {why}")
        time.sleep(POLL_S)
