"""`evertrain incidents ID --replay`: recorded and recomputed side by side, and an exit code that a script can use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from cli.plans import known_job
from evertrain.cli import incidents
from evertrain.controller.store import EventStore
from evertrain.model import records as r
from evertrain.model.decisions import Restart
from evertrain.model.errors import TroubleError, UsageError
from support.ladders import EVIDENCE, Job


class Folder:
    def __init__(self, root: Path, log: Sequence[r.AnyRecord]) -> None:
        self.root = root
        self.store = EventStore(known_job(root, "job") / "events.db")
        self.append(log)

    def append(self, log: Sequence[r.AnyRecord]) -> None:
        asyncio.run(self.store.append(log))

    def replay(self, *words: str) -> int:
        return incidents.main(["--job", "job", "--run-dir", str(self.root), "--replay", *words])


@pytest.fixture
def job() -> Job:
    job = Job(standby=1)
    job.opens("node-1")
    job.fault()
    return job


def test_what_agrees_says_so_with_the_event_and_both_answers(
    tmp_path: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path, job.log)
    assert folder.replay("1") == 0
    said = capsys.readouterr().out
    assert "incident 1: 1 decision, taken again from the log" in said
    assert f"NodeFault node=node-1 signal=gpu_lost evidence={EVIDENCE}, policy {job.hash}" in said
    assert "recorded  Evict nodes=node-1 replacements=node-1→node-4: node-1: gpu lost: evicted" in said
    assert said.endswith("    agrees\n")
    folder.store.close()


def test_what_differs_shows_both_and_fails(tmp_path: Path, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    decided = job.log[-1]
    assert isinstance(decided, r.Decided)
    folder = Folder(tmp_path, [*job.log[:-1], replace(decided, actions=(Restart(because="as it was"),))])
    assert folder.replay("1") == 1
    said = capsys.readouterr().out
    assert "recorded  Restart: as it was" in said and "now       Evict nodes=node-1" in said
    assert said.endswith("    differs\n")
    assert folder.replay("1", "--json") == 1
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["agrees"], one["recorded"][0]["action"], one["now"][0]["action"]) == (False, "Restart", "Evict")
    assert one["event"]["node"] == "node-1" and one["policy"] == job.hash
    folder.store.close()


def test_a_decision_of_an_older_version_cannot_be_replayed(
    tmp_path: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path, [*job.log[:-1], r.Decided(time=1001.0, incident=1, action="restart", because="so")])
    assert folder.replay("1") == 1
    said = capsys.readouterr().out
    assert "recorded  restart: so" in said and "cannot be replayed: written by an older version" in said
    assert folder.replay("1", "--json") == 1
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["event"], one["now"], one["recorded"]) == (None, None, [{"action": "restart"}])
    folder.store.close()


def test_it_reads_a_log_that_is_still_being_written(
    tmp_path: Path, job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Folder(tmp_path, job.log[:-1])
    assert folder.replay("1") == 0
    assert capsys.readouterr().out == "incident 1: there was nothing to decide: it was written down and watched\n"
    folder.append(job.log[-1:])
    assert folder.replay("1") == 0
    assert "agrees" in capsys.readouterr().out
    folder.store.close()


def test_it_needs_an_incident_that_there_is(tmp_path: Path, job: Job) -> None:
    folder = Folder(tmp_path, job.log)
    with pytest.raises(UsageError, match="needs the number of an incident"):
        folder.replay()
    with pytest.raises(TroubleError, match="has no incident 7"):
        folder.replay("7")
    folder.store.close()
