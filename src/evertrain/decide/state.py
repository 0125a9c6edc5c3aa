"""What does the log say the job is? The words for it; how records change them is `decide.applying`."""

from __future__ import annotations

import msgspec

from evertrain.decide.episode import Communication
from evertrain.decide.memory import Memory
from evertrain.model import decisions as d
from evertrain.model import records as r
from evertrain.model.capture_records import CaptureAsked, HangLocated
from evertrain.model.change_records import Audited, ChangeAsked, ChangeDropped, VersionProven
from evertrain.model.clocks import Clock
from evertrain.model.code import Version
from evertrain.model.decisions import Policy
from evertrain.model.diagnosis import Run, Setting, StageAsked, StageDone
from evertrain.model.exam_records import ExamAsked, ExamOver
from evertrain.model.replays import ReplayAsked, ReplayDone


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One run of all ranks."""

    started: r.AttemptStarted
    ends: dict[int, r.RankEnd] = {}
    ending: r.AttemptEnding | None = None
    told_to_end: bool = False
    """Its ranks got SIGTERM, and may leave with 0 in answer to it."""
    ended: r.AttemptEnded | None = None
    resumed: r.AttemptResumed | None = None
    progress: r.Progress | None = None

    @property
    def number(self) -> int:
        return self.started.attempt

    def alive(self) -> tuple[int, ...]:
        """Ranks not known to have ended."""
        return tuple(rank for rank in self.started.placement if rank not in self.ends)

    def by_node(self) -> dict[str, tuple[int, ...]]:
        """All its ranks, by the node that they were placed on, in the order of the nodes."""
        found: dict[str, list[int]] = {}
        for rank, node in self.started.placement.items():
            found.setdefault(node, []).append(rank)
        return {node: tuple(ranks) for node, ranks in found.items()}

    def alive_by_node(self) -> dict[str, list[int]]:
        """The same by the node that they were placed on; nodes with none are left out."""
        found: dict[str, list[int]] = {}
        for rank, node in self.started.placement.items():
            if rank not in self.ends:
                found.setdefault(node, []).append(rank)
        return found

    def failures(self) -> list[r.RankEnd]:
        """Abnormal ends that were not our own doing, in the order in which they happened."""
        failed = [end for end in self.ends.values() if end.failed]
        return sorted(failed, key=lambda end: (end.failed_time, end.rank))


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """A test on stopped nodes that was asked for."""

    asked: StageAsked
    done: StageDone | None = None


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of stopped nodes that were asked to replay the job at the same time."""

    asked: ReplayAsked
    done: ReplayDone | None = None


class Exam(msgspec.Struct, frozen=True, kw_only=True):
    """Tests of nodes that no incident calls for."""

    asked: ExamAsked
    stages: tuple[Stage, ...] = ()
    over: ExamOver | None = None

    @property
    def accused(self) -> dict[str, str]:
        """By node, what speaks against it."""
        return {n: line for one in self.stages if one.done is not None for n, line in one.done.accused.items()}


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """From the first signal to the step that training had reached before."""

    opened: r.IncidentOpened
    """As corrected by records that came late."""
    located_time: float
    """When the verdict that holds was reached."""
    decisions: tuple[r.Decided, ...] = ()
    """All that was decided about it, oldest first."""
    decided: r.Decided | None = None
    """After which training goes on or ends; None: somebody is asked, or waited for."""
    stages: tuple[Stage, ...] = ()
    """Tests of stopped nodes because of it, oldest first."""
    replays: tuple[Round, ...] = ()
    """Rounds of the replay because of it, oldest first."""
    failover_attempt: int | None = None
    resumed_time: float | None = None
    closed: r.IncidentClosed | None = None

    @property
    def number(self) -> int:
        return self.opened.incident

    @property
    def wait(self) -> d.WaitForNodes | None:
        """The nodes that it is held up for; None where it is for none."""
        if self.decided is not None or self.closed is not None:
            return None
        actions = (action for one in reversed(self.decisions) for action in one.actions)
        return next((action for action in actions if isinstance(action, d.WaitForNodes)), None)


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """A restart that the user asked for."""

    asked: r.RestartRequested
    verified: r.RestartVerified | None = None


