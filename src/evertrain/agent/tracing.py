"""What do this node's ranks communicate, and how does that go? Written down ten times a second, on their behalf.

A thread of its own looks at the table of operations in flight that each rank keeps in shared memory, at its process and
at its TCP connections, and writes what it sees into a ring of the agent's. It asks nothing of the rank: one that is
stopped, or whose interpreter is held by native code, is written down like any other. While nothing is communicated it
only looks at the processes, once a second. An agent that is started again goes on in the same rings.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evertrain.agent.rings import Rings
from evertrain.model.spec import AgentSpec
from evertrain.trace import flows, layout, rings
from evertrain.trace.hosts import Host
from evertrain.worker import contact

_log = logging.getLogger(__name__)

TICK_NS = 100_000_000
IDLE_NS = 1_000_000_000
MOST_STATES = 64
"""Operations in flight of one rank that are written down at a time; the oldest first."""
THREAD = "evertrain-trace"
_SHARE = 0.005
"""Of a core a rank: if connections cost more, they are looked at less often."""
_PR_SET_NAME = 15
_MOST_GROUPS_BYTES = 16 << 20

_OF_TRACE = "trace: "
"""Begins what a rank says of its own trace; the rest is about other things, which captures tell."""

State = dict[str, Any]


class Tracing:
    """`prepare` and `ring` are for the event loop; everything else happens in the thread."""

    def __init__(
        self,
        spec: AgentSpec,
        page_path: Callable[[int, int], Path],
        keeper: Callable[[], State | None],
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`clock`: monotonic nanoseconds, for the records."""
        self.rings = Rings(spec)
        self._enabled = spec.trace.enabled
        self._page_path = page_path
        self._keeper = keeper
        self._clock = clock
        self._tracks: dict[tuple[int, int, int], _Track] = {}
        self._flows = flows.Flows()
        self._flows_cost_s = 0.0
        self._flows_due_ns = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._wanted: tuple[int, tuple[int, ...], int] | None = None
        self._blind: tuple[str, ...] = ()
        self.traced = 0
        """Ranks that are."""

    @property
    def blind(self) -> tuple[str, ...]:
        return (*filter(None, (self.rings.blind,)), *self._blind)

    def start(self) -> None:
        if self._enabled:
            self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
            self._thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """What the thread is about to do it still does; it is waited for no longer than this."""
        self._stop.set()
        if self._thread is None:
            self._close()
        else:
            self._thread.join(wait_s)

    def _close(self) -> None:
        self._flows.close()
        for track in self._tracks.values():
            track.close()
        self._tracks.clear()

    def prepare(self, attempt: int, ranks: Sequence[int], term: int) -> None:
        """These may start before long: have their rings allocated beside everything else."""
        self._wanted = (attempt, tuple(ranks), term)

    def ring(self, attempt: int, ranks: Sequence[int], term: int) -> None:
        """These start now."""
        self.rings.prepare(attempt, ranks, term)
        self.rings.forget(attempt)

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, THREAD.encode()[:15], 0, 0, 0)
        due_ns = self._clock()
        while not self._stop.is_set():
            try:
                self.tick()
            except Exception:  # a bug of ours; ranks train on
                _log.exception("tracing")
                self._blind = ("collectives are not traced as they should be; see the agent's log",)
            now = self._clock()
            due_ns = max(due_ns + TICK_NS, now)
            self._stop.wait((due_ns - now) / 1e9)
        self._close()

    def tick(self) -> None:
        """Look once at everything that is due."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self.rings.prepare(*wanted)
        now_ns = self._clock()
        blind: list[str] = []
        self._follow(blind)
        busy = {key: track for key, track in self._tracks.items() if track.look(now_ns, self._flows.moved_ns(key[1]))}
        ranks = {rank: pid for _, rank, pid in self._tracks}
        if busy and now_ns >= self._flows_due_ns:
            self._look_at_flows(now_ns, ranks, {rank: track for (_, rank, _), track in busy.items()})
        for (_, rank, _), track in self._tracks.items():
            track.look_at_host(now_ns, self._flows.carrier(rank))
        blind += [f"rank {rank}: {why}" for rank, why in sorted(self._flows.blind.items())]
        blind += [f"rank {rank}: {why}" for (_, rank, _), track in self._tracks.items() for why in track.blind(now_ns)]
        self._blind, self.traced = tuple(blind), len(self._tracks)

    def _look_at_flows(self, now_ns: int, ranks: dict[int, int], busy: dict[int, _Track]) -> None:
        began_s = time.thread_time()
        found = self._flows.look(now_ns, ranks, busy.keys(), lambda rank, inode: busy[rank].group_of(inode))
        for rank, records in found.items():
            busy[rank].append(records)
        for pair in self._flows.take_pairs():
            track = next((one for (_, rank, _), one in self._tracks.items() if rank == pair.rank), None)
            if track is not None:
                flows.append_pairs(track.addresses, [pair])
        cost_s = time.thread_time() - began_s
        self._flows_cost_s += 0.2 * (cost_s - self._flows_cost_s)
        self._flows_due_ns = now_ns + int(1e9 * self._flows_cost_s / (_SHARE * len(ranks))) - TICK_NS // 2

    def _follow(self, blind: list[str]) -> None:
        """Have a track for each rank that runs, and none for others."""
        state = self._keeper()
        if state is None:
            return  # it comes back, and its ranks with it, or they have ended
        running = {
            (int(number), int(rank), process["pid"])
            for number, attempt in state["attempts"].items()
            if attempt["phase"] == "running"
            for rank, process in attempt["ranks"].items()
            if process["state"] == "running"
        }
        for key in self._tracks.keys() - running:
            self._tracks.pop(key).close()
        for attempt_number, rank, pid in sorted(running - self._tracks.keys()):
            hook = self.rings.path(attempt_number, rank, "hook")
            if not hook.exists():
                continue  # off, or there was no room: said elsewhere
            try:
                self._tracks[attempt_number, rank, pid] = _Track(
                    rank,
                    pid,
                    hook,
                    self.rings.path(attempt_number, rank, "agent"),
                    self.rings.addresses(attempt_number, rank),
                    Path(contact.groups_path(str(self._page_path(attempt_number, rank)))),
                )
            except ProcessLookupError:
                continue  # it has just ended
            except (OSError, ValueError) as error:
                blind.append(f"rank {rank}: its collectives are not traced: {error}")


class _Track:
    """One rank that is followed."""

    def __init__(self, rank: int, pid: int, hook: Path, own: Path, addresses: Path, groups: Path) -> None:
        """Raises OSError or ValueError where a file is not as it should be."""
        from evertrain.trace.reading import Reader

        self.addresses = addresses
        self._host = Host(rank, pid)
        try:
            self._reader = Reader(hook)
        except BaseException:
            self._host.close()
            raise
        self._writer = rings.open_writer(str(own))
        self._groups = _Groups(groups)
        self._head = self._reader.head()
        self._host_ns = self._asked_ns = 0
        self._is_busy = False

    def close(self) -> None:
        self._reader.close()
        self._host.close()

    def append(self, records: Sequence[bytes]) -> None:
        for record in records:
            self._writer.append(record)

    def look(self, now_ns: int, moved_ns: int) -> bool:
        """Write down what is in flight; whether the rank communicates, or has since the last look."""
        places, seen = self._reader.places()
        head, before = self._reader.head(), self._head
        self._head = head
        in_flight = False
        if len(seen):
            seen = seen.copy()
            is_open = (places > 0) & (seen["flags"] & layout.POSTED_ONLY == 0)
            in_flight = bool(is_open.any()) or not places[0]
            since = seen["t_posted"].clip(min=moved_ns)
            seen["t"] = now_ns
            seen["stuck_ms"] = (now_ns - since.clip(max=now_ns)) // 1_000_000
            seen["rank"] = self._host.rank
            if len(seen) > MOST_STATES:
                seen = seen[seen["t_posted"].argsort(kind="stable")[:MOST_STATES]]
            self.append([bytes(one.tobytes()[8 : layout.BODY_BYTES]) for one in seen])
        self._is_busy = in_flight or head != before
        return self._is_busy

    def look_at_host(self, now_ns: int, carrier: bool | None) -> None:
        if not self._is_busy and now_ns - self._host_ns < IDLE_NS:
            return
        self._host_ns = now_ns
        if (record := self._host.look(now_ns, carrier)) is not None:
            self._writer.append(record)

    def group_of(self, inode: int) -> int:
        return self._groups.of(inode)

    def blind(self, now_ns: int) -> Sequence[str]:
        """What the rank itself says that its trace does not show."""
        if now_ns - self._asked_ns >= IDLE_NS:
            self._asked_ns = now_ns
            self._groups.take_new()
        return self._groups.blind


class _Groups:
    """What a rank has written down when it made its groups: which sockets it made them with, and what is not seen."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._found: dict[int, int] = {}
        self.blind: list[str] = []

    def of(self, inode: int) -> int:
        """The communicator that a socket was made for; 0: not known."""
        return self._found.get(inode, 0)

    def take_new(self) -> None:
        try:
            if self._path.stat().st_size == self._read:
                return
            with self._path.open("rb") as file:
                file.seek(self._read)
                data = file.read(_MOST_GROUPS_BYTES)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # the rest is being written
        self._read += len(whole)
        for line in whole.splitlines():
            try:
                said = json.loads(line)
                inodes, group = said.get("sockets", ()), int(said.get("id", "0"), 16)
                self._found |= {int(inode): group for inode in inodes}
                if (why := str(said.get("blind", ""))).startswith(_OF_TRACE):
                    self.blind.append(why.removeprefix(_OF_TRACE))
            except (ValueError, TypeError, AttributeError):
                continue
