"""Which rank sends to which, and how does that go? The TCP connections of this node's ranks, again and again.

A connection belongs to the rank that has it open, and leads to the rank whose connection has the same two addresses the
other way round. Where that one is on another node nobody here can know: `pairs` writes down the addresses beside the
rings, and whoever has those of all nodes puts them together (`paired`).

Connections are listed when something has changed, and asked for one by one in between. What neither moves nor waits is
told once a second, everything else each time; differences are over the time since the record before, which has it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from evertrain.trace import layout, sockets
from evertrain.trace.sockets import Address, Connection, Namespace

LIST_AT_LEAST_NS, LIST_EVERY_NS = 1_000_000_000, 10_000_000_000
"""Connections are listed no more often than this, where a rank has opened or closed something, and no less."""
QUIET_NS = 1_000_000_000
MOST = 256
"""Connections of one rank that are told of; those to other ranks first."""
_FLOW = layout.KINDS["flow"]
_ESTABLISHED = 1
_U32 = layout.UNSEEN

Owner = tuple[int, int]
"""Namespace and inode: numbers of sockets are the machine's, but who can see one is not."""
GroupOf = Callable[[int, int], int]
"""The communicator that a rank's socket belongs to, by its inode; 0: not known."""


class Pair(NamedTuple):
    """The addresses of one rank's end of a connection."""

    rank: int
    inode: int
    own: str
    peer: str


class _Seen(NamedTuple):
    connection: Connection
    time_ns: int


class _Space:
    """One network namespace, and what is known of it."""

    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.known: list[Connection] = []
        self.others: set[int] = set()
        """Inodes that belong to none of our ranks."""
        self.addresses: dict[bytes, int] = {}
        self.carrier: dict[int, bool | None] = {}
        """By interface, as of the last look."""
        self.ends: dict[tuple[Address, Address], int] = {}
        """Own and other address, and the rank that has this end."""
        self.told: set[tuple[int, int]] = set()
        """Ranks and inodes whose addresses are written down."""
        self.listed_ns = 0
        self.changed_ns = 0
        self.open: dict[int, frozenset[str]] = {}
        """What its ranks have open, by their numbers."""


