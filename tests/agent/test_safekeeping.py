"""Two nodes' agents, without ranks and controller: what they pin, keep for each other, give out and fetch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent import pulling
from evertrain.agent.safekeeping import Safekeeping
from evertrain.checkpoint import backups, slots
from evertrain.model.copies import Fetch, Part, Peer, Pull, RoundOrder
from evertrain.model.report import Desired, NodeReport
from evertrain.model.spec import AgentSpec
from evertrain.worker import pins, room
from evertrain.worker import slots as layout
from support.slots import slot

SAVE = (1, 7)
DATA = b"of rank 2" * 300_000


class Node:
    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name
        self.name = name
        (self.folder / "slots").mkdir(parents=True)
        self.spec = AgentSpec(
            job="job", run_id="job-1", node=name, node_dir=str(self.folder), disk_dir=str(self.folder / "disk"),
            log_root="", controller_url="", token_file="", fired_dir="",
        )  # fmt: skip
        self.copies_changed = 0
        self._running: asyncio.Task[None] | None = None
        self.begin()

    def begin(self) -> None:
        """The agent starts, or starts again."""
        self.agent = Safekeeping(
            self.spec, "secret", on_change=lambda: None, on_copies=self._count, is_quiet=lambda rank: True
        )

    def _count(self) -> None:
        self.copies_changed += 1

    async def start(self) -> None:
        self._running = asyncio.create_task(self.agent.run())
        await self.until(lambda: self.report().transfer_port)

    async def end(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None

    def order(self, **given: Any) -> None:
        self.agent.obey(Desired(job="job", term=1, last_attempt=1, **given))

    def report(self) -> NodeReport:
        self.agent.look()
        return NodeReport(node=self.name, **self.agent.report())

    async def until(self, look: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not look():
                await asyncio.sleep(0.02)

    @property
    def peer(self) -> Peer:
        return Peer(self.name, "127.0.0.1", self.report().transfer_port)

    def save(self, rank: int, step: int = 7, data: bytes = DATA, **given: Any) -> Path:
        return slot(self.folder / "slots", rank, step, data, **given)


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[tuple[Node, Node]]:
    made = Node(tmp_path, "near"), Node(tmp_path, "far")
    for node in made:
        await node.start()
    yield made
    for node in made:
        await node.end()


async def parts_of(node: Node, rank: int = 2) -> tuple[Part, ...]:
    """What the pinned save of a rank consists of, as its node reports it."""
    node.order(round=RoundOrder(kept=(SAVE,)))
    await node.until(lambda: any(one.rank == rank and one.parts is not None for one in node.report().pinned))
    return next(one.parts for one in node.report().pinned if one.rank == rank) or ()


def pulls(peer: Peer, parts: tuple[Part, ...]) -> tuple[Pull, ...]:
    named = {"attempt": 1, "step": 7, "rank": 2, "peer": peer}
    found = [Pull(digest=part.digest, bytes=part.bytes, **named) for part in parts]  # type: ignore[arg-type]
    return (*found, Pull(bytes=8192, **named))  # type: ignore[arg-type]


async def backed_up(two: tuple[Node, Node]) -> tuple[Part, ...]:
    """Rank 2 of `far` has a copy on `near`."""
    near, far = two
    far.save(2)
    parts = await parts_of(far)
    near.order(round=RoundOrder(backups=(SAVE,), pulls=pulls(far.peer, parts)))
    await near.until(
        lambda: near.report().backups and near.report().backups[0].heads and near.report().backups[0].parts
    )
    return parts


async def test_a_wanted_save_is_pinned_and_described(two: tuple[Node, Node]) -> None:
    _, far = two
    far.save(2, 5)
    far.order(round=RoundOrder(wanted=(1, 6), kept=((1, 3),)))
    assert pins.read(str(far.folder / "slots")) == pins.Pins(((1, 3),), (1, 6))
    assert far.report().pinned == ()
    far.save(2, 7)
    far.save(2, 8)
    await far.until(lambda: [one.save for one in far.report().pinned if one.parts] == [SAVE])


async def test_a_node_keeps_what_it_is_told_to_and_only_for_as_long(two: tuple[Node, Node]) -> None:
    near, _ = two
    parts = await backed_up(two)
    (kept,) = near.report().backups
    assert (kept.save, kept.heads, kept.parts) == (SAVE, {2: parts}, parts)
    near.order(round=RoundOrder(backups=((1, 9),)))
    await near.until(lambda: near.report().backups == ())
    assert not list((near.folder / "backups").iterdir())


async def test_what_has_not_changed_is_not_sent_again(two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = two
    parts = await backed_up(two)
    monkeypatch.setattr(backups.Shelf, "part", lambda *_: iter(()))
    far.save(2, 8)
    far.order(round=RoundOrder(kept=((1, 8),)))
    again = tuple(
        Pull(attempt=1, step=8, rank=2, digest=part.digest, bytes=part.bytes, peer=far.peer) for part in parts
    )
    near.order(round=RoundOrder(backups=(SAVE, (1, 8)), pulls=again))
    await near.until(lambda: [one.save for one in near.report().backups if one.parts] == [SAVE, (1, 8)])


async def test_an_agent_that_is_started_again_goes_on_from_what_is_whole(two: tuple[Node, Node]) -> None:
    near, far = two
    parts = await backed_up(two)
    (half,) = {path.parent for path in (near.folder / "backups").rglob("part-*")}
    (half / f"part-{'0' * 32}.partial").write_bytes(b"half of it")
    await near.end()
    near.begin()
    (kept,) = near.report().backups
    assert kept.parts == parts and not list(half.glob("*.partial"))
    await far.end()
    far.begin()
    assert [one.save for one in far.report().pinned] == [SAVE], "the pins are still there"
    await near.start()
    await far.start()


async def test_a_node_without_room_says_so(two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = two
    far.save(2)
    parts = await parts_of(far)
    monkeypatch.setattr(room, "free_bytes", lambda folder: 1 << 20)
    assert pulling.room is room
    near.order(round=RoundOrder(backups=(SAVE,), pulls=pulls(far.peer, parts)))
    await near.until(lambda: near.report().refused == SAVE)
    assert "no room to keep copies for other nodes" in near.report().copy_problems[0]


async def test_a_peer_that_is_away_is_asked_again(two: tuple[Node, Node]) -> None:
    near, far = two
    far.save(2)
    parts = await parts_of(far)
    nobody = Peer("far", "127.0.0.1", 9)
    near.order(round=RoundOrder(backups=(SAVE,), pulls=pulls(nobody, parts)))
    await near.until(lambda: near.report().copy_problems)
    assert "late: far" in near.report().copy_problems[0]
    near.order(round=RoundOrder(backups=(SAVE,), pulls=pulls(far.peer, parts)))
    await near.until(lambda: near.report().backups and not near.report().copy_problems)


async def test_a_lost_rank_is_fetched_into_a_slot(two: tuple[Node, Node]) -> None:
    """`far` loses everything; `near` has the backup."""
    near, far = two
    before = slots.complete([str(far.save(2))], "memory")[0]
    await backed_up(two)
    path = far.folder / "slots" / "r2" / "1"
    whole = path.read_bytes()[layout.HEADER_BYTES : before.bytes]
    path.unlink()
    far.order(fetches=(Fetch(rank=2, attempt=1, step=7, peers=(near.peer,), within_s=20.0),))
    await far.until(lambda: far.copies_changed)
    (copy,) = slots.list(far.folder / "slots")
    assert (copy.rank, copy.save, copy.world_size) == (2, SAVE, 2)
    fetched = Path(copy.path).read_bytes()[layout.HEADER_BYTES : copy.bytes]
    assert fetched[: len(DATA)] == whole[: len(DATA)] and far.report().failed_fetches == ()


async def test_a_fetch_without_room_in_memory_goes_to_disk(
    two: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = two
    await backed_up(two)
    (far.folder / "slots" / "r2" / "1").unlink()
    monkeypatch.setattr(room, "free_bytes", lambda folder: 1 << 20)
    far.order(fetches=(Fetch(rank=2, attempt=1, step=7, peers=(near.peer,), within_s=20.0),))
    await far.until(lambda: far.copies_changed)
    assert os.path.exists(layout.flushed_path(far.spec.disk_dir, 7, 2))
    assert slots.list(far.folder / "slots") == ()


async def test_a_damaged_backup_is_no_copy(two: tuple[Node, Node]) -> None:
    near, far = two
    await backed_up(two)
    (far.folder / "slots" / "r2" / "1").unlink()
    (part,) = (near.folder / "backups").rglob("part-*")
    raw = bytearray(part.read_bytes())
    raw[1 << 20] ^= 1
    part.write_bytes(raw)
    far.order(fetches=(Fetch(rank=2, attempt=1, step=7, peers=(near.peer,), within_s=20.0),))
    await far.until(lambda: far.report().failed_fetches)
    (failed,) = far.report().failed_fetches
    assert (failed.rank, failed.save) == (2, SAVE) and "does not match its checksums" in failed.because
    assert slots.list(far.folder / "slots") == ()


async def test_disk_is_tried_once_for_a_save_and_told(two: tuple[Node, Node]) -> None:
    _, far = two
    far.save(2)
    far.order(round=RoundOrder(kept=(SAVE,), disk=SAVE))
    await far.until(lambda: far.report().disk_tried == SAVE)
    assert os.path.exists(layout.flushed_path(far.spec.disk_dir, 7, 2)) and far.copies_changed
    far.order(round=RoundOrder(kept=((1, 8),), disk=(1, 8)))
    await far.until(lambda: far.report().disk_tried == (1, 8))
    assert far.report().copy_problems, "there is no such save"


async def test_what_a_rank_has_found_damaged_is_told(two: tuple[Node, Node]) -> None:
    _, far = two
    far.order()
    far.save(2, state=layout.DAMAGED)
    assert far.report().copy_problems == ("the copy in memory of step 7 of rank 2 is damaged and is not used",)
