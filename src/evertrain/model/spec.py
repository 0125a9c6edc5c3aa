"""What does each process of a job need to know at its start?

`evertrain run` writes one of these files per process (JSON, mode 0600) and passes its path as the only argument.
The keeper uses the standard library only, so it reads `KeeperSpec` as a plain dict; the field names are the contract.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evertrain.model.config import Config, MetricConfig, TraceConfig

StartMode = Literal["zygote", "parked", "spawn"]
StandbyBarrier = Literal["start", "init"]
"""Where the ranks of a standby wait: before the script, or inside it in `evertrain.init()`."""


class Seats(msgspec.Struct, frozen=True):
    """How many machines make up a job whose nodes join one by one."""

    least: int
    most: int
    """Nodes that train."""
    standby: int = 0

    @property
    def all(self) -> int:
        return self.most + self.standby


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """What the user wants run on every rank."""

    kind: Literal["script", "module", "program"]
    """`script`: a Python file; `module`: as `python -m`; `program`: any executable (`--no-python`), always spawned."""
    target: str
    """As the user typed it: path, module or program."""
    args: tuple[str, ...] = ()


class KeeperSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One node's keeper. Ranks inherit the keeper's environment and working directory, which are the user's."""

    job: str
    run_id: str
    node: str
    node_dir: str
    """Node-local folder in shared memory: socket, pages, slots. Made by the keeper, removed at shutdown."""
    log_dir: str
    start: StartMode
    python: str
    command: Command
    preload: tuple[str, ...] = ()
    local_world_size: int
    """Ranks of this node; with more than one, OMP_NUM_THREADS=1 where unset, as torchrun does."""
    code_root: str = ""
    """The folder that the job's code lies in on this machine; empty: the script's own."""
    owner_fd: int | None = None
    """Read end of the pipe whose other end `evertrain run` holds; end of file means that it is gone."""
    grace_s: float = 25.0
    orphan_limit_s: float = 600.0


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One node's agent."""

    job: str
    run_id: str
    node: str
    node_dir: str
    disk_dir: str
    """Disk tier of this node's checkpoints."""
    log_root: str
    """Folder of the `attempt_<k>/<rank>/` logs."""
    controller_url: str
    token_file: str
    address: str = "127.0.0.1"
    """Where other nodes reach this one; the TCPStore of an attempt is announced under it."""
    fired_dir: str
    """Where drills that have been done are noted, one file each."""
    result_file: str = ""
    """Written when the job has ended, for the `run` of a node that does not serve the job; empty: by the controller."""
    lost_s: float | None = None
    """Without the controller and without progress for so long: end what runs here. None: it is always started again."""
    owner_fd: int | None = None
    grace_s: float = 25.0
    python: str = "python3"
    """The ranks' interpreter, which has torch."""
    metrics: MetricConfig = MetricConfig()
    trace: TraceConfig = TraceConfig()
    code_root: str = ""
    """The folder on this machine that versions of the code take the place of; empty: there is none."""
    code_dir: str = ""
    """Where versions are unpacked."""


class ControllerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The controller of one job."""

    job: str
    run_id: str
    run_dir: str
    log_root: str
    """Folder of the `attempt_<k>/<rank>/` logs."""
    database: str
    token_file: str
    run_folder: str | None = None
    """In shared memory; the result is written there as well: a full disk must not keep a job from ending."""
    listen_fd: int
    """A listening socket that outlives the controller, so that its port never changes."""
    url: str
    nodes: tuple[str, ...]
    """Active nodes in rank order, then standbys; with `seats` the first node only."""
    standby: int = 0
    standby_barrier: StandbyBarrier = "start"
    least: int | None = None
    """Active nodes that the job can do with (MIN of `--nnodes MIN:MAX`); None: it never shrinks."""
    seats: Seats | None = None
    """Nodes join, until all seats are taken; None: all of them are named."""
    node_rank: int | None = None
    """Of the first node, where the user gave it."""
    nproc_per_node: int
    command: Command
    start: StartMode = "zygote"
    mesh: str | None = None
    max_restarts: int | None = None
    """None: as long as there is progress."""
    observe_only: bool = False
    fresh: bool = False
    role: str = "default"
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    virtual_local_rank: bool = False
    """Each rank sees its own device as number 0, as torchrun does with the flag of this name."""
    master_addr: str | None = None
    master_port: int | None = None
    faults: tuple[str, ...] = ()
    owner_fd: int | None = None
    began_time: float | None = None
    """When `evertrain run` began: what it did before there was a controller is start-up, too."""
    code_root: str = ""
    """The folder of the job's code that is captured at the start; empty: none is."""
    code_dir: str = ""
    """Where archives of its versions lie."""
    code_token_file: str = ""
    """Holds the token that may change the code; empty: nobody may."""
    config: Config = Config()
