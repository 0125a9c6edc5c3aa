"""What the conductor does at every turn stays small where there are very many nodes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from evertrain.controller.conductor import Conductor
from evertrain.controller.store import EventStore
from evertrain.model.report import Desired
from support import ladders
from support.world import World


async def test_thousands_of_nodes_are_told_at_once(tmp_path: Path) -> None:
    world = World(1300, nproc=8, standby=20)
    world.write(ladders.next_attempt(world.state, world.now))
    store = EventStore(tmp_path / "events.db")
    conductor = Conductor(world.spec, world.state, store)
    orders: dict[str, Desired] = {}
    for node in world.nodes:
        conductor.connect(node, partial(orders.__setitem__, node))
    seconds = []
    for _ in range(3):
        conductor._sent.clear()
        began = time.process_time()
        conductor._tell()
        seconds.append(time.process_time() - began)
    # the fastest: on a shared core a turn may take several times as long
    assert min(seconds) < 0.5, "no report is read and no rule applied meanwhile"
    assert orders["node-1279"].ranks == tuple(range(1279 * 8, 1280 * 8)) and orders["node-1280"].ranks == ()
    store.close()
