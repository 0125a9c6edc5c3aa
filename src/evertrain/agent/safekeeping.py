"""What does an agent do so that its ranks' state outlives rank, node and job?

It pins the saves that a round is about, says what they consist of, keeps copies for other nodes, writes to disk, gives
out what others ask for, and gets what its own ranks lack. All of it goes on beside training, in threads that give way
to it; only a fetch, for which ranks wait, is in a hurry. The order says what should be, so an agent that was killed in
the middle begins again with what is left: the pins, and backups that are whole.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from evertrain.agent.fetching import Fetching
from evertrain.agent.pulling import NoRoom, pull
from evertrain.checkpoint import disk, slots
from evertrain.checkpoint.backups import Shelf
from evertrain.checkpoint.heads import Damaged, Gone
from evertrain.checkpoint.slots import SlotInfo
from evertrain.checkpoint.transfer import Client, Refused, Server, Stop, Stopped
from evertrain.model.copies import Failed, Fetch, Peer, Pinned, Pull, RoundOrder, Save
from evertrain.model.report import Desired
from evertrain.model.spec import AgentSpec
from evertrain.worker import pins
from evertrain.worker.pins import Pins

_log = logging.getLogger(__name__)

_NICE = 10
_LOOK_EVERY_S = 1.0
"""Pinned saves that are there are looked at so often: one may have been overwritten where memory was too small."""
_LOOK_FOR_DAMAGE_S = 0.1
_TRY_AGAIN_S = 1.0
_WATCHFUL_S = 30.0
"""After an attempt has started its ranks load; what they find can be seen until they save for the first time."""
_MOST_PROBLEMS = 5

Done = TypeVar("Done")


class Safekeeping:
    def __init__(
        self,
        spec: AgentSpec,
        token: str,
        *,
        on_change: Callable[[], None],
        on_copies: Callable[[], None],
        is_quiet: Callable[[int], bool],
    ) -> None:
        """`on_change`: there is something to report; `on_copies`: copies have come to be that were not listed.

        `is_quiet`: whether a rank communicates nothing at this moment.
        """
        node_dir = Path(spec.node_dir)
        self._spec = spec
        self._token = token
        self._on_change = on_change
        self._on_copies = on_copies
        self._slots_dir = str(node_dir / "slots")
        self._shelf = Shelf(self._slots_dir, spec.disk_dir, str(node_dir / "backups"))
        self._server = Server(self._shelf, spec.job, token, is_quiet)
        self._port = 0
        self._term = 0
        self._round: RoundOrder | None = None
        self._fetches: tuple[Fetch, ...] = ()
        self._bringing: Fetch | None = None
        self._brought: set[tuple[int, Save]] = set()
        self._pins = pins.read(self._slots_dir) or pins.NOTHING
        self._copies = self._pinned_copies()
        """Of pinned saves, on this node."""
        self._next_look = 0.0
        self._last_attempt = -1
        self._watchful_until = self._next_damage = 0.0
        self._shelf.clean()
        self._backups = self._shelf.kept()
        self._failed: dict[tuple[int, Save], Failed] = {}
        self._refused: Save | None = None
        self._disk_tried: Save | None = None
        self._problems: dict[str, str] = {}
        """By what they are about: a problem goes when that goes well."""
        self._background_work, self._disk_work, self._fetch_work = asyncio.Event(), asyncio.Event(), asyncio.Event()
        # ranks need the cores; a thread that gives way for good cannot be used for anything urgent
        self._gentle = ThreadPoolExecutor(2, "gentle", initializer=give_way)
        self._stop_pull, self._stop_fetch = Stop(), Stop()
        self.disk_lock = asyncio.Lock()
        """One writes to the node's disk at a time."""

    async def run(self) -> None:
        """Never returns."""
        self._port = await self._server.start(self._spec.address)
        self._on_change()
        try:
            await asyncio.gather(self._background(), self._disk(), self._fetch())
        finally:
            self._stop_pull.set()
            self._stop_fetch.set()
            self._gentle.shutdown(wait=False, cancel_futures=True)
            await self._server.stop()

    # -- orders and reports ------------------------------------------------------------------------------------------

    def obey(self, order: Desired) -> None:
        self._term = self._server.term = order.term
        if order.round is not None and order.round != self._round:
            self._take_round(order.round)
        self._fetches = order.fetches
        if self._bringing is not None and not any(_goes_on(self._bringing, one) for one in order.fetches):
            self._stop_fetch.set()
        if self._fetches:
            self._stop_pull.set()
            self._fetch_work.set()
        if order.last_attempt != self._last_attempt:
            self._last_attempt = order.last_attempt
            self._failed.clear()
            self._brought.clear()
            self._watchful_until = time.monotonic() + _WATCHFUL_S

    def _take_round(self, wanted: RoundOrder) -> None:
        before, self._round = self._round, wanted
        self._server.bytes_per_s = max(1, wanted.bytes_per_s)
        self._pin(Pins(wanted.kept, wanted.wanted))
        if before is None or before.pulls != wanted.pulls or before.backups != wanted.backups:
            self._stop_pull.set()
        self._background_work.set()
        if wanted.disk is not None:
            self._disk_work.set()

    def _pin(self, wanted: Pins) -> None:
        if wanted == self._pins:
            return
        try:
            os.makedirs(self._slots_dir, mode=0o700, exist_ok=True)
            pins.write(self._slots_dir, wanted)
        except OSError as error:
            self._tell("pins", f"no save can be kept for a backup: {error}")
            return
        self._tell("pins", "")
        self._pins = wanted
        self._next_look = 0.0

    def look(self) -> None:
        """A turn of the agent's loop: which pinned saves are there?"""
        now = time.monotonic()
        if self._next_damage <= now < self._watchful_until:
            self._next_damage = now + _LOOK_FOR_DAMAGE_S
            self._look_for_damage()
        if self._pins.wanted is None and now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        found = self._pinned_copies()
        if found != self._copies:
            self._copies = found
            self._background_work.set()
            self._on_change()

    def _look_for_damage(self) -> None:
        """A rank that finds a copy damaged says so in the copy; the next save may go there."""
        in_memory, on_disk = slots.found_damaged(self._slots_dir), disk.found_damaged(self._spec.disk_dir)
        for where, headers in (("in memory", in_memory), ("on disk", on_disk)):
            for one in headers:
                line = f"the copy {where} of step {one.step} of rank {one.rank} is damaged and is not used"
                self._tell(f"damaged {where} {one.rank} {one.attempt} {one.step}", line)

    def _pinned_copies(self) -> tuple[SlotInfo, ...]:
        """One a rank and save, in memory where it is there."""
        if self._pins == pins.NOTHING:
            return ()
        listed = self._shelf.turning()
        saves: dict[int, set[Save]] = {}
        for copy in listed:
            saves.setdefault(copy.rank, set()).add(copy.save)
        wanted = {rank: self._pins.of(of_rank) for rank, of_rank in saves.items()}
        found: dict[tuple[int, Save], SlotInfo] = {}
        for copy in listed:
            if copy.save in wanted[copy.rank]:
                found.setdefault((copy.rank, copy.save), copy)
        return tuple(found.values())

    def report(self) -> dict[str, Any]:
        """These fields of a node's report."""
        pinned, groups = [], set[tuple[int, ...]]()
        for copy in self._copies:
            head = self._shelf.known(copy.path)
            pinned.append(
                Pinned(
                    rank=copy.rank,
                    attempt=copy.attempt,
                    step=copy.step,
                    world_size=copy.world_size,
                    head_bytes=head.bytes if head is not None else 0,
                    parts=head.parts if head is not None else None,
                )
            )
            if head is not None:
                groups |= {group for group in head.groups if len(group) < copy.world_size}
        return {
            "transfer_port": self._port,
            "pinned": tuple(pinned),
            "backups": self._backups,
            "groups": tuple(sorted(groups)),
            "disk_tried": self._disk_tried,
            "failed_fetches": tuple(self._failed.values()),
            "refused": self._refused,
            "copy_problems": tuple(self._problems.values())[-_MOST_PROBLEMS:],
        }

    def _tell(self, about: str, line: str) -> None:
        """A problem, or with an empty line its end."""
        if line and self._problems.get(about) != line:
            _log.warning("%s", line)
        if self._problems.get(about, "") != line:
            self._problems.pop(about, None)
            if line:
                self._problems[about] = line
            self._on_change()

    def _refuse(self, save: Save, about: str, line: str) -> None:
        self._refused = save
        self._tell(about, line)
        self._on_change()

    # -- beside training ---------------------------------------------------------------------------------------------

    async def _background(self) -> None:
        """What pinned saves consist of; copies for others; what is no longer needed."""
        loop = asyncio.get_running_loop()
        while True:
            await self._background_work.wait()
            self._background_work.clear()
            if self._fetches:
                continue  # what ranks wait for comes first; the next order without it wakes us
            self._stop_pull.clear()
            try:
                await self._learn()
                await self._pull()
            except Stopped:
                continue
            except (Refused, Damaged, OSError) as error:
                self._tell("pull", f"a copy of another node's state is late: {error}")
                loop.call_later(_TRY_AGAIN_S, self._background_work.set)

    async def _learn(self) -> None:
        """Read the heads of pinned saves; where their rank has not added checksums, all of them."""
        news = [copy for copy in self._copies if self._shelf.known(copy.path) is None]
        for copy in news:
            try:
                await self._gently(self._shelf.learn, copy.path)
            except Gone:
                continue  # the next look finds out
            except Damaged as damage:
                self._refuse(copy.save, "own", f"{damage}; the next save is backed up instead")
        if news:
            self._on_change()

    async def _pull(self) -> None:
        """Keep what the round asks for, and nothing of rounds that are over."""
        wanted = self._round
        if wanted is None:
            return
        await self._gently(self._shelf.drop, wanted.backups)
        missing = [one for one in wanted.pulls if not os.path.exists(self._kept_path(one))]
        try:
            for one in missing:
                await self._gently(self._pull_one, one, sum(each.bytes for each in missing))
        except NoRoom as full:
            self._refuse(missing[0].save, "room", str(full))
        else:
            if missing:
                self._tell("pull", "")
                self._tell("room", "")
        finally:
            # at once and not one by one: all nodes do this at the same time
            if (kept := await self._gently(self._shelf.kept)) != self._backups:
                self._backups = kept
                self._on_change()

    def _pull_one(self, one: Pull, all_bytes: int) -> None:
        # all of it in one thread: to close a connection is to wait for who reads from it
        with self._client(one.peer, self._stop_pull, paced=True) as client:
            pull(one, self._shelf, client, all_bytes)

    def _kept_path(self, one: Pull) -> str:
        return self._shelf.path(one.save, rank=one.rank, digest=one.digest)

    async def _disk(self) -> None:
        """Write a pinned save to this node's disk when it is due."""
        while True:
            await self._disk_work.wait()
            self._disk_work.clear()
            wanted = self._round
            save = wanted.disk if wanted is not None else None
            if wanted is None or save is None or save == self._disk_tried:
                continue
            async with self.disk_lock:
                paths = [copy.path for copy in self._pinned_copies() if copy.save == save]
                flush = functools.partial(disk.flush, pinned=wanted.pinned)
                problems = await self._gently(flush, paths, self._spec.disk_dir)
            self._tell("disk", problems[0] if problems else "")
            self._disk_tried = save
            self._on_copies()
            self._on_change()

    async def _gently(self, work: Callable[..., Done], *given: Any) -> Done:
        return await asyncio.get_running_loop().run_in_executor(self._gentle, functools.partial(work, *given))

    # -- before a rank can start -------------------------------------------------------------------------------------

    async def _fetch(self) -> None:
        while True:
            await self._fetch_work.wait()
            self._fetch_work.clear()
            while (fetch := self._next_fetch()) is not None:
                self._stop_fetch.clear()
                self._bringing = fetch
                await self._bring(fetch)
                self._bringing = None
            if not self._fetches:
                self._background_work.set()

    def _next_fetch(self) -> Fetch | None:
        over = {*self._failed, *self._brought}
        return next((one for one in self._fetches if (one.rank, one.save) not in over), None)

    async def _bring(self, fetch: Fetch) -> None:
        began = time.monotonic()
        one = Fetching(fetch, self._slots_dir, self._spec.disk_dir, self._client, self._stop_fetch)
        try:
            path = await asyncio.to_thread(one.bring)
        except Stopped:
            return
        except (Refused, Damaged, OSError) as error:
            line = f"step {fetch.step} of rank {fetch.rank} could not be fetched: {error}"
            self._failed[fetch.rank, fetch.save] = Failed(
                rank=fetch.rank, attempt=fetch.attempt, step=fetch.step, because=str(error)
            )
            self._tell(f"fetch {fetch.rank}", line)
        else:
            took_s = time.monotonic() - began
            _log.info("step %d of rank %d is here after %.3f s: %s", fetch.step, fetch.rank, took_s, path)
            self._brought.add((fetch.rank, fetch.save))
            self._tell(f"fetch {fetch.rank}", "")
            self._on_copies()
        self._on_change()

    def _client(self, peer: Peer, stop: Stop, paced: bool = False) -> Client:
        return Client(peer, job=self._spec.job, term=lambda: self._term, token=self._token, paced=paced, stop=stop)


def _goes_on(bringing: Fetch, wanted: Fetch) -> bool:
    """Whether it is still wanted, and from where it comes: an agent that was started again listens elsewhere."""
    same = (bringing.rank, bringing.save) == (wanted.rank, wanted.save)
    return same and set(bringing.peers) <= set(wanted.peers)


def give_way() -> None:
    """This thread's work can wait: ranks need the processors more."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
