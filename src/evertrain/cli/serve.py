"""How does a checked command line become a running job, and the job an exit code?

Everything that can be refused is refused before anything is started. Then keepers first (importing torch takes
longest), the controller, the agents; `supervisor` watches over them until the job is over.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evertrain.cli import clean, identity, launch, lock, machines, memory, places, registry, summary
from evertrain.cli import plan as planning
from evertrain.cli.children import Child, Role
from evertrain.cli.output import Output, Terminal
from evertrain.cli.places import Places
from evertrain.cli.plan import Plan
from evertrain.cli.poll import Poller
from evertrain.cli.supervisor import Supervisor
from evertrain.cli.tail import Tail, Write
from evertrain.cli.view import LiveLine
from evertrain.model.errors import TroubleError
from evertrain.model.words import counted

Json = dict[str, Any]

DIFFERENCES = (
    "unlike torchrun, it restarts for as long as there is progress (--max-restarts N caps, 0 never), "
    "and the same command resumes this job (--fresh starts anew)"
)


def job(args: Namespace, began: float) -> int:
    """Run what the flags say to its end, or leave it running in the background; the exit code."""
    plan = planning.from_flags(args, os.environ)
    memory.check(memory.need_bytes(len(plan.nodes.names), plan.nproc))
    if plan.machines is None:
        listener: socket.socket | None = None
    elif (listener := machines.listen(plan.machines)) is None:
        from evertrain.cli import member

        return member.job(plan)
    here = places.of(plan, identity.new_run_id(plan.job))
    launch.check_master_port(plan.master_port)
    places.make_run_dir(here)
    held = lock.take(here)
    return begin(plan, here, lambda ready: serve(plan, here, held, listener, began, ready))


def begin(plan: Plan, here: Places, serving: Callable[[Callable[[], None]], int]) -> int:
    """In the foreground, or with `--detach` in the background."""
    if not plan.detach:
        return serving(lambda: None)
    from evertrain.cli import detach

    return detach.into_background(here, serving)


def serve(
    plan: Plan, here: Places, held: int, bound: socket.socket | None, began: float, ready: Callable[[], None]
) -> int:
    """Run the job, whose command began at `began`, to its end; `ready` is called when everything has been started."""
    lock.wait_for_previous(here, say, time.sleep)
    clean.remove_dead_runs(say, here.run_dir, plan.fresh)
    with bound or launch.listen(plan.listen_port) as listener:
        url = launch.url_of(listener)
        try:
            lock.sign(held, here.run_id)
            token = _prepare(plan, here, plan.machines.url if plan.machines is not None else url)
        except OSError as error:
            raise cannot_write(here, error) from error
        owner = owner_pipe(plan)
        address = plan.local_addr or (plan.machines.host if plan.machines is not None else launch.LOOPBACK)
        roles = [launch.controller(plan, here, listener, own_environment(), owner, began)]
        supervisor = assemble(plan, here, roles, url, token, owner, address)
        for line in _greeting(plan, here):
            say(line)
        return supervise(supervisor, ready, lambda result: summary.show(here, result, time.monotonic() - began))


def cannot_write(here: Places, error: OSError) -> TroubleError:
    return TroubleError(
        f"{error.filename or here.run_dir} cannot be written ({error.strerror}); --run-dir names another place"
    )


def say(line: str) -> None:
    print(f"evertrain: {line}", file=sys.stderr, flush=True)


def _prepare(plan: Plan, here: Places, url: str) -> str:
    """Everything that the processes find in the run dir; the token."""
    here.result.unlink(missing_ok=True)
    (here.run_dir / "controller.json").unlink(missing_ok=True)
    if not here.database.exists():
        set_aside_old_logs(here.log_root, here.run_id, 1)
    here.processes.mkdir(mode=0o700, exist_ok=True)
    for old in here.processes.glob("*.json"):
        old.unlink(missing_ok=True)
    token = launch.token(plan, os.environ) or os.urandom(32).hex()
    places.write_private(here.token, token.encode())
    code_token = launch.code_token(os.environ) or os.urandom(32).hex()
    places.write_private(here.code_token, code_token.encode())
    places.write_job(here, plan, url)
    places.make_run_folder(here, plan.nodes.names)
    places.write_private(here.own_token, token.encode())
    places.write_private(here.own_code_token, code_token.encode())
    registry.remember(here.job, here.run_dir, here.run_id, time.time(), os.environ)
    return token


def set_aside_old_logs(log_root: Path, run_id: str, next_attempt: int) -> None:
    """Without its event log a job counts its attempts from 1 again; their output must not be mixed with older ones."""
    numbered = ((folder, folder.name.removeprefix("attempt_")) for folder in log_root.glob("attempt_*"))
    if old := [folder for folder, number in numbered if number.isdecimal() and int(number) >= next_attempt]:
        aside = log_root / f"before-{run_id}"
        aside.mkdir()
        for folder in old:
            folder.rename(aside / folder.name)


def owner_pipe(plan: Plan) -> int | None:
    """Closed at the other end only by our own end: that tells every process of the job that we are gone."""
    return None if plan.detach else os.pipe()[0]


def own_environment() -> dict[str, str]:
    """What processes of the job and ranks get: not the secrets."""
    secrets = ("EVERTRAIN_TOKEN", "EVERTRAIN_CODE_TOKEN")
    return {name: value for name, value in os.environ.items() if name not in secrets}


def assemble(
    plan: Plan,
    here: Places,
    serving: list[Role],
    url: str,
    token: str,
    owner: int | None,
    address: str,
) -> Supervisor:
    """Everything that watches over this machine's part of the job; `serving`: the controller, where it is here."""
    environ, nodes = own_environment(), plan.nodes.names
    roles: list[Role] = [launch.keeper(plan, here, node, environ, owner) for node in nodes]
    roles += serving
    roles += [launch.agent(plan, here, node, url, environ, owner, address) for node in nodes]
    children = [Child(role, here.processes / f"{role.name}.json") for role in roles]
    poller = Poller(url, token)
    # of several machines each shows the ranks that it runs
    own = nodes if plan.machines is not None else None

    def tail(write: Write) -> Tail:
        return Tail(here.log_root, plan.console, plan.nproc, plan.world_size, write, own)

    terminal = Terminal(live=sys.stderr.isatty() and os.environ.get("TERM") != "dumb")
    output = Output(terminal, tail, LiveLine(here.job, lambda: poller.newest))
    return Supervisor(plan, here, children, output, poller)


