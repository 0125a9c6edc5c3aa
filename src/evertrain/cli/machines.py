"""Is this one of several machines, which one, and where is the job served?

As with torchrun the same command runs on every machine. The one at the endpoint's address (or the one with node rank 0,
where ranks are given) is the first node: it serves the job, the others join it. Under `srun` nothing needs to be given:
size, rank and the first node's name are Slurm's.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from evertrain.cli.flags import was_given
from evertrain.decide.joining import node_name
from evertrain.model.errors import TroubleError, UsageError
from evertrain.model.spec import Seats

ELASTIC_PORT, STATIC_PORT = 29400, 29500
"""torchrun's, for a rendezvous backend and for a plain master address."""
SLURM_PORTS = (20000, 10000)
"""First and number: jobs that share a node must not share a port."""
ASK_S, SERVES_S = 5.0, 10.0


@dataclass(frozen=True)
class Machines:
    """A job on several machines, as this one sees it."""

    seats: Seats
    host: str
    """Of the endpoint, as given."""
    port: int
    node_rank: int | None
    """Where it was given."""
    name: str
    """What this node would like to be called."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


def from_flags(args: Namespace, environ: Mapping[str, str], seats: Seats | None) -> Machines | None:
    """What flags and launcher say; None where one machine is the whole job."""
    if args.local_nodes is not None or args.standalone:
        return None
    slurm = _slurm(args, environ)
    if slurm is not None and not was_given(args, "nnodes"):
        seats = _all_of(slurm, args.standby)
    if seats is None:
        return None
    node_rank = args.node_rank if was_given(args, "node_rank") else slurm.node if slurm is not None else None
    host, port = _endpoint(args)
    if not host and slurm is not None:
        host, port = slurm.first, slurm.port
    if not host:
        raise UsageError(
            f"--nnodes {args.nnodes} needs --rdzv-endpoint HOST:PORT on every node, the address of the first one"
        )
    if node_rank is not None and not 0 <= node_rank < seats.all:
        raise UsageError(f"--node-rank {node_rank}: nodes are numbered 0 to {seats.all - 1}")
    return Machines(seats, host, port, node_rank, node_name(environ.get("SLURMD_NODENAME") or socket.gethostname()))


def _endpoint(args: Namespace) -> tuple[str, int]:
    elastic = args.rdzv_backend != "static"
    if args.rdzv_endpoint:
        host, port = endpoint(args.rdzv_endpoint)
        return host or "", port or (ELASTIC_PORT if elastic else STATIC_PORT)
    if was_given(args, "master_addr"):
        return args.master_addr, port_number("--master-port", args.master_port or STATIC_PORT)
    return "", 0


def endpoint(text: str) -> tuple[str | None, int]:
    """Host and port of `host:port`, `host`, `[::1]:port`; port 0: not given."""
    host, _, port = text.rpartition(":") if not text.endswith("]") and ":" in text else (text, "", "")
    return host.strip("[]") or None, port_number("--rdzv-endpoint", port) if port else 0


def port_number(flag: str, value: int | str) -> int:
    if not str(value).isdigit() or not 0 <= int(value) < 65536:
        raise UsageError(f"{flag}: {value!r} is not a port")
    return int(value)


# --- Slurm


@dataclass(frozen=True)
class Slurm:
    """The job step that this process is a task of."""

    nodes: int
    node: int
    first: str
    port: int


def _slurm(args: Namespace, environ: Mapping[str, str]) -> Slurm | None:
    """The step's size and place; None outside `srun`, or where the step has one node."""
    try:
        nodes, node = int(environ["SLURM_STEP_NUM_NODES"]), int(environ["SLURM_NODEID"])
        tasks, job = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_JOB_ID"])
        names = environ["SLURM_STEP_NODELIST"]
    except (KeyError, ValueError):
        return None
    if nodes < 2 or (was_given(args, "nnodes") and args.nnodes in ("1", "1:1")):
        return None
    if tasks != nodes:
        raise UsageError(
            f"srun has started {tasks} tasks on {nodes} nodes; evertrain starts the ranks itself: "
            "srun --ntasks-per-node=1 evertrain run --nproc-per-node …"
        )
    first, size = SLURM_PORTS
    return Slurm(nodes, node, first_host(names), first + job % size)


def _all_of(slurm: Slurm, standby: int) -> Seats:
    """Every node of the step has a seat; the spares are among them."""
    if standby >= slurm.nodes:
        raise UsageError(f"--standby {standby} leaves nothing to train: srun has {slurm.nodes} nodes")
    return Seats(slurm.nodes - standby, slurm.nodes - standby, standby)


def first_host(names: str) -> str:
    """The first of Slurm's host list: `gpu[003-006,9],login` begins with gpu003."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", names)
    assert first is not None
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group())


# --- who serves


def listen(machines: Machines) -> socket.socket | None:
    """The controller's socket where this is the first node; None where it is served elsewhere.

    On every address: nodes may know this one by others than its own processes do. The token keeps strangers out.
    """
    if machines.node_rank is not None:
        return _bound(machines) if machines.node_rank == 0 else None
    if not _is_here(machines.host):
        return None
    try:
        return _bound(machines)
    except TroubleError:
        if _serves_a_job(machines):
            return None
        raise


def _bound(machines: Machines) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", machines.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        return socket.create_server(("", machines.port), backlog=4096)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise TroubleError(
            f"port {machines.port} is taken ({why}); --rdzv-endpoint names another, on every node"
        ) from error


def _is_here(host: str) -> bool:
    """Whether this machine has the address: then it can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        # a name that nobody knows here may be resolved later, by then we are a node that joins
        return host == socket.gethostname()
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False


def _serves_a_job(machines: Machines) -> bool:
    """Whether the port is held by another node of a job on this very machine, which may be at its start."""
    # whoever holds the port for something else answers with something else, or not at all
    connection = http.client.HTTPConnection(machines.host, machines.port, timeout=SERVES_S)
    try:
        connection.request("GET", "/healthz")
        return "job" in json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError, TypeError):
        return False
    finally:
        connection.close()


def own_address(machines: Machines) -> str:
    """The address of this machine that the first node sees; raises `OSError` while there is no way to it."""
    with socket.create_connection((machines.host, machines.port), timeout=ASK_S) as connection:
        return str(connection.getsockname()[0])


def split_devices(nodes: int, devices: int, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """What each of `nodes` on one machine adds to the environment so that no two share a GPU; {} where they must."""
    share = devices // nodes
    if nodes < 2 or share < 1:
        return [{} for _ in range(nodes)]
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in chosen.split(",")] if chosen is not None else list(map(str, range(devices)))
    return [{"CUDA_VISIBLE_DEVICES": ",".join(names[node * share : (node + 1) * share])} for node in range(nodes)]