class Capture(msgspec.Struct, frozen=True, kw_only=True):
    """A look at all processes that was asked for."""

    asked: CaptureAsked
    located: HangLocated | None = None
    """What it has shown; None: nothing yet, or nothing was to be said of it."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change of what ranks run."""

    asked: ChangeAsked
    dropped: ChangeDropped | None = None
    attempt: int | None = None
    """The first one that carried it out."""


def stops(decided: r.Decided) -> bool:
    return decided.action == "stop" or any(isinstance(action, d.Stop) for action in decided.actions)


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """The job as the log tells it."""

    run: r.RunStarted | None = None
    term: int = 0
    term_time: float = 0.0
    """When this term began. A controller that was away has not waited for anybody before."""
    clock: Clock | None = None
    """By which this term counts."""
    counted_since: float = 0.0
    """The run's clock has not jumped since."""
    attempts: tuple[Attempt, ...] = ()
    """Of this run, oldest first."""
    incidents: dict[int, Incident] = {}
    """Of all runs, by number."""
    open_incidents: tuple[int, ...] = ()
    """Of this run, oldest first."""
    memory: Memory = Memory()
    """What the ladder remembers."""
    policies: dict[str, Policy] = {}
    """By hash, those that decisions were taken by."""
    policy: str = ""
    """The one that holds now."""
    joined: dict[str, r.NodeJoined] = {}
    """Nodes of this run that were not named at its start."""
    roster: tuple[str, ...] = ()
    """Active nodes in rank order, then standbys; empty until enough have joined."""
    standby: int = 0
    """How many of the roster wait."""
    earlier_roster: tuple[str, ...] = ()
    """Of the run before: each node's disk holds the checkpoints of the ranks that it had."""
    nodes: dict[str, r.NodeChanged] = {}
    signals: tuple[r.SignalRaised, ...] = ()
    """Not yet part of an incident."""
    known_signs: dict[str, tuple[str, ...]] = {}
    """By node, keys of the signs that its sensors have reported, the newest last: each is told once, in all runs."""
    asked: tuple[r.AllowAsked | r.DrainAsked, ...] = ()
    """What the user wants of nodes and nobody has decided yet, oldest first."""
    answers: dict[str, r.Decided] = {}
    """By node, what was decided last about such a wish."""
    suspicion: r.HangSuspected | None = None
    captures: tuple[Capture, ...] = ()
    """The newest of this run, oldest first."""
    communication: Communication | None = None
    """The episode of collectives that are stuck or slow."""
    next_episode: int = 1
    next_capture: int = 1
    """Numbers go on over all runs: files are named by them."""
    next_stage: int = 1
    """Of the tests of stopped nodes; numbers go on over all runs."""
    next_replay: int = 1
    """Of the rounds of replays; numbers go on over all runs."""
    takes_replays: bool = False
    """An attempt of this run has asked whether it is a replay."""
    learnt_mesh: str = ""
    """Parallel dimensions, as read off the process groups of this run's ranks; empty: they cannot be."""
    exams: tuple[Exam, ...] = ()
    """The newest of this run, oldest first; only the last one may be under way."""
    next_exam: int = 1
    """Numbers go on over all runs."""
    examined: dict[str, ExamOver] = {}
    """By node, the last one that was not given up, since it came."""
    golden: dict[Setting, Run] = {}
    """The bits of the reference model that enough nodes have agreed on, in all runs."""
    stop: r.StopRequested | None = None
    restarts: tuple[Restart, ...] = ()
    """Of this run, oldest first."""
    versions: dict[int, Version] = {}
    """Of the job, by number."""
    own: int | None = None
    """The version that the files are which this run was called for; None: they have not been captured yet."""
    proven: dict[int, VersionProven] = {}
    changes: dict[str, Change] = {}
    """Of all runs, oldest first."""
    run_changes: tuple[str, ...] = ()
    """Of this run."""
    ran: dict[int, int | None] = {}
    """By attempt of this life, the version that it ran; None: the user's files, not captured yet."""
    audits: tuple[Audited, ...] = ()
    """The newest of them."""
    flushed: r.Flushed | None = None
    stored: tuple[r.StoreCommitted, ...] = ()
    """Of this life, oldest first."""
    ended: r.JobEnded | None = None
    first_attempt: int = 1
    """The first of this life of the job; checkpoints of earlier attempts are void."""
    life: float = 0.0
    """When this life of the job began."""
    is_anew: bool = False
    """Earlier lives are void, those of other event logs as well."""
    next_attempt: int = 1
    best_step: int | None = None
    """Highest absolute step any rank reached in an attempt that is over."""
    lineage: tuple[tuple[int, int], ...] = ()
    """(attempt, step it resumed from; -1: from nothing) for each attempt of this life."""

    @property
    def attempt(self) -> Attempt | None:
        """The newest attempt of this run."""
        return self.attempts[-1] if self.attempts else None

    @property
    def restarts_used(self) -> int:
        """Attempts after the first that a fault made necessary."""
        return sum(attempt.started.restart is None for attempt in self.attempts[1:])

    @property
    def active(self) -> Attempt | None:
        """The attempt whose ranks may still exist."""
        newest = self.attempt
        return newest if newest is not None and newest.ended is None else None

    @property
    def incident(self) -> Incident | None:
        """The incident that is still going on and being dealt with."""
        return self._newest_open(tolerated=False)

    @property
    def tolerated(self) -> Incident | None:
        """The one that is still going on and only watched."""
        return self._newest_open(tolerated=True)

    def _newest_open(self, *, tolerated: bool) -> Incident | None:
        incidents = (self.incidents[number] for number in reversed(self.open_incidents))
        return next((one for one in incidents if one.opened.tolerated is tolerated), None)

    @property
    def exam(self) -> Exam | None:
        """The one that is under way."""
        newest = self.exams[-1] if self.exams else None
        return newest if newest is not None and newest.over is None else None

    @property
    def waiting(self) -> Incident | None:
        """The incident that is held up until nodes come."""
        incidents = (self.incidents[number] for number in reversed(self.open_incidents))
        return next((one for one in incidents if one.wait is not None), None)

    @property
    def closing(self) -> bool:
        """No further attempt will start."""
        if self.stop is not None:
            return True
        incident = self.incident
        return incident is not None and incident.decided is not None and stops(incident.decided)

    def known_nodes(self) -> tuple[str, ...]:
        """All nodes that may speak for this run: who takes part, then who would like to or did."""
        if self.roster:
            return tuple(dict.fromkeys((*self.roster, *self.joined, *self.nodes)))
        return (*self.run.nodes, *self.joined) if self.run is not None else ()

    def kept_out(self) -> frozenset[str]:
        """Nodes that were evicted and that nobody has allowed back."""
        allowed = {one.node for one in self.asked if isinstance(one, r.AllowAsked)}
        return frozenset(node for node in self.memory.blocked if node not in allowed)

    def since(self, time: float) -> float:
        """From when on a deadline counts that began at `time`: a clock that jumps at a takeover makes nobody late."""
        return max(time, self.counted_since)

    def active_nodes(self) -> tuple[str, ...]:
        return self.roster[: len(self.roster) - self.standby]

    def standbys(self) -> tuple[str, ...]:
        """Nodes that wait, in the order in which they joined them."""
        return self.roster[len(self.roster) - self.standby :]

    def usable_standbys(self) -> tuple[str, ...]:
        """Those that have tested themselves, can be heard, and that nothing is held against."""
        held = (self.memory.blocked, self.memory.faults)
        return tuple(
            node
            for node in self.standbys()
            if (seen := self.nodes.get(node)) is not None
            and seen.state == "standby"
            and not any(node in table for table in held)
        )

    def placement(self) -> dict[int, str]:
        """Ranks stay with their node, in the order of the nodes; empty until the nodes are settled."""
        return {rank: node for node, ranks in self.ranks_by_node().items() for rank in ranks}

    def ranks_by_node(self) -> dict[str, tuple[int, ...]]:
        """The same by node, in their order: with thousands of them nobody should search all ranks for those of one."""
        assert self.run is not None
        nproc = self.run.nproc_per_node
        return {
            node: tuple(range(index * nproc, (index + 1) * nproc)) for index, node in enumerate(self.active_nodes())
        }
