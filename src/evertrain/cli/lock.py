"""Does this job run already? One `evertrain run` a job: the lock file is held for as long as it lives.

A run that was killed leaves the lock free while its processes are still ending the job properly; the next run waits for
them, and refuses only when they stay.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evertrain.cli import client, places, processes
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError

EXTRA_WAIT_S = 25.0
"""Beyond its grace a job that lost its `run` needs this much to end (the keeper's hard limit is 20 s)."""


def take(here: places.Places | KnownJob) -> int:
    """The descriptor that holds the lock; raises if another run of this job lives."""
    handle = os.open(here.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 1000, 0)
        os.close(handle)
        raise TroubleError(_already_running(here.job, holder)) from None
    except OSError as error:
        os.close(handle)
        raise TroubleError(f"cannot lock {here.lock}: {error.strerror}") from error
    return handle


def sign(handle: int, run_id: str) -> None:
    """Write into the lock who holds it; again after a fork."""
    me = processes.identify(os.getpid())
    assert me is not None
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps({"pid": me.pid, "start_ticks": me.start_ticks, "run_id": run_id}).encode(), 0)


@contextmanager
def kept_from_running(job: KnownJob) -> Iterator[None]:
    """Nothing of the job lives, and none can be started meanwhile; raises where that is not certain."""
    handle = take(job)
    try:
        if alive := _leftovers(job.processes):
            name, process = next(iter(alive.items()))
            raise TroubleError(f"job {job.job} still lives ({name}, pid {process.pid}) and does not answer")
        if job.boot_id != processes.boot_id():
            _refuse_if_served_elsewhere(job)
        sign(handle, job.run_id)
        yield
    finally:
        os.close(handle)


def wait_for_previous(here: places.Places, say: Callable[[str], None], sleep: Callable[[float], None]) -> None:
    """Wait until nothing of an earlier run of this job lives; its database must not be written by two."""
    previous = _previous(here.run_dir)
    if not here.member and previous.get("boot_id", processes.boot_id()) != processes.boot_id():
        _refuse_if_served_elsewhere(here)
    deadline = time.monotonic() + previous.get("grace_s", 25.0) + EXTRA_WAIT_S
    said = False
    while alive := _leftovers(here.processes):
        name, process = next(iter(alive.items()))
        if previous.get("detached") or time.monotonic() > deadline:
            raise TroubleError(
                f"an earlier run of job {here.job} still lives ({name}, pid {process.pid}); "
                f"`evertrain stop --job {here.job}` ends it"
            )
        if not said:
            say(f"waiting for the earlier run of {here.job} to end ({name}, pid {process.pid})")
            said = True
        sleep(0.1)


def _refuse_if_served_elsewhere(here: places.Places | KnownJob) -> None:
    """Where machines share the run dir, pids of another one say nothing; its controller does."""
    try:
        serving = client.of_run_dir(here.run_dir)
        serving.get("/healthz")
    except client.Unreachable:
        return
    raise TroubleError(
        f"job {here.job} is already running, served by {serving.url}; `evertrain stop --job {here.job}` ends it, "
        "--job NAME starts another"
    )


def _leftovers(folder: Path) -> dict[str, processes.ProcessId]:
    me = os.getpid()
    return {name: one for name, one in processes.living(folder).items() if one.pid != me and name != "run"}


def _previous(run_dir: Path) -> dict[str, Any]:
    try:
        record = json.loads((run_dir / "job.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _already_running(job: str, holder: bytes) -> str:
    try:
        who = f" (pid {json.loads(holder)['pid']})"
    except (ValueError, KeyError, TypeError):
        who = ""
    return (
        f"job {job} is already running{who}; `evertrain status --job {job}` shows it, "
        f"`evertrain stop --job {job}` ends it, --job NAME starts another"
    )
