"""What arrives is what was saved, or it has not arrived; and nobody gets anything who should not."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evertrain.checkpoint import disk, heads
from evertrain.checkpoint.backups import Shelf
from evertrain.checkpoint.heads import Damaged
from evertrain.checkpoint.transfer import Arriving, Client, Lost, Refused, Server, Stop, Stopped
from evertrain.model.copies import Part, Peer
from evertrain.worker import slots as layout
from support.slots import slot

SAVE = (1, 7)
DATA = bytes(range(256)) * (4096 * 3 + 48)  # three chunks and a bit


class Node:
    """A node that gives out what it has."""

    def __init__(self, folder: Path) -> None:
        self.slots, self.disk = folder / "slots", folder / "disk"
        self.shelf = Shelf(str(self.slots), str(self.disk), str(folder / "backups"))
        self.server = Server(self.shelf, "job", "secret")
        self.peer = Peer("node-0", "127.0.0.1", 0)

    def client(self, **given: object) -> Client:
        return Client(self.peer, **{"job": "job", "term": lambda: 3, "token": "secret", **given})  # type: ignore[arg-type]

    def fetch(self, **given: object) -> bytes:
        """The data of rank 0's only part."""
        with self.client(**given) as client:
            (place,) = client.head(SAVE, 0).places
            return bring(client, place.part)


def bring(client: Client, part: Part) -> bytes:
    into = bytearray(part.bytes)
    client.part(SAVE, Arriving(part, memoryview(into)))
    return bytes(into)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path)
    made.server.term = 3
    made.peer = Peer("node-0", "127.0.0.1", await made.server.start("127.0.0.1"))
    yield made
    await made.server.stop()


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("paced", [True, False])
async def test_a_copy_arrives_whole(node: Node, sealed: bool, paced: bool) -> None:
    slot(node.slots, 0, 7, DATA, sealed=sealed)
    assert await asyncio.to_thread(node.fetch, paced=paced) == DATA


async def test_equal_parts_of_two_ranks_are_one(node: Node) -> None:
    for rank in (0, 1):
        slot(node.slots, rank, 7, DATA)
    one, other = (node.shelf.learn(str(node.slots / f"r{rank}" / "1")) for rank in (0, 1))
    assert one.parts == other.parts != ()
    slot(node.slots, 2, 7, DATA[:-1] + b"!")
    assert node.shelf.learn(str(node.slots / "r2" / "1")).parts != one.parts


async def test_a_damaged_place_is_passed_over(node: Node) -> None:
    path = slot(node.slots, 0, 7, DATA, sealed=True)
    assert disk.flush([path], node.disk) == ()
    flip(path, layout.HEADER_BYTES + (2 << 20))
    assert await asyncio.to_thread(node.fetch) == DATA, "from disk"
    flip(Path(layout.flushed_path(str(node.disk), 7, 0)), layout.HEADER_BYTES + 5)
    with pytest.raises(Damaged, match=r"from node-0 does not match its checksums"):
        await asyncio.to_thread(node.fetch)


async def test_damaged_metadata_are_nothing_to_give(node: Node) -> None:
    path = slot(node.slots, 0, 7, DATA)
    flip(path, path.read_bytes().index(b"metadata of"))
    with pytest.raises(Refused, match="no head of rank 0"):
        await asyncio.to_thread(node.fetch)


async def test_a_copy_that_is_cut_off_while_it_is_sent(node: Node) -> None:
    path = slot(node.slots, 0, 7, DATA, sealed=True)
    node.shelf.learn(str(path))
    part = node.shelf.learn(str(path)).parts[0]
    found = list(node.shelf.part(SAVE, part.digest))
    path.write_bytes(path.read_bytes()[: 2 << 20])
    node.shelf.part = lambda save, digest: iter(found)  # type: ignore[method-assign]

    def fetch() -> bytes:
        with node.client() as client:
            return bring(client, part)

    with pytest.raises(Refused, match="ended too early"):
        await asyncio.to_thread(fetch)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"token": "guess"}, "token"),
        ({"job": "other"}, "works for job"),
        ({"term": lambda: 2}, "term 2 is over"),
    ],
)
async def test_strangers_and_what_is_over_get_nothing(node: Node, given: dict[str, object], why: str) -> None:
    slot(node.slots, 0, 7, DATA)
    with pytest.raises(Refused, match=why):
        await asyncio.to_thread(node.fetch, **given)


async def test_another_save_is_not_given_in_its_place(node: Node) -> None:
    slot(node.slots, 0, 8, DATA)
    slot(node.slots, 0, 7, DATA, attempt=2, place=0)
    with pytest.raises(Refused, match="no head of rank 0"):
        await asyncio.to_thread(node.fetch)


