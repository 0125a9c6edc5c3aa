"""What do agent and controller tell each other?

Both directions are level-triggered. An agent sends a `Report`: everything that *is* on its node. The controller
answers with a `Desired`: everything that *should be*. Either may be lost or repeated; the next one carries it all
again, so an agent that was away catches up by itself. Each message names the job and the controller's term; an older
term is refused (fencing).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evertrain.model.activity import RankActivity
from evertrain.model.code import CodeOrder
from evertrain.model.collectives import Pulse, Watch
from evertrain.model.copies import (
    Backup,
    Copy,
    Failed,
    Fetch,
    Peer,
    Pinned,
    RoundOrder,
    Save,
    StoreSettings,
    UploadOrder,
    UploadReport,
)
from evertrain.model.diagnosis import Inspected, InspectOrder
from evertrain.model.replays import Replayed, ReplaySettings
from evertrain.model.sensing import SensorState, Sign
from evertrain.model.stacks import CaptureOrder
from evertrain.model.windows import WindowOrder

DISMISSED = 4409
"""Close code of the WebSocket: the run that an agent belongs to is over, or goes on without its node."""


class Identity(msgspec.Struct, frozen=True):
    """One process for ever: a pid alone is used again by the kernel."""

    pid: int
    start_ticks: int
    boot_id: str = ""


class RankError(msgspec.Struct, frozen=True, kw_only=True):
    """The exception that ended a rank, as its launcher or torch's error file recorded it."""

    type: str
    message: str = ""
    traceback: str = ""
    file: str = ""
    line: int = 0
    step: int | None = None
    time: float | None = None
    """When it was recorded: the process may take its time to end."""

    def signature(self) -> str:
        """What makes two failures in one step the same: the type and the line."""
        return f"{self.type} at {self.file}:{self.line}"


class Exit(msgspec.Struct, frozen=True, kw_only=True):
    """How and when the keeper saw a rank end."""

    status: int
    """Exit code, or minus the signal."""
    time: float
    core: bool = False
    error: RankError | None = None
    stderr_tail: str = ""


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One process of one attempt."""

    rank: int
    pid: int
    state: Literal["waiting", "running", "ended", "stuck"]
    killed: bool = False
    """Ended by our own signal."""
    exit: Exit | None = None


class AttemptReport(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt as one keeper knows it."""

    attempt: int
    """Negative: a round of a replay."""
    phase: Literal["preparing", "prepared", "running", "ended"]
    ranks: tuple[RankReport, ...] = ()
    store_port: int | None = None
    error: str = ""


class PageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a running rank says of itself, from its telemetry page."""

    rank: int
    attempt: int
    pid: int
    step: int | None = None
    """Absolute, as the script reports it."""
    relative_step: int = 0
    phase: str = ""
    progress_time: float = 0.0
    resumed_time: float = 0.0
    passed_time: float = 0.0
    passed_step: int | None = None
    loss: float | None = None
    tokens: float = 0.0
    """All of this attempt; 0.0 where the script reports none."""
    step_s: float | None = None
    collective: str = ""
    env_changed: bool = False
    saves_failed: int = 0
    """Checkpoints in a row that could not be saved."""
    takes_replays: bool = False
    """The script has asked for `evertrain.replay_config()`."""


class Compare(msgspec.Struct, frozen=True, kw_only=True):
    """Two attempts that did the same steps; what losses did the ranks report in each?"""

    earlier: int
    later: int
    after: int
    """The step that the later one resumed from."""
    last: int
    """The last step to compare; the earlier attempt had come so far."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first step whose loss was another one when a rank did it again."""

    step: int
    rank: int
    node: str
    before: str
    """In full precision; text, because JSON knows neither NaN nor infinity."""
    again: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The losses of one rank in two attempts."""

    rank: int
    later: int
    """The later one of the two attempts."""
    first_step: int | None = None
    """First and last step that both have a loss of; None: there is none."""
    last_step: int | None = None
    difference: Difference | None = None


class Starter(msgspec.Struct, frozen=True, kw_only=True):
    """How this node starts ranks, and why not as asked."""

    wanted: str = "zygote"
    mode: str = "zygote"
    state: str = "starting"
    reason: str = ""


class Early(msgspec.Struct, frozen=True, kw_only=True):
    """How far the ranks of a standby are that run ahead of their start."""

    state: Literal["", "starting", "waiting", "failed"] = ""
    """`waiting`: in `evertrain.init()`; `failed`: the script cannot, its ranks wait before it; empty: not asked."""
    reason: str = ""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a node has tried about itself."""

    name: str
    passed: bool
    detail: str = ""
    """What was seen; where it has not passed, what to do."""
    is_odd: bool = False
    """It has passed, and yet somebody should look: a reading is unusual, or nothing could be seen."""


class SelfCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a node could take part in the job, as far as it can tell by itself."""

    number: int
    """The order's `check` that it answers."""
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.passed)

    @property
    def odd(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.passed and check.is_odd)


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is on one node."""

    node: str
    address: str = "127.0.0.1"
    keeper: Identity | None = None
    """None while the agent cannot reach its keeper."""
    starter: Starter = Starter()
    early: Early = Early()
    attempts: tuple[AttemptReport, ...] = ()
    pages: tuple[PageReport, ...] = ()
    activities: tuple[RankActivity, ...] = ()
    """Ranks whose pages have stood still for a second or longer."""
    copies: tuple[Copy, ...] = ()
    copies_after_attempt: int = 0
    """`copies` were read after every rank of this attempt (and all before it) had ended; -1: while ranks ran, so that
    any of them may be gone by now. Nothing is resumed by such a list."""
    copies_look: int = 0
    """Of `Desired`: `copies` were read after it was asked for."""
    env: dict[str, str] = {}
    """What the keeper adds to the environment of ranks."""
    code: str = ""
    """Digest of the version that what is prepared here is of; empty: the user's files, in place."""
    code_failed: str = ""
    """Digest of the ordered version, where this node cannot have it;"""
    code_problem: str = ""
    """... and why."""
    comparisons: tuple[Comparison, ...] = ()
    flushed_step: int | None = None
    problems: tuple[str, ...] = ()
    """Troubles that the user should read, one line each."""
    blind: tuple[str, ...] = ()
    env_changed: bool = False
    owner_gone: bool = False
    """The `evertrain run` that started this node's processes no longer lives."""
    memory_is_tight: bool = False
    """Nothing should wait in memory here that is not needed now."""
    transfer_port: int = 0
    """Where this node gives out copies of checkpoints; 0: nowhere yet."""
    pinned: tuple[Pinned, ...] = ()
    backups: tuple[Backup, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    """Process groups of the ranks here, as their newest pinned saves name them; without those of all ranks."""
    disk_tried: Save | None = None
    """The last save of which the writing to disk is over, well or not."""
    failed_fetches: tuple[Failed, ...] = ()
    refused: Save | None = None
    """This node cannot do its part for this save: there is no room, or its copies are gone."""
    copy_problems: tuple[str, ...] = ()
    """What is wrong with copies now, one line each: damaged ones, no room, peers that do not answer."""
    store: StoreSettings | None = None
    upload: UploadReport | None = None
    self_check: SelfCheck | None = None
    """The newest that is over; None: none yet."""
    sensors: tuple[SensorState, ...] = ()
    signs: tuple[Sign, ...] = ()
    """That hold, or were seen within the last minutes."""
    unreachable: tuple[str, ...] = ()
    """Of the nodes that it tries (`Desired.peers`), those that answered before and do not any more."""
    gpus_held: str = ""
    """Which process of an attempt that is over is still on a GPU: until it has gone no other attempt may start here."""
    captured: int = 0
    """Number of the newest capture that is over here."""
    traced: int = 0
    """Ranks here whose collectives and connections are written down."""
    nccl: str = ""
    """How NCCL's own operations are; empty: they are not."""
    pulses: tuple[Pulse, ...] = ()
    """The last seconds of the ranks that are watched; each is told more than once."""
    inspected: Inspected | None = None
    """What came of the test that `Desired.inspect` asks for: it is left out once the controller has noted it."""
    replayed: Replayed | None = None
    """What the newest replay that ranks here take part in has given."""
    mesh: str = ""
    """Parallel dimensions of the newest attempt, as read off its process groups; empty: they cannot be."""


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    """A node's report on its way. All times in it are by the agent's clock, see `model.clocks`."""

    job: str
    run_id: str
    term: int
    """Of the newest controller this agent has obeyed; 0 before the first."""
    time: float
    report: NodeReport


class RankOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank needs to know when it is let go."""

    rank: int
    local_rank: int
    resume_tier: Literal["memory", "disk", "store"] | None = None


class Go(msgspec.Struct, frozen=True, kw_only=True):
    """The second phase of a start: the same for all ranks but for their numbers."""

    master_addr: str
    master_port: int
    world_size: int
    group_rank: int
    group_world_size: int
    local_world_size: int
    restart_count: int
    max_restarts: int
    role: str
    signals_to_handle: str
    virtual_local_rank: bool
    mesh: str | None
    resume: int | None
    reached: int | None
    faults: tuple[str, ...]
    ranks: tuple[RankOrder, ...]
    args: tuple[str, ...] | None = None
    """The script's arguments; None: those of the command line."""
    resume_attempt: int | None = None
    """That saved the step to resume: another attempt's save of the same step may lie beside it."""
    resume_folder: str = ""
    """Of the step to resume, where it comes from the store."""
    store_since: float | None = None
    """Without a step to resume, one that the store has of a life of the job since then will do; None: none will."""
    replay: ReplaySettings | None = None
    """It is no attempt but the replay of one: nothing is resumed or saved."""


class DesiredAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """What should be with one attempt on one node. Attempts that are not listed should not exist."""

    attempt: int
    """Negative: a round of a replay, in which this node's group is by itself."""
    phase: Literal["prepare", "go", "end"]
    ranks: tuple[int, ...]
    store: bool = False
    store_port: int | None = None
    """A port the user fixed; None: any."""
    go: Go | None = None
    signal: int = 9


class Desired(msgspec.Struct, frozen=True, kw_only=True, tag="desired"):
    job: str
    term: int
    attempts: tuple[DesiredAttempt, ...] = ()
    ranks: tuple[int, ...] = ()
    """The ranks placed on this node, whose checkpoints it keeps."""
    last_attempt: int = 0
    """The newest attempt that was ever let go; 0: none yet."""
    first_attempt: int = 1
    """Checkpoints of earlier attempts belong to an earlier life of the job and are dropped."""
    env: dict[str, str] = {}
    """What is added to the environment of ranks."""
    code: CodeOrder | None = None
    """The version that ranks are to be prepared with; None: the user's files, in place."""
    compare: Compare | None = None
    copies_look: int = 0
    """A number that this node has not reported yet asks it to read its copies now."""
    flush_step: int | None = None
    shutdown: bool = False
    discard_checkpoints: bool = False
    keep_all: bool = False
    """With `shutdown`: no common step went to disk; every step that memory still holds does."""
    outcome: str = ""
    exit_code: int = 0
    message: str = ""
    """With `shutdown`: how the job ended."""
    read_pages_s: float = 0.1
    heartbeat_s: float = 1.0
    gpu_wait_s: float = 30.0
    """So long processes of an attempt that is over are waited for that are still on a GPU."""
    eager: bool = False
    """Report every change of a page at once: something waits for a step."""
    round: RoundOrder | None = None
    """None: it is not known yet what is needed, so nothing changes."""
    fetches: tuple[Fetch, ...] = ()
    upload: UploadOrder | None = None
    """None: an upload that is under way is given up."""
    check: int = 0
    """A number that this node has not answered yet asks it to test itself now; 0: nothing is asked. Negative: it wants
    to join, and only the machine is tested: how ranks are started and whom it reaches shows afterwards."""
    reach: tuple[Peer, ...] = ()
    """Other nodes that it should be able to reach; part of the test."""
    peers: tuple[Peer, ...] = ()
    """Other nodes that it should try to reach all the time."""
    early: Go | None = None
    """The ranks of this standby are to run ahead of their start, as far as `evertrain.init()`; what is not known of
    them yet (all numbers but the local ones, addresses, what to resume) is empty here."""
    capture: CaptureOrder | None = None
    """Look at the processes now; None: nothing is asked."""
    watch: Watch | None = None
    """Ranks whose seconds are to be told (`NodeReport.pulses`)."""
    windows: tuple[WindowOrder, ...] = ()
    """Read the trace rings now."""
    inspect: InspectOrder | None = None
    """Test this machine now; None: a test that runs is ended."""
