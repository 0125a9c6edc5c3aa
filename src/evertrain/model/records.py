"""What is worth remembering of a job? The event log, one frozen record a line.

The controller's whole knowledge is a fold over these records (`decide.applying`), so a controller that died is rebuilt
by reading them again, and any incident can be replayed in a test. A record is written before it is acted on.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from evertrain.model.capture_records import CaptureAsked, HangLocated
from evertrain.model.change_records import Audited, ChangeAsked, ChangeDropped, VersionKept, VersionProven
from evertrain.model.clocks import Clock
from evertrain.model.collective_records import CauseFound, CollectivesOdd, CollectivesWell
from evertrain.model.collectives import Component, Step
from evertrain.model.decisions import ActionName, AnyAction, AnyEvent, Policy
from evertrain.model.diagnosis import StageAsked, StageDone
from evertrain.model.exam_records import ExamAsked, ExamOver
from evertrain.model.record import Record as Record
from evertrain.model.replays import ReplayAsked, ReplayDone
from evertrain.model.report import Difference, Identity, RankError
from evertrain.model.spec import Seats
from evertrain.model.stacks import LocatedKind


class RunStarted(Record, frozen=True, kw_only=True):
    """`evertrain run` was called; a job that is run again goes on in the same log."""

    run_id: str
    nodes: tuple[str, ...]
    """Active nodes in rank order, then standbys; with `seats` those that are there from the start."""
    standby: int
    nproc_per_node: int
    fresh: bool
    """Nothing of earlier runs is resumed: asked for, or the job had completed."""
    forgets: bool = False
    """`--fresh`: nothing is held against a node any more. A job that is run again after its end does not forget."""
    start: str
    command: str
    mesh: str | None = None
    max_restarts: int | None = None
    observe_only: bool = False
    least: int | None = None
    """The job may go on with so few nodes; None: with no fewer than it has."""
    seats: Seats | None = None
    """The other nodes join; None: all are named."""
    node_rank: int | None = None
    """Of the first node, where the user gave it."""
    began_time: float | None = None
    """When the command began, some time before the first controller could write this."""


class NodeJoined(Record, frozen=True, kw_only=True):
    """`evertrain run` was called on another machine; by the same name it may come back."""

    node: str
    instance: str
    """Of that call."""
    node_rank: int | None = None
    """Where the user gave it."""


class NodesSettled(Record, frozen=True, kw_only=True):
    """Enough nodes have joined: who holds which ranks is settled for this run."""

    nodes: tuple[str, ...]
    """Active nodes in rank order, then standbys."""
    standby: int


class TermStarted(Record, frozen=True, kw_only=True):
    """A controller took over. Messages of older terms are void."""

    term: int
    clock: Clock | None = None
    """By which it counts: its predecessor's, or one that may have jumped."""


class AttemptStarted(Record, frozen=True, kw_only=True):
    """All nodes had prepared; every rank may go."""

    attempt: int
    restart_count: int
    placement: dict[int, str]
    keepers: dict[str, Identity]
    master_addr: str
    master_port: int
    resume: int | None
    tiers: dict[int, Literal["memory", "disk", "store"]]
    reached: int | None
    """The highest step any rank of any earlier attempt had done."""
    restart: str | None = None
    """The restart that was asked for and that this is: what the attempt is there for stands in it."""
    resume_attempt: int | None = None
    """The attempt that saved what this one goes on from."""
    passed_over: tuple[str, ...] = ()
    """Why it does not go on from a later step, one line each."""
    folder: str = ""
    """Of the step in the store that it resumes."""
    version: int | None = None
    """What its ranks run; None: the files of the user as they are, which have not been captured yet."""
    code: str = ""
    """Digest of the version that its ranks run from a folder of its own; empty: in place."""
    change: str | None = None
    """The change that it carries out."""


class RankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one rank of an attempt ended."""

    rank: int
    node: str
    pid: int
    status: int | None
    """Exit code, or minus the signal; None when the keeper was lost with the rank."""
    ended_time: float
    """When its keeper saw it; order among ranks is decided by it."""
    killed: bool = False
    """By us: it says nothing about a fault."""
    follower: bool = False
    """Ended by a lost connection or a collective's error: a victim, never the cause."""
    error: RankError | None = None

    @property
    def failed(self) -> bool:
        """An abnormal end that was not our doing; also of a rank that we killed when it was leaving by itself."""
        return self.status != 0 and (not self.killed or self.error is not None)

    @property
    def failed_time(self) -> float:
        """When it went wrong: an exception comes before the end of its process."""
        recorded = self.error.time if self.error is not None else None
        return self.ended_time if recorded is None else min(recorded, self.ended_time)


class RanksEnded(Record, frozen=True, kw_only=True):
    attempt: int
    ends: tuple[RankEnd, ...]


Source = Literal["exit", "hang", "lost", "signal", "metrics", "verification", "saves", "communication"]
"""What an incident was seen by."""


class IncidentOpened(Record, frozen=True, kw_only=True):
    incident: int
    attempt: int
    fault_time: float
    cause: str
    category: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    confidence: float
    evidence: tuple[str, ...]
    step: int | None
    source: Source = "exit"
    tolerated: bool = False
    """Named and watched; nothing is done about it."""
    located: LocatedKind | Literal[""] = ""
    """What the stacks say it is; empty: nobody has looked at them."""
    group: tuple[int, ...] = ()
    """The parallel group that the odd ranks share, where that is known,"""
    group_nodes: tuple[str, ...] = ()
    """... and the nodes that would have to go with it."""
    captures: tuple[int, ...] = ()
    """By their numbers, in which the stacks can be seen."""
    component: Component | Literal[""] = ""
    """What the records of collectives say it is; empty: they were not asked, or name nobody."""
    links: tuple[tuple[int, int], ...] = ()
    """Senders and receivers, where only their connection is odd; both are named if it cannot be seen which it is."""
    path: tuple[Step, ...] = ()
    """Along which the others wait for them."""


class IncidentCorrected(Record, frozen=True, kw_only=True):
    """A record that came late changed the verdict."""

    incident: int
    fault_time: float
    cause: str
    category: str
    ranks: tuple[int, ...]
    nodes: tuple[str, ...]
    confidence: float
    evidence: tuple[str, ...]
    source: Source | None = None
    """None: the same."""
    component: Component | Literal[""] | None = None
    """... as well as these."""
    links: tuple[tuple[int, int], ...] | None = None
    path: tuple[Step, ...] | None = None


class AttemptEnding(Record, frozen=True, kw_only=True):
    """Every rank that still runs is to end."""

    attempt: int
    signal: int
    because: str
    completed: bool = False
    """Every rank has come to the end of its script; what still runs only fails to leave."""
    restart: str | None = None
    """The user asked for this restart: no fault, and no attempt that failed."""


class AttemptEnded(Record, frozen=True, kw_only=True):
    """No rank of the attempt exists any more."""

    attempt: int
    outcome: Literal["completed", "failed", "stopped", "restarted"]
    step: int | None
    """Highest absolute step of any rank."""
    relative_step: int
    progress: bool
    loss_is_finite: bool = True
    """Of what the ranks reported last."""
    takes_replays: bool = False
    """The script has asked whether it is a replay, so it can be replayed."""
    mesh: str = ""
    """As read off its process groups; empty: it cannot be."""


class PolicyAdopted(Record, frozen=True, kw_only=True):
    """By which the decisions that follow are taken."""

    hash: str
    policy: Policy


class Decided(Record, frozen=True, kw_only=True):
    """What the ladder makes of an event; written before anything of it is done."""

    incident: int | None = None
    """None: it is about a node only."""
    action: ActionName
    """The strongest of the actions."""
    because: str
    event: AnyEvent | None = None
    """None: a decision of an older version."""
    actions: tuple[AnyAction, ...] = ()
    policy: str = ""
    """Hash of the policy that held."""


class AttemptResumed(Record, frozen=True, kw_only=True):
    """Every rank is back in its training loop with its state restored."""

    attempt: int
    resumed_time: float
    takes_replays: bool = False
    """As at the attempt's end,"""
    mesh: str = ""
    """... which not every attempt comes to."""


