"""`evertrain stop`: end a job properly. Its newest common step goes to disk; the same `run` command resumes it."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from typing import Any

from evertrain.cli import client, look, processes
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError

MARGIN_S = 30.0
"""Beyond the job's grace: for flushing, and for a controller that is just being started again."""


def main(argv: Sequence[str]) -> int:
    parser = look.parser("stop", "End a job properly; the same `evertrain run` command resumes it.")
    parser.add_argument("name", nargs="?", metavar="JOB", help="the same as --job")
    args = parser.read(argv)
    job = look.find(args.job or args.name, args.run_dir)
    if not look.lives(job):
        print(f"job {job.job} does not run")
        return 0
    deadline = time.monotonic() + job.grace_s + MARGIN_S
    asked = False
    while look.lives(job):
        asked = asked or _ask(job)
        if time.monotonic() > deadline:
            alive = ", ".join(f"{name} (pid {one.pid})" for name, one in processes.living(job.processes).items())
            raise TroubleError(f"job {job.job} has not ended in {job.grace_s + MARGIN_S:.0f} s: {alive} still run")
        time.sleep(0.1)
    print(f"job {job.job} has ended{_result(job)}")
    return 0


def _ask(job: KnownJob) -> bool:
    """Tell the controller, or `run` where no controller answers; whether anybody has heard."""
    try:
        controller = client.of_run_dir(job.run_dir)
        controller.post("/v1/stop", {"signal": int(signal.SIGTERM), "reason": "stopped by `evertrain stop`"})
    except client.Unreachable:
        run = processes.read(job.processes / "run.json")
        return run is not None and processes.send(run, signal.SIGTERM)
    return True


def _result(job: KnownJob) -> str:
    try:
        result: dict[str, Any] = json.loads((job.run_dir / "result.json").read_bytes())
    except (OSError, ValueError):
        return ""
    return f": {result.get('message') or result.get('state')}"
