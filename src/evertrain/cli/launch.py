"""With what is each process of the job started? Specs, command lines and environments."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from evertrain.cli.children import Role
from evertrain.cli.places import Places
from evertrain.cli.plan import Plan
from evertrain.model.errors import TroubleError, UsageError
from evertrain.model.spec import AgentSpec, ControllerSpec, KeeperSpec

LOOPBACK = "127.0.0.1"
ORPHAN_LIMIT_S = 600.0
KEEPER = Path(__file__).parents[1] / "keeper" / "main.py"
# -P: the folder of the user's script must not shadow the standard library of our own processes
OWN_PYTHON = (sys.executable, "-P", "-m")


def listen(port: int) -> socket.socket:
    """The controller's socket. It belongs to `run`, so that the port stays when the controller is started again."""
    try:
        return socket.create_server((LOOPBACK, port), backlog=512)
    except OSError as error:
        raise TroubleError(
            f"port {port} is taken ({_why(error)}); --rdzv-endpoint names another, --standalone takes a free one"
        ) from error


def _why(error: OSError) -> str:
    # create_server adds the address to it, in Python's words
    return os.strerror(error.errno or 0)


def check_master_port(port: int | None) -> None:
    """Refuse a port that is taken before anything is started; the ranks would find out one by one."""
    if not port:
        return
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise TroubleError(
            f"port {port} is taken ({_why(error)}); --master-port names another, without it a free one is used"
        ) from error


def token(plan: Plan, environ: Mapping[str, str]) -> str | None:
    """The secret that the user has given, if any."""
    if plan.token_file is None:
        return _token_of("EVERTRAIN_TOKEN", environ)
    where = f"--token-file {plan.token_file}"
    try:
        secret = plan.token_file.read_text(errors="replace").strip()
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error
    if not secret:
        raise UsageError(f"{where} is empty")
    return _fit_for_a_header(secret, where)


def code_token(environ: Mapping[str, str]) -> str | None:
    """The same of the one without which nobody may have other code run."""
    return _token_of("EVERTRAIN_CODE_TOKEN", environ)


def _token_of(variable: str, environ: Mapping[str, str]) -> str | None:
    secret = environ.get(variable, "").strip()
    return _fit_for_a_header(secret, variable) if secret else None


def _fit_for_a_header(secret: str, where: str) -> str:
    if not secret.isascii() or not secret.isprintable():
        raise UsageError(f"{where}: a token is one line of printable ASCII characters")
    return secret


def keeper(plan: Plan, here: Places, node: str, environ: Mapping[str, str], owner: int | None) -> Role:
    spec = KeeperSpec(
        job=here.job,
        run_id=here.run_id,
        node=node,
        node_dir=str(here.node_dir(node)),
        log_dir=str(here.run_dir / "logs"),
        start=plan.start,
        python=plan.python,
        command=plan.command,
        preload=plan.preload,
        local_world_size=plan.nproc,
        code_root=_code_root(plan),
        owner_fd=owner,
        grace_s=plan.config.grace_s,
        orphan_limit_s=ORPHAN_LIMIT_S,
    )
    file = here.node_dir(node) / "keeper.json"
    return Role(
        name=f"keeper-{node}",
        argv=(sys.executable, "-I", str(KEEPER), str(file)),
        spec=file,
        content=msgspec.json.encode(spec),
        log=here.log(f"keeper-{node}"),
        environ={**environ, **plan.devices.get(node, {})},
        descriptors=_passed(owner),
        stale=(here.node_dir(node) / "keeper.sock",),
        stdin=True,
    )


def controller(
    plan: Plan, here: Places, listener: socket.socket, environ: Mapping[str, str], owner: int | None, began: float
) -> Role:
    spec = ControllerSpec(
        job=here.job,
        run_id=here.run_id,
        run_dir=str(here.run_dir),
        log_root=str(here.log_root),
        database=str(here.database),
        token_file=str(here.own_token),
        run_folder=str(here.run_folder),
        listen_fd=listener.fileno(),
        url=plan.machines.url if plan.machines is not None else url_of(listener),
        nodes=plan.nodes.names,
        standby=plan.nodes.standby,
        least=plan.nodes.least,
        standby_barrier=plan.standby_barrier,
        seats=plan.machines.seats if plan.machines is not None else None,
        node_rank=plan.machines.node_rank if plan.machines is not None else None,
        nproc_per_node=plan.nproc,
        command=plan.command,
        start=plan.start,
        mesh=plan.mesh,
        max_restarts=plan.max_restarts,
        observe_only=plan.observe_only,
        fresh=plan.fresh,
        role=plan.role,
        signals_to_handle=plan.signals_to_handle,
        virtual_local_rank=plan.virtual_local_rank,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        faults=plan.faults,
        owner_fd=owner,
        began_time=time.time() - (time.monotonic() - began),
        code_root=_code_root(plan),
        code_dir=str(here.code_dir),
        code_token_file=str(here.own_code_token),
        config=plan.config,
    )
    file = here.run_folder / "controller.json"
    return Role(
        name="controller",
        argv=(*OWN_PYTHON, "evertrain.controller", str(file)),
        spec=file,
        content=msgspec.json.encode(spec),
        log=here.log("controller"),
        environ=environ,
        descriptors=(listener.fileno(), *_passed(owner)),
    )


def agent(
    plan: Plan, here: Places, node: str, url: str, environ: Mapping[str, str], owner: int | None, address: str
) -> Role:
    spec = AgentSpec(
        job=here.job,
        run_id=here.run_id,
        node=node,
        node_dir=str(here.node_dir(node)),
        disk_dir=str(here.disk_dir(node)),
        log_root=str(here.log_root),
        controller_url=url,
        token_file=str(here.own_token),
        address=address,
        fired_dir=str(here.fired()),
        result_file=str(here.own_result) if here.member else "",
        lost_s=plan.config.machines.lost_s if here.member else None,
        owner_fd=owner,
        grace_s=plan.config.grace_s,
        metrics=plan.config.metrics,
        trace=plan.config.trace,
        python=plan.python,
        code_root=_code_root(plan),
        code_dir=str(here.code_dir),
    )
    file = here.node_dir(node) / "agent.json"
    return Role(
        name=f"agent-{node}",
        argv=(*OWN_PYTHON, "evertrain.agent", str(file)),
        spec=file,
        content=msgspec.json.encode(spec),
        log=here.log(f"agent-{node}"),
        environ={**environ, **plan.devices.get(node, {})},
        descriptors=_passed(owner),
    )


def _code_root(plan: Plan) -> str:
    return str(plan.code_root) if plan.code_root is not None else ""


def url_of(listener: socket.socket) -> str:
    """For the processes of this machine."""
    return f"http://{LOOPBACK}:{listener.getsockname()[1]}"


def _passed(owner: int | None) -> tuple[int, ...]:
    return () if owner is None else (owner,)
