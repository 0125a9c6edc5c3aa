"""The event log: durable, ordered, and no reason to stop when it cannot be written."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from evertrain.controller import store as store_module
from evertrain.controller.store import EventStore, append_to, read_log
from evertrain.decide.applying import fold
from evertrain.model.decisions import Policy
from evertrain.model.records import AnyRecord, NodeChanged, PolicyAdopted, RunStarted, TermStarted
from evertrain.model.report import Identity


def node(name: str) -> NodeChanged:
    return NodeChanged(time=1.0, node=name, state="active", because="its agent reports")


async def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    store = EventStore(tmp_path / "events.db")
    records = [TermStarted(time=0.0, term=1), *[node(f"node-{index}") for index in range(50)]]
    for record in records:
        await store.append([record])
    assert read_log(tmp_path / "events.db") == records
    store.close()


def test_no_database_is_an_empty_log(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none.db") == []


def test_records_survive_kill_9_of_the_writer(tmp_path: Path) -> None:
    script = f"""
import asyncio, os
from pathlib import Path
from evertrain.controller.store import EventStore
from evertrain.model.records import TermStarted
async def main():
    store = EventStore(Path({str(tmp_path / "events.db")!r}))
    for term in range(20):
        await store.append([TermStarted(time=0.0, term=term)])
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == -9
    assert [record.term for record in read_log(tmp_path / "events.db")] == list(range(20))  # type: ignore[union-attr]


async def test_a_log_beside_which_nothing_can_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, read = tmp_path / "events.db", store_module._read
    store = EventStore(database)
    await store.append([node("node-0")])

    def full(path: Path) -> list[AnyRecord]:
        if path == database:
            raise sa.exc.OperationalError("SELECT", {}, sqlite3.OperationalError("disk I/O error"))
        return read(path)

    monkeypatch.setattr(store_module, "_read", full)
    # the writer is still there, so the record is in the write-ahead log only
    assert read_log(database) == [node("node-0")]
    store.close()


async def test_an_unwritable_store_is_said_and_made_good_later(tmp_path: Path) -> None:
    said: list[str] = []
    folder = tmp_path / "gone"
    store = EventStore(folder / "events.db", on_trouble=said.append)
    await asyncio.wait_for(store.append([node("node-0")]), 10)
    await asyncio.wait_for(store.append([node("node-1")]), 10)
    assert said and "going on in memory" in said[0]
    folder.mkdir()
    await asyncio.wait_for(store.append([node("node-2")]), 10)
    store.close()
    assert read_log(folder / "events.db") == [node("node-0"), node("node-1"), node("node-2")]


async def test_a_log_of_another_life_is_the_same_state(tmp_path: Path) -> None:
    store = EventStore(tmp_path / "events.db")
    run = RunStarted(
        time=0.0,
        run_id="a",
        nodes=("node-0",),
        standby=0,
        nproc_per_node=2,
        fresh=False,
        start="zygote",
        command="t.py",
    )
    await store.append([run, TermStarted(time=0.0, term=1)])
    store.close()
    assert fold(read_log(tmp_path / "events.db")).placement() == {0: "node-0", 1: "node-0"}
    assert Identity(1, 2) == Identity(1, 2, "")


def test_a_policy_of_another_version_can_be_read(tmp_path: Path) -> None:
    database = tmp_path / "events.db"
    append_to(database, PolicyAdopted(time=1.0, hash="a", policy=Policy()))
    with closing(sqlite3.connect(database)) as connection, connection:
        (data,) = connection.execute("select data from events").fetchone()
        tree = json.loads(data)
        tree["policy"]["ladder"]["a_key_that_was_dropped"] = 3
        connection.execute("update events set data = ?", (json.dumps(tree).encode(),))
    (read,) = read_log(database)
    assert read == PolicyAdopted(time=1.0, hash="a", policy=Policy())
