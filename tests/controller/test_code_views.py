"""What `evertrain versions` shows of a job, as JSON."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from evertrain.controller import code_views
from evertrain.decide.applying import fold
from evertrain.model.change_records import Audited, VersionKept
from evertrain.model.report import RankError
from support.world import World


def training() -> World:
    world = World()
    world.turns()
    world.capture()
    world.train(3)
    return world


def version(world: World, number: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = code_views.versions(world.state)["versions"]
    return found[number - 1]


def test_each_version_has_the_time_at_which_it_came_to_be_known() -> None:
    world = training()
    (captured,) = (one.time for one in world.log if isinstance(one, VersionKept))
    world.now += 60
    asked = world.now
    world.change("second", author="ann", reason="a better loss")
    world.turns()
    world.train(3)
    assert [version(world, number)["time"] for number in (1, 2)] == [captured, asked]
    world.change(None, act="rollback", version=1, author="bob", reason="worse")
    world.turns()
    first, second = version(world, 1), version(world, 2)
    assert first["runs"] and (first["time"], first["author"], first["reason"]) == (captured, "", "")
    assert (second["time"], second["author"], second["reason"]) == (asked, "ann", "a better loss")
    # capturing the same again makes no version
    world.capture()
    assert version(world, 1)["time"] == captured


def test_of_a_log_that_has_no_such_times_the_changes_tell() -> None:
    world = training()
    world.now += 60
    asked = world.now
    world.change("second")
    world.log = [
        replace(one, version=replace(one.version, time=None)) if isinstance(one, VersionKept) else one
        for one in world.log
    ]
    world.state = fold(world.log)
    assert [version(world, number)["time"] for number in (1, 2)] == [None, asked]


def test_what_the_job_went_back_to_by_itself_is_in_the_audit() -> None:
    world = training()
    world.write(Audited(time=world.now, act="update", author="ann", address="127.0.0.1", outcome="done"))
    world.change("second")
    world.turns()
    world.fail(0, 1, error=RankError(type="TypeError", message="no", traceback="..."))
    world.turns(16)
    world.write(Audited(time=world.now, act="rollback", author="bob", address="127.0.0.1", outcome="refused"))
    entries = code_views.audit(world.state)
    assert [(one["act"], one["author"], one["outcome"]) for one in entries] == [
        ("update", "ann", "done"), ("rollback", "evertrain", "done"), ("rollback", "bob", "refused")
    ]  # fmt: skip
    assert entries[1]["detail"].startswith("version 1: incident 1: exception TypeError")
    assert entries[1].keys() == entries[0].keys() and entries[1]["address"] == ""
