"""Where does a command that looks at a job get its answer? From the live controller, else from the event store.

A controller that is just being started again is waited for; a job of which nothing lives any more is read from its log.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evertrain.cli import client, processes, registry
from evertrain.cli.parsing import Parser
from evertrain.cli.registry import KnownJob
from evertrain.model.errors import TroubleError, UsageError

CONTROLLER_RETURNS_S = 3.0
CONTROLLER_BEGINS_S = 10.0
"""A job that has just been started has no log yet that could answer instead."""
CONTROLLER_AWAY_S = 30.0
"""Where something is to be done there is no other answer: so long is one that is started again waited for."""
ASK_S = 2.0
UPLOAD_S = 60.0
"""So long may it take a controller to read and check the next part of a file that it is sent."""
POLL_S = 0.1

Json = dict[str, Any]
Read = TypeVar("Read")


class Look(NamedTuple):
    status: Json
    incidents: list[Json]
    attempts: list[Json]
    live: bool


def parser(command: str, description: str) -> Parser:
    """The flags that say which job is meant."""
    made = Parser(prog=f"evertrain {command}", description=description)
    made.add_argument("--job", "--rdzv-id", "--rdzv_id", metavar="NAME", help="which job (default: the newest here)")
    made.add_argument("--run-dir", "--run_dir", metavar="DIR", help="where its folder lies, if not in the usual place")
    return made


def find(job: str | None, run_dir: str | None) -> KnownJob:
    return registry.find(job, Path(run_dir) if run_dir is not None else None, os.environ)


def at(job: KnownJob) -> Look:
    """Everything that there is to know of a job now."""
    answers = ask(job, "/v1/status", "/v1/incidents", "/v1/attempts")
    if answers is None:
        return _from_log(job)
    status, incidents, attempts = answers
    return Look(status, incidents, attempts, live=True)


def ask(job: KnownJob, *paths: str) -> list[Any] | None:
    """What the live controller answers; None when nothing of the job lives, or nobody answers in time."""
    deadline = time.monotonic() + (CONTROLLER_RETURNS_S if job.database.exists() else CONTROLLER_BEGINS_S)
    while lives(job):
        try:
            with client.of_run_dir(job.run_dir) as controller:
                return [controller.get(path) for path in paths]
        except client.Unreachable:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
    return None


def tell(job: KnownJob, path: str, wish: Json | Path, vain: str, *, code: bool = False) -> Json:
    """Have the controller take a wish, or a file, that may be told it twice; raises with the reason, after
    `job NAME VAIN:`. `code`: it changes what the job runs.
    """
    deadline = time.monotonic() + CONTROLLER_AWAY_S
    timeout_s = UPLOAD_S if isinstance(wish, Path) else ASK_S
    while True:
        try:
            with client.of_run_dir(job.run_dir, timeout_s, code=code) as controller:
                answer: Json = controller.put(path, wish) if isinstance(wish, Path) else controller.post(path, wish)
                return answer
        except client.Refused as refused:
            if refused.status != 503:
                kind = UsageError if refused.body.get("wrong_usage") else TroubleError
                raise kind(f"job {job.job} {vain}: {_reason(job, refused, code)}") from refused
            trouble = str(refused.body.get("error"))
        except client.Unreachable:
            trouble = "its controller does not answer"
        if not lives(job):
            raise TroubleError(f"job {job.job} does not run any more")
        if time.monotonic() > deadline:
            raise TroubleError(f"job {job.job} {vain}: {trouble} for {CONTROLLER_AWAY_S:.0f} s")
        time.sleep(POLL_S)


def _reason(job: KnownJob, refused: client.Refused, code: bool) -> str:
    if refused.status == 401 and code:
        where = client.code_token(job.run_dir)[1]
        if where:
            return f"the code token of {where} is not the job's"
    return refused.reason


def lives(job: KnownJob) -> bool:
    """Whether any process of the job still runs; where it is served by another machine, whether that one answers."""
    if job.boot_id == processes.boot_id():
        return bool(processes.living(job.processes))
    try:
        with client.of_run_dir(job.run_dir) as controller:
            controller.get("/healthz")
    except client.Unreachable:
        return False
    return True


def _from_log(job: KnownJob) -> Look:
    from evertrain.controller import views

    found = read(
        job,
        lambda database: Look(
            views.status_of(database), views.incidents_of(database), views.attempts_of(database), live=False
        ),
    )
    status = found.status
    status["job"] = job.job
    if lives(job) and status["state"] == "stopped" and status.get("exit_code") is None:
        status["state"] = "running" if status["workers"] else "starting"
        status["blind"] = [*status["blind"], _why_silent(job)]
    return found


def _why_silent(job: KnownJob) -> str:
    if job.boot_id == processes.boot_id() and not {"run", "controller"} & set(processes.living(job.processes)):
        return (
            "nobody watches it: `evertrain run` and the controller are gone. Its ranks end in a minute or so, and the "
            "same `evertrain run` goes on at their newest step; this is from the log"
        )
    return "the controller does not answer; this is from its log"


def read(job: KnownJob, reader: Callable[[Path], Read]) -> Read:
    """What `reader` makes of the job's event log; one clear line where it cannot be read."""
    if job.served_by:
        raise TroubleError(
            f"job {job.job} is served by {job.served_by}, which does not answer; its log is there{_last_word(job)}"
        )
    if not job.database.exists():
        raise TroubleError(f"job {job.job} has written nothing down yet ({job.database} is not there)")
    try:
        return reader(job.database)
    except Exception as error:  # whatever the database's libraries raise for a broken file
        first_line = str(error).partition("\n")[0]
        raise TroubleError(f"the event log {job.database} cannot be read: {first_line}") from error


def _last_word(job: KnownJob) -> str:
    """How the job ended, as far as this node was told."""
    try:
        result = json.loads((job.run_dir / "result.json").read_bytes())
        return f". It has ended here: {result['state']}, {result['message']}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def result_from_log(database: Path) -> Json | None:
    """What the controller would have put into `result.json`; None where the job has not ended by its log."""
    from evertrain.controller import views

    try:
        status = views.status_of(database)
        incidents, attempts = views.incidents_of(database), views.attempts_of(database)
    except Exception:  # whatever the database's libraries raise for a broken file
        return None
    if status["exit_code"] is None:
        return None
    known = {attempt["attempt"] for attempt in attempts}
    return {
        "state": status["state"],
        "exit_code": status["exit_code"],
        "message": status["message"],
        "first_failure": None,
        "status": status,
        "attempts": attempts,
        "incidents": [incident for incident in incidents if incident["attempt"] in known],
    }
