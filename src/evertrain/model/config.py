"""Which knobs are there, and what are their defaults? One Struct a topic; durations in seconds.

`--config file.yaml` fills this tree; a key that is not here is refused with the nearest known name (`cli.config`). What
stands in the event log as well (`RestartConfig`, `LadderConfig`, `CodeConfig`) can be read there with keys of other
versions.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec


class RestartConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When a job goes on and when it ends."""

    no_progress_attempts: int = 3
    """Attempts in a row that may end without progress before the job ends."""
    progress_s: float = 60.0
    """Relative steps only: so long must steps have advanced to count as progress. No steps: so long must it run."""
    same_error_limit: int = 2
    """The first failing rank's own exception, so often at the same step with the same type and line, ends the job."""
    exit_deadline_s: float = 300.0
    """One rank has exited with 0: the others may stand without progress for so long before the attempt is ended."""
    leave_s: float = 15.0
    """All scripts are over: so long may a process take for its last steps before it is ended; its work is done."""
    node_return_s: float = 300.0
    """So long may a node that is needed stay away, or a process that nothing ends, before the job ends."""


class HangConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long without a step is too long."""

    still_limit_s: float = 10.0
    """Without a step for so long, and something stands still: act."""
    steps: float = 5.0
    """... but never before this many median steps have passed."""
    busy_limit_s: float = 600.0
    """So long may a rank compute without a step, undeclared, before anything is done about it."""
    start_limit_s: float = 600.0
    """Until the first step of an attempt, standing still: imports from a slow file system, compilation elsewhere."""
    phase_limit_s: float = 1800.0
    """Inside a phase that the script has declared, standing still."""
    suspect_s: float = 3.0
    """Processes are looked at from half the limit on, but not before this."""
    idle_cpu_fraction: float = 0.01
    """CPU use of the whole process tree below which it counts as idle (of one core)."""
    idle_io_bytes_per_s: float = 4096.0
    """... and bytes that it reads and writes a second,"""
    idle_faults_per_s: float = 20.0
    """... and page faults a second."""
    policy: Literal["careful", "paper"] = "careful"
    """`careful`: the first hang restarts, hardware evidence or a repeat evicts. `paper`: the nodes named are evicted at
    once, as ByteRobust does."""


class LadderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to evict a node, and what happens to it then."""

    alerts_to_evict: Annotated[int, msgspec.Meta(ge=1, le=32)] = 2
    """Network alerts of one node,"""
    alert_window_s: float = 300.0
    """... within so long."""
    reading_window_s: float = 600.0
    """A hardware reading or a network alert counts as evidence beside a hang or a crash for so long."""
    repeat_window_s: float = 86400.0
    """The same failure within so long is a repeat."""
    proven_steps: int = 10
    """So many steps past the failing one a restart counts as a success,"""
    proven_s: float = 600.0
    """... or, where steps are not seen, after so long."""
    reattempts: int = 1
    """Plain restarts of one chain of failures after all checks have passed."""
    budget_nodes: Annotated[int, msgspec.Meta(ge=0)] = 1
    """So many nodes of a job may be evicted within the window,"""
    budget_fraction: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """... or this part of its nodes, where that is more."""
    budget_window_s: float = 3600.0
    """Of the two limits above."""
    replace_wait_s: float = 300.0
    """So long a job waits for nodes that it cannot go on without, where the platform may bring some."""
    inspect_limit_s: float = 900.0
    """So long may a verdict source take to answer."""
    hold_s: float = 30.0
    """Before the next start after storage has failed; doubled each time, up to ten minutes."""
    test_every_s: float = 60.0
    """An evicted node is tested so often."""
    quiet_s: float = 600.0
    """It returns when it has passed its test and nothing was seen of it for so long;"""
    human_window_s: float = 604800.0
    """... evicted twice within so long, it returns only by `evertrain node allow`."""


class MachinesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job on several machines."""

    join_s: float = 600.0
    """So long the first node waits for the others, and they for it."""
    last_call_s: float = 30.0
    """With a range of nodes: when MIN have come, so long is another one waited for."""
    lost_s: float = 60.0
    """A node that is silent for so long, while the ranks that wait for it stand still, is lost; one that hears nothing
    from the first node and whose ranks make no progress ends after so long."""
    broken_s: float = 10.0
    """A silent node is lost after so long already where connections to its ranks have broken, or where nothing runs and
    a standby could take its place."""


class PlatformConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where new nodes come from, when the job is short of them."""

    request_command: str = ""
    """A shell command that asks for nodes, as `sbatch standby.sh`; run on the first node, with EVERTRAIN_JOB,
    EVERTRAIN_NODES_WANTED and EVERTRAIN_ENDPOINT in its environment. Empty: you start them."""
    limit_s: float = 60.0
    """So long may it take before it is ended."""


class AgentConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the agents look and talk."""

    heartbeat_s: float = 1.0
    """So often an agent reports when nothing has happened."""
    read_pages_s: float = 0.1
    """So often it looks at the telemetry pages of its ranks."""
    gpu_wait_s: Annotated[float, msgspec.Meta(ge=0, le=300)] = 30.0
    """Before a start, so long at most for processes of the attempt before that are still on a GPU."""


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where checkpoints go from the memory of their own node, and how often."""

    peers: bool = True
    """Keep a copy of each rank's state in the memory of another node, where there are several."""
    round_s: float = 2.0
    """From one such backup to the next it takes at least so long."""
    peer_bytes_per_s: int = 1 << 30
    """A node sends no more than this for backups; restoring after a fault has no limit."""
    disk_every_s: float = 10.0
    """So often a step is written to each node's own disk, unless writing takes more than half of that time."""
    fetch_s: float = 600.0
    """So long may it take a node to get a rank's state from others before an older step is taken."""
    failed_saves_limit: int = 10
    """So many saves of a rank may fail in a row before that is an incident; training goes on."""
    store_keep: int = 3
    """So many of the newest steps stay in the shared store,"""
    store_one_a_day: bool = True
    """... and the first one of each day (UTC)."""
    store_retry_s: float = 30.0
    """After an upload that failed; doubled each time, up to half an hour."""
    store_limit_s: float = 3600.0
    """So long may an upload take before it is given up."""
    store_look_s: float = 60.0
    """So long is the store waited for at the start of a run; after that the event log alone says what it holds."""


class CodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which code is captured, and when a version of it has proven itself."""

    proven_steps: int = 50
    """So many steps with a version make it fit to be gone back to,"""
    proven_s: float = 3600.0
    """... or so much time."""
    recent_s: float = 86400.0
    """A change may be the cause of a failure for so long."""
    within_s: float = 86400.0
    """An update that is not urgent waits so long for the next restart."""
    fetch_s: float = 300.0
    """So long may it take the nodes to get a version before the change is given up."""
    most_bytes: int = 200 << 20
    """What is larger is no code;"""
    most_files: int = 20_000
    """... nor what has more files."""
    exclude: tuple[str, ...] = ()
    """Patterns as in .gitignore of files that are not captured, beside those that .gitignore names and the usual ones
    for secrets and data."""

    @property
    def most_archive_bytes(self) -> int:
        """Of an archive whose files cannot be compressed: they, and for each its name and what else is said of it."""
        return self.most_bytes + 4096 * self.most_files + (1 << 20)


class MetricConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When what training reports about itself is out of the ordinary."""

    jump_factor: Annotated[float, msgspec.Meta(gt=1)] = 5.0
    """A loss or a gradient norm jumps when it is more than so many times the median"""
    jump_window: Annotated[int, msgspec.Meta(ge=5, le=1000)] = 50
    """... of so many steps before it,"""
    jump_needs: Annotated[int, msgspec.Meta(ge=2)] = 20
    """... of which there must be at least so many,"""
    jump_steps: Annotated[int, msgspec.Meta(ge=1)] = 3
    """... and stays there for so many steps in a row."""
    jump_floor: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.02
    """Below this part of what the median once was in this attempt nothing is a jump: a loss that has come down to
    almost nothing is noise."""
    loss_steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    """So many losses in a row that are not finite are a fault; more than one for a script that leaves such a step out
    by itself, and goes on."""
    norm_steps: Annotated[int, msgspec.Meta(ge=1)] = 3
    """So many gradient norms in a row that are not finite are a fault while the loss is finite: loss scaling (fp16)
    brings single ones forth, and skips the step."""
    warm_up_steps: Annotated[int, msgspec.Meta(ge=0)] = 10
    """The first steps of an attempt say nothing about its speed."""
    baseline_steps: Annotated[int, msgspec.Meta(ge=10, le=10_000)] = 50
    """So many steps after those are the speed to go by;"""
    recent_steps: Annotated[int, msgspec.Meta(ge=5, le=1000)] = 10
    """... the last so many are compared with them."""
    slow_below: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.85
    """Training is slow below this part of that speed,"""
    slow_s: Annotated[float, msgspec.Meta(ge=0)] = 10.0
    """... for at least so long,"""
    slow_until: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9
    """... until it is above this part again."""
    traffic_s: float = 10.0
    """No step and no traffic at the node's ports for so long,"""
    traffic_steps: float = 5.0
    """... and for so many median steps: the network may be to blame."""
    tensor_below: float = 0.1
    """Tensor cores that were busy and now are active for less than this part of the time"""
    tensor_s: float = 60.0
    """... for so long, on a GPU that is busy all the same."""
    hot_c: int = 85
    """Where a GPU does not say at which temperature it slows down."""
    tracker_folders: tuple[str, ...] = ()
    """Folders that wandb or TensorBoard write to, for scripts that do not report to us; each node reads its own."""
    loss_names: tuple[str, ...] = (
        "loss", "train/loss", "train_loss", "train_loss_step", "training_loss", "loss/train", "lm loss",
        "train/lm_loss", "loss_metrics/global_avg_loss",
    )  # fmt: skip
    """What the loss may be called in the files of an experiment tracker, the best name first; small and large letters
    are the same."""
    grad_norm_names: tuple[str, ...] = (
        "grad_norm", "train/grad_norm", "grad-norm", "gradient_norm", "train/gradient_norm", "grad_norm/train",
    )  # fmt: skip
    """The same for the gradient norm."""


class TraceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ranks communicate, and how that goes."""

    enabled: bool = True
    """Whether collectives and connections are traced."""
    nccl: bool = True
    """Whether NCCL is given a profiler plugin, which traces what happens inside its collectives."""
    hook_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16
    """Shared memory in which a rank writes down its operations: ten minutes at 200 a second;"""
    writer_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 4
    """... and for what is seen of it from outside. All of a node together take a quarter of the free memory at most."""
    keep_mib: Annotated[int, msgspec.Meta(ge=0)] = 256
    """On disk, the last seconds before each incident; the oldest go first. 0: none are kept."""


class DiagnoseConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tests of stopped nodes, when an attempt has failed and nobody knows why."""

    enabled: bool = True
    """Whether there are any; else the ladder goes on without them."""
    budget_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 120.0
    """So long may all tests together keep the job from its next start."""
    kind: Literal["auto", "dense", "moe"] = "auto"
    """Of the reference model that all nodes compute: `moe` where the mesh of the job has `ep`."""
    replay: bool = True
    """Whether the job's own script is replayed on groups of nodes where nothing else has helped, if it takes part."""
    replay_budget_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 600.0
    """So long may a replay keep the job from its next start,"""
    replay_round_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 180.0
    """... and so long one round of it."""
    replay_steps: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 3
    """So many steps does each group train."""
    replay_layers: Annotated[int, msgspec.Meta(ge=1)] | Literal["auto", "all"] = "auto"
    """So many layers has its model; `auto`: one a pipeline stage."""
    replay_repeats: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 3
    """So often is a phase run at most in which nothing differs, and a suspect tried: more for faults that are rare."""
    returning: bool = True
    """Whether an evicted node has to pass tests before it is a standby again, and each standby is tested when it has
    come; never on a machine on which ranks train."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree."""

    grace_s: float = 25.0
    """From SIGINT / SIGTERM to the end: ranks are told, the newest common step is flushed to disk."""
    restart: RestartConfig = RestartConfig()
    hang: HangConfig = HangConfig()
    machines: MachinesConfig = MachinesConfig()
    platform: PlatformConfig = PlatformConfig()
    agent: AgentConfig = AgentConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    ladder: LadderConfig = LadderConfig()
    code: CodeConfig = CodeConfig()
    metrics: MetricConfig = MetricConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    trace: TraceConfig = TraceConfig()
