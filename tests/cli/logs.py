"""Event logs for tests: written as a controller writes them, read as a command reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from evertrain.controller.store import EventStore
from evertrain.model.records import AnyRecord


def write(database: Path, *records: AnyRecord) -> None:
    async def append() -> None:
        store = EventStore(database)
        await store.append(records)
        store.close()

    asyncio.run(append())
