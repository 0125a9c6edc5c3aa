"""What exactly is to be run? The flags, checked as a whole: whatever cannot be right is refused here, in one line.

Nothing has been started or written when this is done.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evertrain.cli import code, config, console, identity, machines, mesh, sizes, torch_version
from evertrain.cli.flags import WITHOUT_EFFECT, was_given
from evertrain.cli.machines import Machines
from evertrain.model.config import Config
from evertrain.model.errors import UsageError
from evertrain.model.spec import Command, StandbyBarrier, StartMode
from evertrain.worker import faults


@dataclass(frozen=True, kw_only=True)
class Plan:
    job: str
    command: Command
    named: bool
    """Whether the user named the job."""
    nodes: sizes.Nodes
    machines: Machines | None
    """Where the job has nodes on several machines."""
    devices: Mapping[str, dict[str, str]]
    """By node, what it adds to the environment so that the nodes of one machine share its GPUs out."""
    nproc: int
    """Ranks of each node."""
    start: StartMode
    standby_barrier: StandbyBarrier
    python: str
    preload: tuple[str, ...]
    mesh: str | None
    max_restarts: int | None
    faults: tuple[str, ...]
    role: str
    signals_to_handle: str
    virtual_local_rank: bool
    """Names of the signals that stop the job, as given."""
    master_addr: str | None
    master_port: int | None
    local_addr: str | None
    listen_port: int
    """Of the controller; 0: any."""
    token_file: Path | None
    root: Path
    """Where job folders lie."""
    log_dir: Path | None
    code_root: Path | None
    """The folder that holds the job's code on this machine; None: there is none that could be captured."""
    console: console.Console
    observe_only: bool
    fresh: bool
    detach: bool
    config: Config
    notes: tuple[str, ...]
    """Lines for the user: flags that were given and have no effect."""

    @property
    def world_size(self) -> int:
        return self.nodes.active * self.nproc

    @property
    def stop_signals(self) -> frozenset[signal.Signals]:
        named = (name.strip() for name in self.signals_to_handle.split(","))
        return frozenset({signal.SIGINT, signal.SIGTERM, *(signal.Signals[name] for name in named if name)})


def from_flags(args: Namespace, environ: Mapping[str, str]) -> Plan:
    _refuse_what_cannot_be(args)
    settings = config.from_flags(args)
    command = _command(args)
    python = interpreter(args.python, environ)
    several = machines.from_flags(args, environ, sizes.seats(args))
    nodes = sizes.joining(several.seats, several.name) if several is not None else sizes.nodes(args)
    here = len(nodes.names)
    nproc = sizes.ranks_per_node(args.nproc_per_node, python, environ, here)
    devices = machines.split_devices(here, sizes.count_gpus(environ), environ)
    world_size = nodes.active * nproc
    master_addr, master_port, listen_port = _addresses(args, several)
    code_root = code.root(args.code, command, Path.cwd())
    return Plan(
        job=identity.checked(args.rdzv_id) if args.rdzv_id is not None else identity.default(command),
        named=args.rdzv_id is not None,
        command=command,
        nodes=nodes,
        machines=several,
        devices=dict(zip(nodes.names, devices, strict=True)),
        nproc=nproc,
        start="spawn" if command.kind == "program" else args.start,
        standby_barrier=_standby_barrier(args, command, nodes),
        python=python,
        preload=tuple(name.strip() for name in args.preload.split(",") if name.strip()),
        mesh=mesh.check(args.mesh, world_size) if args.mesh is not None else None,
        max_restarts=args.max_restarts,
        faults=_faults(args.inject, world_size, nodes),
        role=args.role,
        signals_to_handle=_checked_signals(args.signals_to_handle),
        virtual_local_rank=_virtual_local_rank(args, nproc, environ),
        master_addr=master_addr,
        master_port=master_port,
        local_addr=args.local_addr,
        listen_port=listen_port,
        token_file=Path(args.token_file) if args.token_file else None,
        root=Path(args.run_dir or environ.get("EVERTRAIN_RUN_DIR") or ".evertrain").absolute(),
        log_dir=Path(args.log_dir).absolute() if args.log_dir and args.log_dir != os.devnull else None,
        code_root=code_root,
        console=console.from_flags(args, environ),
        observe_only=args.observe_only,
        fresh=args.fresh,
        detach=args.detach,
        config=settings,
        notes=(*_notes(args, python), *code.notes(args.code, command, code_root)),
    )


def interpreter(asked: str | None, environ: Mapping[str, str]) -> str:
    """The Python of the ranks: the one asked for, else the active environment's, else our own."""
    if asked is not None:
        found = shutil.which(asked)
        if found is None:
            raise UsageError(f"--python {asked}: no such interpreter")
        return os.path.abspath(found)
    if chosen := environ.get("PYTHON_EXEC"):
        if (found := shutil.which(chosen)) is None:
            raise UsageError(f"PYTHON_EXEC={chosen}: no such interpreter")
        return os.path.abspath(found)
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        candidate = os.path.join(environ.get(variable, ""), "bin", "python")
        if environ.get(variable) and os.access(candidate, os.X_OK):
            return candidate
    return sys.executable


