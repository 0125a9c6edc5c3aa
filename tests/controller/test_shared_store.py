"""What the controller does for the shared store: one upload at a time, and each step once."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from evertrain.checkpoint import store
from evertrain.controller.shared_store import SharedStore
from evertrain.decide.applying import fold
from evertrain.decide.picture import NodePicture, Picture
from evertrain.model.copies import Copy, StoreSettings, UploadReport
from evertrain.model.records import StoreCommitted
from evertrain.model.report import NodeReport
from support.world import World


def picture(upload: str = "", said: Literal["written", "finished"] = "written", *steps: int) -> Picture:
    """Two nodes with these steps on their disks."""
    wish = StoreSettings(url="file:///nowhere", every_steps=4)
    nodes = {}
    for index, node in enumerate(("node-0", "node-1")):
        ranks = (2 * index, 2 * index + 1)
        copies = tuple(
            Copy(rank=rank, step=step, attempt=1, world_size=4, tier="disk") for rank in ranks for step in steps
        )
        told = UploadReport(name=upload, state=said) if upload else None
        nodes[node] = NodePicture(NodeReport(node=node, copies=copies, store=wish, upload=told), True, 0.0)
    return Picture(nodes, ())


async def test_a_step_that_is_in_the_store_is_not_brought_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = store.Manifest("job", 1, 13, 4, 0.0, 0.0, {})
    monkeypatch.setattr(store, "list", lambda *_: [])
    monkeypatch.setattr(store, "commit", lambda *_, **__: (manifest, ()))
    world = World()
    world.turns()
    shared = SharedStore(world.spec, lambda: None)
    shared.look(world.state, picture("", "written", 13), 2000.0)
    order = shared.order("node-0")
    assert order is not None and order.step == 13
    for said in ("written", "finished"):
        shared.look(world.state, picture(order.name, said, 13), 2001.0)  # type: ignore[arg-type]
    deadline = asyncio.get_running_loop().time() + 10
    while not (records := shared.look(world.state, picture(order.name, "finished", 13), 2002.0)):
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    (committed,) = records
    assert isinstance(committed, StoreCommitted) and committed.step == 13
    assert shared.order("node-0") is None
    after = fold(records, world.state)
    shared.look(after, picture("", "written", 13, 17), 2003.0)
    order = shared.order("node-0")
    assert order is not None and order.step == 17
