"""The sums of the report: every group holds all lost seconds, and the controller serves them while the job runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from msgspec.structs import replace

from evertrain.controller import accounts, server
from evertrain.controller.conductor import Conductor
from evertrain.controller.store import EventStore
from evertrain.model.records import RunStarted, StopRequested
from support.world import World


def eventful() -> World:
    """A kill, a hang, a stop, and the same command again."""
    world = World()
    world.turns()
    world.train(10)
    world.turn()
    world.fail(1)
    world.turns()
    world.train(5)
    world.turns()
    world.hang(2)
    world.turns(40, seconds=0.5)
    world.train(3)
    world.turns()
    world.stop()
    world.turns()
    started = world.log[0]
    assert isinstance(started, RunStarted)
    world.now += 50.0
    world.write(replace(started, time=world.now, run_id="job-2"))
    world.now += 10.0
    return world


def check(view: dict[str, Any], wall_s: float) -> None:
    assert view["wall_s"] == pytest.approx(wall_s, abs=1e-6)
    assert view["productive_s"] + view["lost_s"] + view["not_running_s"] == pytest.approx(wall_s, abs=1e-6)
    for group in ("by_phase", "by_category", "by_mechanism"):
        assert sum(view[group].values()) == pytest.approx(view["lost_s"], abs=1e-6)
    rows = view["by_incident"]
    assert sum(row["total_s"] for row in rows) == pytest.approx(view["lost_s"], abs=1e-6)
    for row in rows:
        assert sum(row["seconds"].values()) == pytest.approx(row["total_s"], abs=1e-6)


def test_every_group_holds_all_lost_seconds() -> None:
    world = eventful()
    report = accounts.report(world.log, job="job", now=world.now)
    check(report["all"], world.now - 1000.0)
    check(report["run"], 10.0)
    assert report["all"]["not_running_s"] == pytest.approx(50.0, abs=0.5)
    assert [row["incident"] for row in report["all"]["by_incident"]] == [None, 1, 2, None]
    assert set(report["all"]["by_mechanism"]) == {"start_up", "restart", "planned_stop"}
    assert [run["state"] for run in report["runs"]] == ["stopped", "running"]
    assert [(row["run"], row["attempt"]) for row in report["attempts"]] == [(1, 1), (1, 2), (1, 3)]


def test_a_run_that_ended_without_a_word_is_counted_to_its_last_record() -> None:
    world = World()
    world.turns()
    world.train(2)
    world.turn()
    report = accounts.report(world.log, job="job", now=None)
    assert report["time"] == world.log[-1].time
    assert report["runs"][0]["state"] == "killed"


def test_nothing_written_yet_is_no_trouble() -> None:
    report = accounts.report([], job="job", now=5.0)
    assert (report["all"]["wall_s"], report["all"]["ettr"], report["runs"]) == (0.0, None, [])


async def test_the_controller_serves_it(tmp_path: Path) -> None:
    world = eventful()
    spec = replace(world.spec, database=str(tmp_path / "events.db"))
    store = EventStore(Path(spec.database))
    await store.append([*world.log, StopRequested(time=world.now, signal=15, because="enough")])
    app = server.build(spec, Conductor(spec, world.state, store), token="secret")
    async with TestClient(TestServer(app)) as client:
        async with client.get("/v1/report") as answer:
            assert answer.status == 401
        async with client.get("/v1/report", headers={"Authorization": "Bearer secret"}) as answer:
            report = await answer.json()
    await asyncio.to_thread(store.close)
    assert (report["job"], len(report["runs"])) == ("job", 2)
    assert report["all"]["lost_s"] > 0