def _greeting(plan: Plan, here: Places) -> list[str]:
    ranks = counted(plan.world_size, "rank")
    nodes = f" on {plan.nodes.active} nodes" if plan.nodes.active > 1 else ""
    spare = f", {plan.nodes.standby} standby" if plan.nodes.standby else ""
    lines = [f"job {here.job}: {ranks}{nodes}{spare}; {_short(here.run_dir)}", DIFFERENCES, *plan.notes]
    if plan.nodes.least is not None:
        fewer = counted(plan.nodes.least, "node")
        lines.append(f"where nodes are lost, {fewer} may go on from the shared store, then not bit for bit the same")
    if plan.machines is not None:
        given = launch.token(plan, os.environ) is not None
        secret = "" if given else f"; their token is in {here.token}"
        lines.append(f"this node is {plan.machines.name}, the others join it at {plan.machines.url}{secret}")
    return lines


def _short(folder: Path) -> str:
    return str(folder.relative_to(Path.cwd())) if folder.is_relative_to(Path.cwd()) else str(folder)


def supervise(supervisor: Supervisor, ready: Callable[[], None], show: Callable[[Json], int]) -> int:
    """Watch until the end, which `show` puts in words; the exit code."""
    supervisor.listen_to_signals()
    try:
        supervisor.start()
        ready()
        result = supervisor.watch()
    finally:
        # a second look at the terminal's Ctrl-C: from here on it may not interrupt the cleaning
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        supervisor.end()
    if result is not None:
        return show(result)
    if supervisor.hopeless is not None:
        return summary.give_up(supervisor.hopeless.role.name, supervisor.hopeless.role.log)
    here = supervisor.here
    if supervisor.is_gone:
        say(f"job {here.job} goes on without this machine, which a drill has taken away")
        return 1
    log = here.log(f"agent-{here.member}" if here.member else "controller")
    say(f"job {here.job} did not end in time and was ended by force; see {log}")
    return 128 + (supervisor.stopped_by or signal.SIGTERM)