class Flows:
    """Of the ranks of one node. Not for several threads at once."""

    def __init__(self) -> None:
        self._spaces: dict[int, _Space] = {}
        self._space_of: dict[int, tuple[int, int]] = {}
        """By rank: its process, and the namespace that this one is in."""
        self._owners: dict[Owner, int] = {}
        self._last: dict[Owner, _Seen] = {}
        self._moved_ns: dict[int, int] = {}
        self._interfaces: dict[int, tuple[int, int]] = {}
        """By rank, the namespace and the number of the interface that most of its traffic went through."""
        self.pairs: list[Pair] = []
        """New since `take_pairs`."""
        self.blind: dict[int, str] = {}
        """By rank, why its connections cannot be seen."""

    def close(self) -> None:
        for space in self._spaces.values():
            space.namespace.close()
        self._spaces.clear()

    def take_pairs(self) -> list[Pair]:
        taken, self.pairs = self.pairs, []
        return taken

    def moved_ns(self, rank: int) -> int:
        """When bytes were last seen to come or go on one of its connections; 0: never."""
        return self._moved_ns.get(rank, 0)

    def carrier(self, rank: int) -> bool | None:
        """Whether the interface of its traffic has one; None: not known."""
        place = self._interfaces.get(rank)
        space = self._spaces.get(place[0]) if place is not None else None
        return space.carrier.get(place[1]) if space is not None and place is not None else None

    def look(
        self, now_ns: int, ranks: Mapping[int, int], told: Collection[int], group_of: GroupOf = lambda *_: 0
    ) -> dict[int, list[bytes]]:
        """Records without their numbers, by rank. `ranks`: their processes; `told`: those that records are wanted of,
        and for the others the next record is about this time as well.
        """
        self.blind = {}
        self._enter(ranks)
        for number, space in list(self._spaces.items()):
            here = {rank: ranks[rank] for rank, (_, where) in self._space_of.items() if where == number}
            try:
                self._refresh(number, space, here, now_ns)
            except OSError as error:
                self.blind |= dict.fromkeys(here, f"its connections cannot be seen: {error.strerror or error}")
                space.known = []
        return self._records(now_ns, told, group_of)

    # -- namespaces ----------------------------------------------------------------------------------------------------

    def _enter(self, ranks: Mapping[int, int]) -> None:
        for rank in self._space_of.keys() - ranks.keys():
            del self._space_of[rank]
            self._moved_ns.pop(rank, None)
            self._interfaces.pop(rank, None)
        for rank, pid in ranks.items():
            if self._space_of.get(rank, (0, 0))[0] == pid:
                continue
            self._space_of.pop(rank, None)
            try:
                number = sockets.of_process(pid)
                if number not in self._spaces:
                    own = os.stat("/proc/thread-self/ns/net").st_ino
                    self._spaces[number] = _Space(Namespace(None if number == own else pid))
            except FileNotFoundError:
                continue  # it has just ended
            except OSError as error:
                where = "the network of its container" if isinstance(error, PermissionError) else "its network"
                self.blind[rank] = f"{where} cannot be looked at from here: {error.strerror or error}"
                continue
            self._space_of[rank] = (pid, number)
            self._spaces[number].listed_ns = 0
        needed = {number for _, number in self._space_of.values()}
        for number in self._spaces.keys() - needed:
            self._spaces.pop(number).namespace.close()

    # -- connections ---------------------------------------------------------------------------------------------------

    def _refresh(self, number: int, space: _Space, ranks: Mapping[int, int], now_ns: int) -> None:
        age_ns = now_ns - space.listed_ns
        asks = now_ns - space.changed_ns >= LIST_AT_LEAST_NS and age_ns >= LIST_AT_LEAST_NS
        if asks:
            space.changed_ns = now_ns
        if age_ns >= LIST_EVERY_NS or (asks and self._has_changed(space, ranks)):
            self._list(number, space, ranks, now_ns)
        else:
            space.known = space.namespace.again(space.known)
        used = {place[1] for place in self._interfaces.values() if place[0] == number}
        space.carrier = {one: space.namespace.has_carrier(one) for one in used}

    def _has_changed(self, space: _Space, ranks: Mapping[int, int]) -> bool:
        """Whether one of the ranks has opened or closed anything; remembers what they have open."""
        seen = {rank: sockets.descriptors(pid) for rank, pid in ranks.items()}
        before, space.open = space.open, seen
        return seen != before

    def _list(self, number: int, space: _Space, ranks: Mapping[int, int], now_ns: int) -> None:
        space.listed_ns = now_ns
        self._has_changed(space, ranks)
        space.addresses = space.namespace.addresses()
        there = space.namespace.connections()
        inodes = {one.inode for one in there}
        space.others &= inodes
        for key in [key for key in self._owners if key[0] == number and key[1] not in inodes]:
            self._owners.pop(key)
            self._last.pop(key, None)
        if any((number, inode) not in self._owners and inode not in space.others for inode in inodes):
            for rank, pid in ranks.items():
                try:
                    self._owners |= {(number, inode): rank for inode in sockets.inodes(pid) & inodes}
                except OSError:
                    continue  # it has just ended
            space.others = {inode for inode in inodes if (number, inode) not in self._owners}
        space.known = [one for one in there if (number, one.inode) in self._owners]
        space.ends = {}
        carried: dict[tuple[int, int], int] = {}
        for one in space.known:
            rank = self._owners[number, one.inode]
            space.ends[one.own, one.peer] = rank
            if (rank, one.inode) not in space.told:
                self.pairs.append(Pair(rank, one.inode, sockets.in_words(one.own), sockets.in_words(one.peer)))
            if (interface := space.addresses.get(one.own[0])) is not None:
                key = (rank, interface)
                carried[key] = carried.get(key, 0) + one.sent + one.received
        space.told = {(self._owners[number, one.inode], one.inode) for one in space.known}
        for rank, interface in sorted(carried, key=carried.__getitem__):
            self._interfaces[rank] = (number, interface)

    def _peer(self, space: _Space, one: Connection) -> int:
        """The rank at the other end, if it is one of ours."""
        end = (one.peer, one.own)
        found = space.ends.get(end)
        if found is None and not _is_local(one.own[0]):  # another namespace has the same local addresses
            found = next((other.ends[end] for other in self._spaces.values() if end in other.ends), None)
        return layout.NOBODY if found is None else found

    # -- records -------------------------------------------------------------------------------------------------------

    def _records(self, now_ns: int, told: Collection[int], group_of: GroupOf) -> dict[int, list[bytes]]:
        found: dict[int, list[tuple[bool, bytes]]] = {}
        for number, space in self._spaces.items():
            for one in space.known:
                key = (number, one.inode)
                rank, before = self._owners[key], self._last.get(key)
                if before is None or _began_anew(before.connection, one):
                    self._last[key] = _Seen(one, now_ns)
                    continue
                if rank not in told:
                    continue
                was = before.connection
                if one.sent != was.sent or one.acked != was.acked or one.received != was.received:
                    self._moved_ns[rank] = now_ns
                elif now_ns - before.time_ns < QUIET_NS and _is_quiet(one) and _is_quiet(was):
                    continue
                peer = self._peer(space, one)
                record = _record(one, was, rank, peer, group_of(rank, one.inode), now_ns, now_ns - before.time_ns)
                found.setdefault(rank, []).append((peer == layout.NOBODY, record))
                self._last[key] = _Seen(one, now_ns)
        return {rank: _most(records) for rank, records in found.items()}


