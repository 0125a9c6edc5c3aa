"""What a change is said to change, and who is written down to have asked for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web

from evertrain.controller import change_routes
from evertrain.controller.conductor import Conductor
from evertrain.decide.changes import Refusal, Wish
from evertrain.model.change_records import Audited
from evertrain.model.code import Code, Diff
from support.world import World


class Store:
    """Knows all digests, and names the two of which a difference is asked for."""

    def known(self, digest: str) -> Code:
        return Code(digest=digest, files=1, bytes=1)

    def script_in(self, digest: str) -> str | None:
        return None if digest.startswith("no script") else "src/train.py"

    async def difference(self, before: str, after: str) -> Diff:
        return Diff(changed=(before, after), files=1)


async def completed(world: World, wish: Wish, digest: str) -> Wish | Refusal:
    conductor = cast(Conductor, SimpleNamespace(code=Store(), state=world.state))
    return await change_routes.with_code(conductor, wish, digest)


async def differs(world: World, wish: Wish, digest: str = "") -> Diff:
    whole = await completed(world, wish, digest)
    assert isinstance(whole, Wish)
    return whole.diff


def running(**wish: Any) -> World:
    world = World()
    world.turns()
    world.capture()
    world.train(3)
    world.change("second", **wish)
    world.turns()
    return world


async def test_what_was_tried_is_written_down_once_with_what_it_was() -> None:
    world, audited = running(), list[Audited]()
    conductor = SimpleNamespace(
        code=Store(), state=world.state, audit=audited.append, knows_change=lambda name: name in world.state.changes
    )
    request = SimpleNamespace(remote="127.0.0.1", headers={})

    async def submit(name: str) -> None:
        wish = Wish(change=name, act="update", author="ann", reason="a better loss")
        asked = await change_routes.submit(
            cast(Conductor, conductor), cast(web.Request, request), wish, "third", lambda whole: None
        )
        assert asked is None

    await submit("new")
    await submit("change-1")  # whoever does not hear that it was noted asks again
    assert [(one.author, one.outcome, one.detail) for one in audited] == [("ann", "done", "third: a better loss")]


async def test_what_is_written_down_says_what_was_to_run() -> None:
    world, audited = running(), list[Audited]()

    def ask(whole: Wish) -> None:
        world.change(None, whole.change, act=whole.act, version=1 if whole.act == "rollback" else None, args=whole.args)
        world.turns()

    async def detail(name: str, **wish: Any) -> str:
        conductor = SimpleNamespace(
            code=Store(), state=world.state, audit=audited.append, knows_change=lambda name: name in world.state.changes
        )
        request = SimpleNamespace(remote="127.0.0.1", headers={})
        asked = Wish(change=name, author="ann", **wish)
        refused = await change_routes.submit(
            cast(Conductor, conductor), cast(web.Request, request), asked, wish.get("source", ""), ask
        )
        assert refused is None
        return audited[-1].detail

    assert await detail("back", act="rollback") == "version 1", "no version was named"
    words = await detail("args", act="restart", args=("--name", "a b"), env={"B": "secret", "A": "1"}, reason="a try")
    assert words == "arguments: --name 'a b'; environment: A, B: a try"
    assert await detail("none", act="restart", args=()) == "arguments: none"
    assert await detail("code", act="restart", source="third", args=("x",)) == "third; arguments: x"
    assert len(audited) == 4


async def test_what_changes_changes_in_what_runs_and_not_in_an_update_that_waits() -> None:
    world = running(within_s=600, args=("--x",), env={"A": "1"})
    found = await differs(world, Wish(change="c", act="update"), "third")
    assert found == Diff(changed=("own", "third"), files=1, args=True, env=("A",)), "it takes along what waits"


async def test_a_roll_back_without_a_version_says_as_well_what_it_changes() -> None:
    world = running()
    found = await differs(world, Wish(change="c", act="rollback"))
    assert found.changed == ("second", "own")


async def test_a_folder_without_the_script_is_refused_where_the_users_own_has_it() -> None:
    wish = Wish(change="c", act="update", source="/home/ann/new")
    refused = await completed(running(), wish, "no script")
    assert refused == Refusal(
        "/home/ann/new has no src/train.py, which is the script that the job runs; give a folder that can take the "
        "place of /src",
        wrong_usage=True,
    )
    # the script was never part of the code: `--code` of the run names a library
    elsewhere = World()
    elsewhere.turns()
    elsewhere.capture("no script of its own")
    assert isinstance(await completed(elsewhere, wish, "no script"), Wish)
    # its own files were not captured: nobody knows
    unknown = World()
    unknown.turns()
    assert isinstance(await completed(unknown, wish, "no script"), Wish)
