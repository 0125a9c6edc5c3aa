"""Where is the event log kept? In one table, appended to by one thread, never on the event loop.

Appending resolves once the records are durable against the death of every process here (SQLite in WAL mode). A store
that cannot be written (full disk, lost file system) does not stop recovery: the records stay in memory, the controller
goes on and says so, and they are written in order as soon as it works again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace
from sqlalchemy.pool import NullPool

from evertrain.model.errors import TroubleError
from evertrain.model.records import AnyRecord

_log = logging.getLogger(__name__)

_metadata = sa.MetaData()
_events = sa.Table(
    "events",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("time", sa.Float, nullable=False),
    sa.Column("kind", sa.String(40), nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
)

_decoder = msgspec.json.Decoder(AnyRecord)
_RETRY_S = 1.0


def _engine(database: Path, *, read_only: bool = False) -> sa.Engine:
    def connect() -> sqlite3.Connection:
        if read_only:
            return sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5.0, check_same_thread=False)
        connection = sqlite3.connect(database, timeout=5.0, check_same_thread=False)
        connection.execute("PRAGMA journal_mode=WAL")
        # a kill loses nothing then; a power cut may lose the last records, never the file
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    return sa.create_engine("sqlite://", creator=connect, poolclass=NullPool)


def read_log(database: Path) -> list[AnyRecord]:
    """All records, oldest first; empty when there is no database yet."""
    if not database.exists():
        return []
    try:
        return _read(database)
    except sa.exc.OperationalError:
        # SQLite wants to write beside a log that it only reads; on a full or read-only disk a copy has room
        with tempfile.TemporaryDirectory(prefix="evertrain-", dir=_shared_memory()) as folder:
            for suffix in ("", "-wal"):
                if (part := Path(f"{database}{suffix}")).exists():
                    shutil.copyfile(part, Path(folder) / f"{database.name}{suffix}")
            return _read(Path(folder) / database.name)


def _read(database: Path) -> list[AnyRecord]:
    engine = _engine(database, read_only=True)
    try:
        with engine.connect() as connection:
            rows = connection.execute(sa.select(_events.c.data).order_by(_events.c.id)).scalars().all()
    except sa.exc.OperationalError as error:
        if "no such table" in str(error):
            return []
        raise
    finally:
        engine.dispose()
    return [_decoder.decode(row) for row in rows]


def _shared_memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():  # the one who waited may have been cancelled
        future.set_result(None)


def append_to(database: Path, record: AnyRecord) -> None:
    """Add a record to the log of a job that no controller serves, not before its last one; raises where it cannot."""
    trouble: list[str] = []
    last = max((one.time for one in read_log(database)[-1:]), default=0.0)

    async def append() -> None:
        store = EventStore(database, on_trouble=trouble.append)
        await store.append([replace(record, time=max(last, record.time))])
        store.close()

    asyncio.run(append())
    if trouble:
        raise TroubleError(f"{database} cannot be written: {trouble[0]}")


class EventStore:
    """The writer. `append` from the event loop; everything else happens in its thread."""

    def __init__(self, database: Path, *, on_trouble: Callable[[str], None] = _log.error) -> None:
        self._engine = _engine(database)
        self._queue: queue.SimpleQueue[tuple[Sequence[AnyRecord], Callable[[], None]] | None] = queue.SimpleQueue()
        self._on_trouble = on_trouble
        self._connection: sa.Connection | None = None
        self._thread = threading.Thread(target=self._write_forever, name="event-store", daemon=True)
        self._thread.start()

    async def append(self, records: Sequence[AnyRecord]) -> None:
        """Return when `records` are stored, or when the store has been found to be unwritable."""
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[None] = loop.create_future()

        def done() -> None:
            loop.call_soon_threadsafe(_resolve, stored)

        self._queue.put((records, done))
        await stored

    def close(self) -> None:
        """Write what is queued and stop the thread; waits at most five seconds."""
        self._queue.put(None)
        self._thread.join(5.0)

    def _write_forever(self) -> None:
        waiting: list[AnyRecord] = []
        while True:
            try:
                item = self._queue.get(timeout=_RETRY_S if waiting else None)
            except queue.Empty:
                waiting = self._try(waiting)
                continue
            if item is None:
                self._try(waiting)
                if self._connection is not None:
                    self._connection.close()
                return
            records, done = item
            waiting = self._try([*waiting, *records])
            done()

    def _try(self, records: list[AnyRecord]) -> list[AnyRecord]:
        """Write all of `records` in one transaction; return what is still to be written."""
        if not records:
            return []
        rows: list[dict[str, Any]] = [
            {"time": record.time, "kind": type(record).__name__, "data": msgspec.json.encode(record)}
            for record in records
        ]
        try:
            if self._connection is None:
                self._connection = self._engine.connect()
                _metadata.create_all(self._connection)
                self._connection.commit()
            self._connection.execute(_events.insert(), rows)
            self._connection.commit()
        except (sa.exc.SQLAlchemyError, sqlite3.Error, OSError) as error:
            self._forget_connection()
            self._on_trouble(f"the event store cannot be written ({error.__cause__ or error}); going on in memory")
            return records
        return []

    def _forget_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except (sa.exc.SQLAlchemyError, sqlite3.Error, OSError):
                pass