def _most(records: list[tuple[bool, bytes]]) -> list[bytes]:
    """`records`: whether they lead to nobody we know of, and what they say."""
    if len(records) > MOST:
        records.sort(key=lambda each: each[0])
    return [record for _, record in records[:MOST]]


def _is_local(host: bytes) -> bool:
    return host[:1] == b"\x7f" if len(host) == 4 else host == _LOCAL


_LOCAL = bytes(15) + b"\x01"


def _began_anew(before: Connection, now: Connection) -> bool:
    """Whether this is another connection with the number of one that is gone."""
    return (
        now.own != before.own or now.peer != before.peer or now.sent < before.sent or now.received < before.received
        or now.acked < before.acked
    )  # fmt: skip


def _is_quiet(one: Connection) -> bool:
    return not (one.rqueue or one.notsent or one.unacked or one.backoff or one.state != _ESTABLISHED)


def _record(one: Connection, was: Connection, rank: int, peer: int, group: int, now_ns: int, dt_ns: int) -> bytes:
    return layout.FLOW_STRUCT.pack(
        0, _FLOW, 0, 0, 0, 0, -1, rank, peer, group, 0,
        now_ns, min(dt_ns // 1000, _U32), one.inode, one.sent - was.sent, one.acked - was.acked,
        min(one.notsent, _U32), one.unacked, one.rqueue,
        min(max(0, one.busy_us - was.busy_us), _U32), min(max(0, one.rwnd_us - was.rwnd_us), _U32),
        min(max(0, one.sndbuf_us - was.sndbuf_us), _U32), max(0, one.resent - was.resent),
        one.rtt_us, min(one.rate >> 10, _U32), one.last_ack_ms, one.cwnd, one.backoff, one.state, 0,
    )[8:]  # fmt: skip


# -- addresses beside the rings ----------------------------------------------------------------------------------------


def append_pairs(path: Path, pairs: Iterable[Pair]) -> None:
    """One line each. Raises OSError."""
    text = "".join(
        json.dumps({"inode": one.inode, "own": one.own, "peer": one.peer}, separators=(",", ":")) + "\n"
        for one in pairs
    )
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def read_pairs(path: Path, rank: int) -> list[Pair]:
    """What is there; a line that was being written is left out."""
    found = []
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            said = json.loads(line)
            found.append(Pair(rank, int(said["inode"]), str(said["own"]), str(said["peer"])))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def paired(pairs: Collection[Pair]) -> dict[tuple[int, int], int]:
    """By rank and inode the rank at the other end, of those whose other end is there as well."""
    ends = {(one.own, one.peer): one.rank for one in pairs}
    return {(one.rank, one.inode): ends[one.peer, one.own] for one in pairs if (one.peer, one.own) in ends}
