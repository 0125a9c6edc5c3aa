"""What is on this node? One `NodeReport` from the keeper's state, the telemetry pages and the checkpoint slots."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import msgspec

from evertrain.agent import failures, losses, replays
from evertrain.agent.watch import Sample, Watch
from evertrain.checkpoint import disk, slots, store
from evertrain.locate import parallel
from evertrain.model.activity import RankActivity
from evertrain.model.copies import Copy, StoreSettings
from evertrain.model.report import (
    AttemptReport,
    Comparison,
    Desired,
    Early,
    Exit,
    Identity,
    NodeReport,
    PageReport,
    RankReport,
    Starter,
)
from evertrain.model.spec import AgentSpec
from evertrain.observe import pages
from evertrain.observe.groups import read_groups
from evertrain.worker import contact, room

TIGHT_BYTES = 256 << 20
"""Below this much free memory no process waits ahead of need."""
_LOOK_EVERY_S = 2.0
_COPIES_EVERY_S = 2.0
"""While ranks run, for whoever asks which steps there are: headers only."""

_OVER = frozenset({"ended", "stuck"})

# a running rank has a readable page within a moment of its start
_UNREADABLE_YET = "nothing written yet"


class NodeView:
    """`look` at the pages as often as you like; `report` when there is somebody to tell.

    Remembers only what cannot change any more: the ends of ranks.
    """

    def __init__(self, spec: AgentSpec) -> None:
        self._spec = spec
        self._node_dir = Path(spec.node_dir)
        self._exits: dict[tuple[int, int, int], Exit] = {}
        # by attempt, rank and pid: a process that died while it waited is replaced under the same attempt
        self._copies: tuple[Copy, ...] = ()
        self._copies_after = -1
        self._next_copies = 0.0
        self._store: StoreSettings | None = None
        self._copies_look = 0
        self._comparisons: dict[int, Comparison] = {}
        self.flushed_step: int | None = None
        self.problems: list[str] = []
        self.env_changed = False
        self._tight = False
        self._next_look = 0.0
        self._watch = Watch(spec.node)
        self._readers: dict[tuple[int, int], pages.Reader] = {}
        self.views: tuple[pages.PageView, ...] = ()
        """What the pages of ranks said at the last look."""
        self._activities: tuple[RankActivity, ...] = ()
        self._alive: tuple[pages.PageView, ...] = ()
        """Of `views`, those of ranks that run."""
        self._running = 0
        self._blind: tuple[str, ...] = ()
        self._mesh: tuple[int, str] = (0, "")
        """The newest attempt whose ranks are in their loop, and the mesh that they have made."""

    @property
    def running_attempt(self) -> int | None:
        """The attempt of which ranks run here; None: of none."""
        return max((view.attempt for view in self.views), default=None) if self._running else None

    @property
    def idle_s(self) -> float:
        """For so long no rank of this node has made progress; endless where none runs, 0 where one cannot be read."""
        if len(self._activities) < self._running:
            return 0.0
        return min((one.still_s for one in self._activities), default=inf)

    @property
    def stands_still(self) -> bool:
        """Whether some rank's page has not changed for a while."""
        return bool(self._activities)

    def leave_out(self, attempt: int, begun: Mapping[int, Sample], ended: Mapping[int, Sample]) -> None:
        """See `Watch`."""
        self._watch.leave_out(attempt, begun, ended)

    def everyone(self, attempt: int, measured: Mapping[int, Sample]) -> tuple[RankActivity, ...]:
        """What each rank of the attempt does that runs here, whether it stands still or not; see `Watch`."""
        return self._watch.everyone((view for view in self._alive if view.attempt == attempt), measured)

    def report(self, state: dict[str, Any] | None, order: Desired | None) -> NodeReport:
        """Everything that is on this node, as of now; times are by its monotonic clock."""
        if state is None:
            return NodeReport(
                node=self._spec.node, address=self._spec.address, blind=("the agent cannot reach its keeper",)
            )
        self._read_copies(state, order)
        self._compare_losses(state, order)
        keeper, starter = state["keeper"], state["starter"]
        return NodeReport(
            node=self._spec.node,
            address=self._spec.address,
            keeper=Identity(keeper["pid"], keeper["start_ticks"], keeper["boot_id"]),
            starter=Starter(
                wanted=starter["wanted"], mode=starter["mode"], state=starter["state"], reason=starter["reason"]
            ),
            early=msgspec.convert(state.get("early", {}), Early),
            attempts=tuple(self._attempt(int(number), attempt) for number, attempt in state["attempts"].items()),
            pages=tuple(map(_page_report, self.views)),
            activities=self._activities,
            copies=self._copies,
            copies_after_attempt=self._copies_after,
            copies_look=self._copies_look,
            env=state.get("env", {}),
            code=(state.get("code") or {}).get("digest", ""),
            comparisons=tuple(self._comparisons.values()),
            flushed_step=self.flushed_step,
            problems=tuple(self.problems[-5:]),
            blind=self._blind,
            env_changed=self.env_changed,
            owner_gone=state["owner_gone"],
            memory_is_tight=self._memory_is_tight(),
            store=self._store,
            replayed=replays.replayed(state, self.page_path),
            mesh=self._mesh[1],
        )

    def page_path(self, attempt: int, rank: int) -> Path:
        if attempt < 0:
            return replays.page_path(self._node_dir, attempt, rank)
        return self._node_dir / "pages" / f"a{attempt}-r{rank}"

    def log_folder(self, attempt: int, rank: int) -> Path:
        if attempt < 0:
            return replays.log_folder(Path(self._spec.log_root), self._spec.node, attempt, rank)
        return Path(self._spec.log_root) / f"attempt_{attempt}" / str(rank)

    def exception_path(self, attempt: int, rank: int) -> Path:
        """In shared memory: a disk that is full must not hide why a rank failed."""
        return Path(f"{self.page_path(attempt, rank)}-exception.json")

    @property
    def slots_dir(self) -> Path:
        return self._node_dir / "slots"

    def in_memory(self, step: int, order: Desired) -> list[Path]:
        """The slots that hold `step`, one a rank; of two runs of the same step the later one counts."""
        found = [slot for slot in slots.list(self.slots_dir) if slot.step == step and slot.rank in order.ranks]
        newest = {slot.rank: Path(slot.path) for slot in sorted(found, key=lambda slot: slot.attempt)}
        return list(newest.values())

    def reread_copies(self) -> None:
        """Forget what was read of the checkpoints: something has changed them."""
        self._copies_after = -1
        self._next_copies = 0.0

    def is_communicating(self, rank: int) -> bool:
        """Whether the newest process of this rank is inside a collective at this moment."""
        attempt = max((number for number, of_rank in self._readers if of_rank == rank), default=None)
        if attempt is None:
            return False
        view, _ = self._readers[attempt, rank].read()
        return view is not None and view.collective.state == "entered"

    def _memory_is_tight(self) -> bool:
        """Between the two marks the answer stays as it was: processes must not come and go with every megabyte."""
        if (now := time.monotonic()) < self._next_look:
            return self._tight
        self._next_look = now + _LOOK_EVERY_S
        free = room.free_bytes(self._spec.node_dir)
        self._tight = free < TIGHT_BYTES or (self._tight and free < 2 * TIGHT_BYTES)
        return self._tight

    def _attempt(self, number: int, attempt: dict[str, Any]) -> AttemptReport:
        return AttemptReport(
            attempt=number,
            phase=attempt["phase"],
            store_port=attempt["store_port"],
            error=attempt["error"] or "",
            ranks=tuple(self._rank(number, int(rank), seen) for rank, seen in attempt["ranks"].items()),
        )

    def _rank(self, attempt: int, rank: int, seen: dict[str, Any]) -> RankReport:
        found = seen["exit"]
        return RankReport(
            rank=rank,
            pid=seen["pid"],
            state=seen["state"],
            killed=seen["killed"],
            exit=self._exit(attempt, rank, seen["pid"], found, seen["killed"]) if found is not None else None,
        )

    def _exit(self, attempt: int, rank: int, pid: int, found: dict[str, Any], killed: bool) -> Exit:
        known = self._exits.get((attempt, rank, pid))
        if known is None:
            failed = found["status"] != 0
            folder = self.log_folder(attempt, rank)
            tail = failures.stderr_tail(folder) if failed and not killed else ""
            # a signal leaves no exception, and what stands in stderr then is older news; but a rank that we killed
            # may have been on its way out with an exception of its own
            looks = failed and (killed or found["status"] > 0)
            known = self._exits[attempt, rank, pid] = Exit(
                status=found["status"],
                time=found["time"],
                core=found["core"],
                error=failures.error_of(self.exception_path(attempt, rank), folder, tail) if looks else None,
                stderr_tail=tail,
            )
        return known

    def look(self, state: dict[str, Any] | None) -> None:
        """Read the page of every rank that was let go."""
        views: list[pages.PageView] = []
        running: list[pages.PageView] = []
        blind: list[str] = []
        unread = 0
        known, self._readers = self._readers, {}
        for number, attempt in state["attempts"].items() if state is not None else ():
            if attempt["phase"] not in ("running", "ended") or replays.is_one(number):
                continue
            for rank, process in attempt["ranks"].items():
                key = (int(number), int(rank))
                reader = known.pop(key) if key in known else pages.Reader(self.page_path(*key))
                self._readers[key] = reader
                view, reason = reader.read()
                if view is None:
                    unread += process["state"] == "running"
                    if process["state"] == "running" and reason != _UNREADABLE_YET:
                        blind.append(f"rank {rank}: {reason}")
                    continue
                views.append(view)
                self.env_changed = self.env_changed or view.env_changed
                if process["state"] == "running":
                    running.append(view)
        for reader in known.values():
            reader.close()
        self.views, self._blind = tuple(views), tuple(blind)
        self._alive = tuple(running)
        self._activities, self._running = self._watch.look(running), len(running) + unread
        self._learn_mesh(running)

    def _learn_mesh(self, running: list[pages.PageView]) -> None:
        """Once an attempt, when its groups have been made."""
        first = min((view for view in running if view.resumed_time > 0), key=lambda view: view.rank, default=None)
        if first is None or first.attempt == self._mesh[0]:
            return
        groups, _ = read_groups(Path(contact.groups_path(str(self.page_path(first.attempt, first.rank)))))
        world_size = max((len(group.members) for group in groups.values()), default=0)
        mesh = parallel.learnt(groups.values(), first.rank, world_size) if world_size else ""
        self._mesh = (first.attempt, mesh)

    def _read_copies(self, state: dict[str, Any], order: Desired | None) -> None:
        """List the checkpoints: for good once nothing writes to them any more, until then as they are just now."""
        if order is None:
            self._copies_after = -1
        elif not _is_settled(state, order):
            self._copies_after = -1
            if (now := time.monotonic()) >= self._next_copies or self._copies_look != order.copies_look:
                self._next_copies = now + _COPIES_EVERY_S
                self._copies = self._listed(order)
        elif self._copies_after != order.last_attempt:
            disk.discard_before(order.first_attempt, self._spec.disk_dir)
            self._copies = self._listed(order)
            self._copies_after = order.last_attempt
        self._copies_look = order.copies_look if order is not None else 0

    def _listed(self, order: Desired) -> tuple[Copy, ...]:
        """Also of ranks that have gone to another node: it may have to get them from here."""
        kept = (*slots.list(self.slots_dir), *disk.list(self._spec.disk_dir))
        newest = max(kept, key=lambda slot: slot.time, default=None)
        if newest is not None:
            # it may be overwritten just now
            self._store = store.settings_in(newest.path) or self._store
        return tuple(
            Copy(rank=slot.rank, step=slot.step, attempt=slot.attempt, world_size=slot.world_size, tier=slot.tier)
            for slot in kept
            if slot.attempt >= order.first_attempt
        )

    def _compare_losses(self, state: dict[str, Any], order: Desired | None) -> None:
        """Each rank once, when it has done again what it had done before."""
        wanted = order.compare if order is not None else None
        if order is None or wanted is None:
            self._comparisons = {}
            return
        self._comparisons = {rank: one for rank, one in self._comparisons.items() if one.later == wanted.later}
        attempt = state["attempts"].get(str(wanted.later), {"ranks": {}})
        for rank in order.ranks:
            process = attempt["ranks"].get(str(rank))
            if process is None or rank in self._comparisons:
                continue
            found = losses.compare(
                wanted,
                rank,
                self._spec.node,
                self.page_path(wanted.earlier, rank),
                self.page_path(wanted.later, rank),
                is_over=process["state"] == "ended",
            )
            if found is not None:
                self._comparisons[rank] = found