async def test_a_connection_that_breaks_is_taken_up_where_it_was(node: Node) -> None:
    slot(node.slots, 0, 7, DATA, sealed=True)
    with cut_after(node.peer.port, 2 << 20) as (port, connections):
        node.peer = Peer("node-0", "127.0.0.1", port)
        assert await asyncio.to_thread(node.fetch) == DATA
    assert connections[1:], "from the beginning each time it would never come to its end"


async def test_nobody_there(node: Node) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        node.peer = Peer("node-0", "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(Lost, match="node-0"):
            await asyncio.to_thread(node.fetch)


async def test_a_peer_that_is_silent_or_trickles_has_failed(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        node.peer = Peer("node-0", "127.0.0.1", silent.getsockname()[1])
        with pytest.raises(Lost, match="does not answer"):
            await asyncio.to_thread(node.fetch, stall_s=0.2)


async def test_backups_keep_to_their_rate_and_restores_do_not(node: Node) -> None:
    slot(node.slots, 0, 7, DATA, sealed=True)
    node.server.bytes_per_s = 8 << 20
    began = time.monotonic()
    await asyncio.to_thread(node.fetch)
    at_once = time.monotonic() - began
    began = time.monotonic()
    await asyncio.to_thread(node.fetch, paced=True)
    paced = time.monotonic() - began
    assert paced > 3 / 8 > at_once


async def test_a_rank_that_communicates_is_left_alone_for_a_moment(tmp_path: Path) -> None:
    node = Node(tmp_path)
    asked: list[int] = []

    def is_quiet(rank: int) -> bool:
        asked.append(rank)
        return len(asked) > 3

    node.server = Server(node.shelf, "job", "secret", is_quiet)
    node.peer = Peer("node-0", "127.0.0.1", await node.server.start("127.0.0.1"))
    slot(node.slots, 0, 7, DATA, sealed=True)
    assert await asyncio.to_thread(node.fetch, paced=True) == DATA
    assert set(asked) == {0} and len(asked) >= 4
    await node.server.stop()


async def test_who_no_longer_wants_it_stops(node: Node) -> None:
    slot(node.slots, 0, 7, DATA, sealed=True)
    node.server.bytes_per_s = 1 << 20
    stop = Stop()
    waiting = asyncio.create_task(asyncio.to_thread(node.fetch, paced=True, stop=stop))
    await asyncio.sleep(0.1)
    stop.set()
    with pytest.raises(Stopped):
        await asyncio.wait_for(waiting, 5)


async def test_who_no_longer_wants_it_does_not_wait_for_a_peer_that_says_nothing(node: Node) -> None:
    slot(node.slots, 0, 7, DATA, sealed=True)
    node.server.bytes_per_s = 1 << 10  # a chunk would come every 17 minutes
    stop = Stop()
    waiting = [asyncio.create_task(asyncio.to_thread(node.fetch, paced=True, stop=stop)) for _ in range(2)]
    await asyncio.sleep(0.2)
    began = time.monotonic()
    stop.set()
    for one in waiting:
        with pytest.raises(Stopped):
            await asyncio.wait_for(one, 5)
    assert time.monotonic() - began < 2
    with pytest.raises(Stopped):
        await asyncio.to_thread(node.fetch, stop=stop)


def test_a_head_that_was_changed_is_none(tmp_path: Path) -> None:
    head = heads.read(str(slot(tmp_path, 0, 7, DATA))).pack()
    assert heads.parse(head, "it").header.step == 7
    for at in (20, layout.HEADER_BYTES + 2, len(head) - 1):
        raw = bytearray(head)
        raw[at] ^= 1
        with pytest.raises(Damaged, match="it: "):
            heads.parse(bytes(raw), "it")
    with pytest.raises(Damaged):
        heads.parse(head[:-8], "it")


@contextmanager
def cut_after(port: int, limit: int) -> Iterator[tuple[int, list[int]]]:
    """A way to `port` that breaks every connection after so many bytes; and what went over each."""
    listener = socket.create_server(("127.0.0.1", 0))
    passed: list[int] = []

    def carry(near: socket.socket) -> None:
        index = len(passed)
        passed.append(0)
        with near, socket.create_connection(("127.0.0.1", port)) as far:
            threading.Thread(target=_pump, args=(near, far), daemon=True).start()
            while passed[index] < limit and (got := far.recv(min(1 << 16, limit - passed[index]))):
                passed[index] += len(got)
                near.sendall(got)
            near.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            carry(near)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], passed
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def _pump(near: socket.socket, far: socket.socket) -> None:
    try:
        while got := near.recv(1 << 16):
            far.sendall(got)
    except OSError:
        pass