def _standby_barrier(args: Namespace, command: Command, nodes: sizes.Nodes) -> StandbyBarrier:
    if args.standby_barrier == "init" and command.kind == "program":
        raise UsageError("--standby-barrier init: a program has no evertrain.init() to wait in")
    if args.standby_barrier == "init" and not nodes.standby:
        raise UsageError("--standby-barrier init: there is no spare node; --standby S asks for some")
    barrier: StandbyBarrier = args.standby_barrier
    return barrier


def _refuse_what_cannot_be(args: Namespace) -> None:
    if args.max_restarts is not None and args.max_restarts < 0:
        raise UsageError(f"--max-restarts {args.max_restarts}: 0 or more; leave it out for no limit")
    if args.no_python and args.module:
        raise UsageError("--no-python and --module exclude each other")
    if args.run_path and not os.path.isabs(args.training_script):
        raise UsageError(f"--run-path {args.training_script}: an absolute path is needed")
    # accepted in silence this would change where a rank computes
    if args.numa_binding is not None:
        raise UsageError("--numa-binding is not supported by this version; `numactl` before the command binds all")


def _command(args: Namespace) -> Command:
    target, arguments = args.training_script, tuple(args.training_script_args)
    if args.module:
        return Command(kind="module", target=target, args=arguments)
    if args.no_python and not args.run_path:
        if shutil.which(target) is None:
            raise UsageError(f"no such program: {target}")
        return Command(kind="program", target=target, args=arguments)
    if not os.path.exists(target):
        raise UsageError(f"no such script: {target}")
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise UsageError(f"{target} is a folder without __main__.py, not a script")
    return Command(kind="script", target=target, args=arguments)


def _addresses(args: Namespace, several: Machines | None) -> tuple[str | None, int | None, int]:
    """MASTER_ADDR and MASTER_PORT where the user fixed them, and the controller's port."""
    if args.standalone:
        return None, None, 0
    fixed = machines.port_number("--master-port", args.master_port) if args.master_port is not None else None
    if several is not None:
        # without an endpoint master address and port are where the job is served
        return None, fixed if args.rdzv_endpoint else None, several.port
    host, port = machines.endpoint(args.rdzv_endpoint) if args.rdzv_endpoint else (None, 0)
    if args.rdzv_backend != "static":
        return None, None, port
    master_addr = args.master_addr if was_given(args, "master_addr") else None
    # torchrun: with the static backend the endpoint is the master's address
    return host or master_addr, port or fixed, 0


def _checked_signals(text: str) -> str:
    for name in filter(None, (part.strip() for part in text.split(","))):
        if name not in signal.Signals.__members__:
            raise UsageError(f"--signals-to-handle: there is no signal {name!r}")
        if name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"--signals-to-handle: {name} cannot be handled")
    return text


def _virtual_local_rank(args: Namespace, nproc: int, environ: Mapping[str, str]) -> bool:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if args.virtual_local_rank and visible is not None and len(visible.split(",")) < nproc:
        raise UsageError(f"--virtual-local-rank: {nproc} ranks need {nproc} devices; CUDA_VISIBLE_DEVICES={visible}")
    return bool(args.virtual_local_rank)


def _faults(texts: list[str], world_size: int, nodes: sizes.Nodes) -> tuple[str, ...]:
    for text in texts:
        try:
            fault = faults.parse(text)
        except ValueError as error:
            raise UsageError(f"--inject: {error}") from error
        if not fault.on_node and fault.rank >= world_size:
            raise UsageError(f"--inject {text}: ranks are numbered 0 to {world_size - 1}")
        if fault.on_node and (why := _no_such_node(fault.node or "", nodes)):
            raise UsageError(f"--inject {text}: {why}")
    return tuple(texts)


def _no_such_node(node: str, nodes: sizes.Nodes) -> str:
    """Why there is no node of this name or number; the names of other machines are not known yet."""
    if node.isdigit():
        return "" if int(node) < nodes.all else f"nodes are numbered 0 to {nodes.all - 1}"
    if len(nodes.names) < nodes.all or node in nodes.names:
        return ""
    return f"nodes are {', '.join(nodes.names)}"


def _notes(args: Namespace, python: str) -> tuple[str, ...]:
    version = torch_version.note(python)
    without_effect = tuple(
        f"--{name.replace('_', '-')} has no effect ({why})"
        for name, why in WITHOUT_EFFECT.items()
        if was_given(args, name)
    )
    return without_effect if version is None else (*without_effect, version)