def _is_settled(state: dict[str, Any], order: Desired) -> bool:
    """Whether no rank of any attempt that was let go runs on this node any more.

    One that sleeps in the kernel, SIGKILL notwithstanding, never comes back to write anything.
    """
    attempts = {number: one for number, one in state["attempts"].items() if not replays.is_one(number)}
    over = {
        number
        for number, attempt in attempts.items()
        if attempt["phase"] == "ended"
        or (attempt["phase"] == "running" and all(rank["state"] in _OVER for rank in attempt["ranks"].values()))
    }
    if any(attempt["phase"] == "running" and number not in over for number, attempt in attempts.items()):
        return False
    let_go = [str(attempt.attempt) for attempt in order.attempts if attempt.phase != "prepare"]
    return all(number not in attempts or number in over for number in let_go)


def _page_report(view: pages.PageView) -> PageReport:
    absolute = view.abs_step if view.abs_step >= 0 else None
    passed = view.passed_time
    if not passed and absolute is None and view.rel_step > 0 and view.reached < 0:
        # no step has a name: the first one of the attempt is new by definition
        passed = view.resumed_time
    collective = view.collective
    return PageReport(
        rank=view.rank,
        attempt=view.attempt,
        pid=view.pid,
        step=absolute,
        relative_step=view.rel_step,
        phase=view.phase,
        progress_time=view.progress_time,
        resumed_time=view.resumed_time,
        passed_time=passed,
        passed_step=view.passed_step if view.passed_step >= 0 else None,
        loss=view.loss,
        tokens=view.tokens or 0.0,
        step_s=view.step_s or None,
        collective=f"{collective.op} {collective.seq} {collective.state}" if collective.state != "none" else "",
        env_changed=view.env_changed,
        takes_replays=view.takes_replays,
        saves_failed=view.saves_failed,
    )