class IncidentClosed(Record, frozen=True, kw_only=True):
    incident: int
    first_new_step: int | None
    passed_time: float | None
    """When the slowest rank had done a step higher than `reached`; None: another fault or the end came before."""


class Progress(Record, frozen=True, kw_only=True):
    """A mark now and then, so that a controller that takes over knows how far the job had come."""

    attempt: int
    step: int | None
    relative_step: int
    progress_time: float
    tokens: float = 0.0
    """Of all ranks in this attempt; 0.0 where the script reports none."""


class NodeChanged(Record, frozen=True, kw_only=True):
    node: str
    state: Literal["joining", "standby", "active", "evicted", "lost", "unusable"]
    because: str


class AllowAsked(Record, frozen=True, kw_only=True):
    """The user lets a node back; where no controller served the job, the next run heeds it."""

    node: str
    because: str


class DrainAsked(Record, frozen=True, kw_only=True):
    """The user wants a node out of the job."""

    node: str
    because: str


class SignalRaised(Record, frozen=True, kw_only=True):
    """Somebody saw a sign of trouble on a node."""

    node: str
    signal: str
    evidence: str
    key: str = ""
    """Of the sign that an own sensor has reported; empty: somebody else has told."""
    attempt: int | None = None
    """That it is about; None: about the machine, whatever runs."""


class HangSuspected(Record, frozen=True, kw_only=True):
    """No step for a while. It is looked at more closely; nothing else follows from it."""

    attempt: int
    hang: str
    ranks: tuple[int, ...]
    evidence: tuple[str, ...]


class HangCleared(Record, frozen=True, kw_only=True):
    """Training went on by itself."""

    attempt: int


class StopRequested(Record, frozen=True, kw_only=True):
    signal: int
    because: str


class RestartRequested(Record, frozen=True, kw_only=True):
    """The user wants `attempt` ended and the next one to go on as told here."""

    restart: str
    """Its name, given by who asked: asking twice for one restart is asking once."""
    attempt: int
    from_step: int | None = None
    verify: int | None = None
    """So many of the last steps are to be repeated, and their losses compared."""


class RestartVerified(Record, frozen=True, kw_only=True):
    """The steps that a restart was to repeat are done again, or never will be."""

    restart: str
    attempt: int
    first_step: int | None = None
    """First and last step of which losses were compared; None: there was nothing to compare."""
    last_step: int | None = None
    ranks: int = 0
    """Of so many ranks."""
    difference: Difference | None = None
    problem: str = ""
    """Why nothing could be compared."""


class Flushed(Record, frozen=True, kw_only=True):
    """The newest common step went from memory to disk on every node; None: there was none, or a node failed."""

    step: int | None
    problems: tuple[str, ...] = ()


class StoreCommitted(Record, frozen=True, kw_only=True):
    """A step has come to exist in the shared store."""

    url: str
    """Of the store, as the script gave it."""
    folder: str
    """Of the step."""
    attempt: int
    """That saved it."""
    step: int
    world_size: int
    bytes: int
    seconds: float
    """From the order to write to the commit."""


class JobEnded(Record, frozen=True, kw_only=True):
    state: Literal["done", "failed", "stopped"]
    exit_code: int
    message: str


AnyRecord = (
    RunStarted
    | NodeJoined
    | NodesSettled
    | TermStarted
    | AttemptStarted
    | RanksEnded
    | IncidentOpened
    | IncidentCorrected
    | AttemptEnding
    | AttemptEnded
    | PolicyAdopted
    | Decided
    | AttemptResumed
    | IncidentClosed
    | Progress
    | NodeChanged
    | AllowAsked
    | DrainAsked
    | SignalRaised
    | HangSuspected
    | HangCleared
    | CaptureAsked
    | HangLocated
    | CollectivesOdd
    | CauseFound
    | CollectivesWell
    | StageAsked
    | StageDone
    | ReplayAsked
    | ReplayDone
    | ExamAsked
    | ExamOver
    | StopRequested
    | RestartRequested
    | VersionKept
    | ChangeAsked
    | ChangeDropped
    | VersionProven
    | Audited
    | RestartVerified
    | Flushed
    | StoreCommitted
    | JobEnded
)
