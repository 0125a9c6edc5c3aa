"""What does `evertrain run` do on a machine that does not serve the job? It joins the first node, and runs its ranks.

Keeper and agent are started here as on the first node; controller, event log and result are there. What happens to the
job is said on the first node only: here, what its ranks print, and how it ended where that is not well.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from evertrain.cli import clean, launch, lock, machines, places, registry, serve
from evertrain.cli.client import Client, Refused, Unreachable
from evertrain.cli.machines import Machines
from evertrain.cli.places import Places
from evertrain.cli.plan import Plan
from evertrain.model import version
from evertrain.model.errors import TroubleError
from evertrain.model.words import counted

ASK_AGAIN_S = 0.25
PATIENT_S = 2.0
"""Waiting is said when it takes longer."""
STALE_TOKEN_S = 10.0
"""In a folder that is shared the first node writes its token before it serves; a network file system shows it later."""

Json = dict[str, Any]


class Seat(NamedTuple):
    """What the first node says to one that joins."""

    job: str
    run_id: str
    node: str
    next_attempt: int
    token: str
    """That opened the door."""
    address: str
    """By which the first node sees us."""


def job(plan: Plan) -> int:
    """Join the job and take part in it to its end; the exit code."""
    assert plan.machines is not None
    seat = _join(plan, plan.machines)
    devices = plan.devices.get(plan.machines.name, {})
    nodes = replace(plan.nodes, names=(seat.node,))
    plan = replace(plan, job=seat.job, nodes=nodes, devices={seat.node: devices})
    here = places.of(plan, seat.run_id, member=seat.node)
    places.make_run_dir(here)
    held = lock.take(here)
    return serve.begin(plan, here, lambda ready: _take_part(plan, here, held, seat, ready))


def _take_part(plan: Plan, here: Places, held: int, seat: Seat, ready: Callable[[], None]) -> int:
    assert plan.machines is not None
    lock.wait_for_previous(here, serve.say, time.sleep)
    clean.remove_dead_runs(serve.say, here.run_dir, plan.fresh)
    try:
        lock.sign(held, here.run_id)
        _prepare(plan, here, seat)
    except OSError as error:
        raise serve.cannot_write(here, error) from error
    address = plan.local_addr or seat.address
    supervisor = serve.assemble(plan, here, [], plan.machines.url, seat.token, serve.owner_pipe(plan), address)
    serve.say(
        f"job {here.job}: this node is {here.member}, with {counted(plan.nproc, 'rank')}; served by {plan.machines.url}"
    )
    for line in plan.notes:
        serve.say(line)
    return serve.supervise(supervisor, ready, lambda result: _show(here, result))


def _show(here: Places, result: Json) -> int:
    if not _is_shared(here):
        try:
            places.write_json(here.run_dir / "result.json", result)
        except OSError:
            pass  # the exit code says it too
    if result["exit_code"]:
        why = f": {result['message']}" if result["message"] else ""
        serve.say(f"job {here.job} {result['state']}{why}")
    return int(result["exit_code"])


def _prepare(plan: Plan, here: Places, seat: Seat) -> None:
    """What this node's processes need; and the other commands, where the run dir is this machine's own."""
    assert plan.machines is not None
    here.processes.mkdir(mode=0o700, exist_ok=True)
    for old in here.processes.glob("*.json"):
        old.unlink(missing_ok=True)
    if not _is_shared(here):
        (here.run_dir / "result.json").unlink(missing_ok=True)
        # of a run of this job that this machine has served
        here.code_token.unlink(missing_ok=True)
        serve.set_aside_old_logs(here.log_root, here.run_id, seat.next_attempt)
        places.write_private(here.token, seat.token.encode())
        places.write_job(here, plan, plan.machines.url)
        places.write_json(here.run_dir / "controller.json", {"url": plan.machines.url})
    places.make_run_folder(here, plan.nodes.names)
    places.write_private(here.own_token, seat.token.encode())
    registry.remember(here.job, here.run_dir, here.run_id, time.time(), os.environ)


def _is_shared(here: Places) -> bool:
    """Whether the run dir is the first node's too: then what stands in it is that node's to write."""
    try:
        described = json.loads((here.run_dir / "job.json").read_bytes())
        return bool(described["run_id"] == here.run_id and not described["member"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


# --- joining


def _join(plan: Plan, at: Machines) -> Seat:
    """Ask until there is an answer."""
    wish = {
        "host": at.name,
        "instance": os.urandom(8).hex(),
        "nproc_per_node": plan.nproc,
        "version": version.own(),
        "seats": {"least": at.seats.least, "most": at.seats.most, "standby": at.seats.standby},
        "job": plan.job if plan.named else None,
        "node_rank": at.node_rank,
    }
    given = launch.token(plan, os.environ)
    limit_s = plan.config.machines.join_s
    began = time.monotonic()
    refused_since: float | None = None
    said = False
    while True:
        try:
            address = machines.own_address(at)
            token = given or _token_of(plan.root / plan.job)
            return Seat(**_ask(at, wish, token), token=token, address=address)
        except Refused as refused:
            if refused.status != 401:
                raise TroubleError(f"{at.host}:{at.port} does not take this node in: {refused.reason}") from refused
            refused_since = refused_since or time.monotonic()
            if given is not None or time.monotonic() - refused_since > STALE_TOKEN_S:
                raise TroubleError(_no_token(at, refused, wrong=bool(token))) from refused
        except (Unreachable, OSError) as error:
            if time.monotonic() - began > limit_s:
                raise TroubleError(
                    f"nobody serves the job at {at.host}:{at.port} ({_reason(error)}); waited {limit_s:.0f} s "
                    "(machines.join_s). The first node runs the same command"
                ) from error
            if not said and time.monotonic() - began > PATIENT_S:
                said = True
                serve.say(f"waiting for the first node at {at.host}:{at.port} ({_reason(error)})")
        time.sleep(ASK_AGAIN_S)


def _ask(at: Machines, wish: Json, token: str) -> Json:
    asking = Client(at.url, token, timeout_s=machines.ASK_S)
    try:
        seat: Json = asking.post("/v1/join", wish)
        return seat
    finally:
        asking.close()


def _token_of(run_dir: Path) -> str:
    """The first node's, where the run dir is shared; empty where it is not."""
    try:
        return (run_dir / "token").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _no_token(at: Machines, refused: Refused, *, wrong: bool) -> str:
    what = "this node's token is not the job's" if wrong else "the job's token is needed"
    file = refused.body.get("token_file", "RUN_DIR/token")
    return f"{what}; paste this and try again:\n  export EVERTRAIN_TOKEN=$(ssh {at.host} cat {file})"


def _reason(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, TimeoutError):
        return "no answer"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
