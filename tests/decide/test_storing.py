"""A step goes to the store when it is due and on all disks; a job goes on from there when nothing nearer will do."""

from __future__ import annotations

from typing import Literal

import pytest

from evertrain.decide import storing
from evertrain.decide.applying import fold
from evertrain.decide.picture import NodePicture, Picture, Stored
from evertrain.decide.resume import Resume
from evertrain.decide.state import JobState
from evertrain.decide.storing import Storing
from evertrain.model.config import CheckpointConfig
from evertrain.model.copies import Copy, StoreSettings, UploadReport
from evertrain.model.records import AttemptStarted, RunStarted, StopRequested, StoreCommitted, TermStarted
from evertrain.model.report import NodeReport

CONFIG = CheckpointConfig()
NODES = ("node-0", "node-1")
ROOT = "s3://b/job"


def run(time: float = 1000.0, *, fresh: bool = False) -> RunStarted:
    return RunStarted(
        time=time, run_id=f"r{time}", nodes=NODES, standby=0, nproc_per_node=1, fresh=fresh, start="zygote", command="t"
    )


def attempt(number: int, resume: int | None = None, folder: str = "") -> AttemptStarted:
    return AttemptStarted(
        time=1001.0, attempt=number, restart_count=0, placement=dict(enumerate(NODES)), keepers={}, master_addr="",
        master_port=1, resume=resume, tiers={}, reached=None, folder=folder,
    )  # fmt: skip


def committed(step: int, number: int = 1, time: float = 2000.0) -> StoreCommitted:
    return StoreCommitted(
        time=time, url="s3://b", folder=f"{ROOT}/attempt-{number}/step-{step}", attempt=number, step=step,
        world_size=2, bytes=1, seconds=1.0,
    )  # fmt: skip


def state(*more: object) -> JobState:
    return fold([run(), TermStarted(time=1000.0, term=1), *more])  # type: ignore[list-item]


def picture(
    steps: dict[str, list[int]] | None = None,
    *,
    tier: Literal["memory", "disk"] = "disk",
    wish: StoreSettings | None = StoreSettings(url="s3://b", every_s=60.0),  # noqa: B008 - frozen
    uploads: dict[str, UploadReport] | None = None,
    stored: tuple[Stored, ...] | None = (),
) -> Picture:
    nodes = {}
    for rank, node in enumerate(NODES):
        copies = tuple(
            Copy(rank=rank, step=step, attempt=1, world_size=2, tier=tier) for step in (steps or {}).get(node, ())
        )
        report = NodeReport(node=node, copies=copies, store=wish, upload=(uploads or {}).get(node))
        nodes[node] = NodePicture(report, connected=True, since=0.0)
    return Picture(nodes, stored)


def both(*steps: int) -> dict[str, list[int]]:
    return {node: list(steps) for node in NODES}


def advance(before: Storing, seen: JobState, found: Picture, now: float) -> Storing:
    return storing.advance(before, seen, found, CONFIG, ROOT, now)


def test_from_the_wish_to_the_commit() -> None:
    seen = state(attempt(1))
    assert advance(Storing(), seen, picture(both(10), wish=None), 2000.0) == Storing(), "no store is wanted"
    assert advance(Storing(), seen, picture(both(10)), 1059.0).upload is None, "not due yet"
    begun = advance(Storing(), seen, picture({"node-0": [10, 20], "node-1": [10]}), 1060.0)
    assert begun.upload is not None and begun.upload.step == 10 and begun.upload.folder == f"{ROOT}/attempt-1/step-10"
    orders = [storing.order(begun, node) for node in NODES]
    assert [(one.finish, one.writers, one.world_size) for one in orders if one] == [(False, 2, 2)] * 2
    assert storing.order(begun, "node-9") is None

    def say(**states: Literal["written", "finished"]) -> Picture:
        assert begun.upload is not None
        name = begun.upload.name
        return picture(
            uploads={node.replace("_", "-"): UploadReport(name=name, state=one) for node, one in states.items()}
        )

    assert advance(begun, seen, say(node_0="written"), 1061.0) == begun
    finishing = advance(begun, seen, say(node_0="written", node_1="written"), 1062.0)
    assert [one.finish for node in NODES if (one := storing.order(finishing, node))] == [True, False]
    done = advance(finishing, seen, say(node_0="finished", node_1="written"), 1063.0)
    assert done.upload is not None and done.upload.phase == "commit"
    over = storing.succeeded(done)
    # the next one is due later, and a newer step
    later = state(attempt(1), committed(10, time=1064.0))
    assert advance(over, later, picture(both(20)), 1123.0).upload is None
    assert advance(over, later, picture(both(10)), 1200.0).upload is None
    again = advance(over, later, picture(both(10, 20)), 1200.0)
    assert again.upload is not None and again.upload.step == 20 and again.upload.name != begun.upload.name


def test_a_failure_is_said_and_tried_again_ever_later() -> None:
    seen, now = state(attempt(1)), 1100.0
    memory = Storing()
    for wait_s in (30.0, 60.0, 120.0):
        memory = advance(memory, seen, picture(both(10)), now)
        assert memory.upload is not None
        failed = UploadReport(name=memory.upload.name, state="failed", because="no such bucket")
        memory = advance(memory, seen, picture(both(10), uploads={"node-1": failed}), now)
        assert memory.upload is None
        assert memory.problem == (
            f"step 10 did not get into the store: node-1: no such bucket; the next try is in {wait_s:.0f} s"
        )
        assert advance(memory, seen, picture(both(10)), now + wait_s - 1).upload is None
        now += wait_s
    memory = advance(memory, seen, picture(both(10)), now)
    late = advance(memory, seen, picture(both(10)), now + CONFIG.store_limit_s + 1)
    assert late.upload is None and "took more than 3600 s" in late.problem
    assert storing.succeeded(late).problem == ""


def test_every_so_many_steps() -> None:
    wish = StoreSettings(url="s3://b", every_steps=50)
    seen = state(attempt(1))
    assert advance(Storing(), seen, picture(both(49), wish=wish), 1000.0).upload is None
    begun = advance(Storing(), seen, picture(both(60), wish=wish), 1000.0)
    assert begun.upload is not None and begun.upload.step == 60
    seen = state(attempt(1), committed(60))
    assert advance(Storing(), seen, picture(both(109), wish=wish), 3000.0).upload is None
    assert advance(Storing(), seen, picture(both(110), wish=wish), 3000.0).upload is not None


def test_a_job_that_went_back_stores_its_new_steps() -> None:
    seen = state(attempt(1), committed(60), attempt(2, resume=20))
    copies = {
        node: NodePicture(
            NodeReport(
                node=node,
                store=StoreSettings(url="s3://b", every_s=1.0),
                copies=(Copy(rank=rank, step=30, attempt=2, world_size=2, tier="disk"),),
            ),
            connected=True,
            since=0.0,
        )
        for rank, node in enumerate(NODES)
    }
    begun = advance(Storing(), seen, Picture(copies, ()), 3000.0)
    assert begun.upload is not None and (begun.upload.attempt, begun.upload.step) == (2, 30)


def test_an_upload_that_a_later_attempt_has_gone_back_behind_is_given_up() -> None:
    begun = advance(Storing(), state(attempt(1)), picture(both(10)), 1100.0)
    assert begun.upload is not None
    assert advance(begun, state(attempt(1), attempt(2, resume=10)), picture(both(10)), 1101.0).upload == begun.upload
    assert advance(begun, state(attempt(1), attempt(2, resume=9)), picture(), 1101.0).upload is None


def test_a_step_that_only_memory_has_waits_until_it_is_on_the_disks() -> None:
    seen = state(attempt(1))
    waiting = advance(Storing(), seen, picture(both(7), tier="memory"), 1100.0)
    assert waiting.upload is None
    begun = advance(waiting, seen, picture(both(7)), 1111.0)
    assert begun.upload is not None and begun.upload.step == 7


def test_a_job_that_ends_gives_its_upload_up() -> None:
    begun = advance(Storing(), state(attempt(1)), picture(both(10)), 1100.0)
    closing = state(attempt(1), StopRequested(time=1101.0, signal=15, because="asked"))
    assert advance(begun, closing, picture(both(10)), 1101.0).upload is None


# -- going on from the store -------------------------------------------------------------------------------------------


def lies(step: int, number: int = 1, life: float = 1000.0, world_size: int = 2) -> Stored:
    return Stored(
        folder=f"{ROOT}/attempt-{number}/step-{step}", attempt=number, step=step, world_size=world_size, life=life
    )


def newest(seen: JobState, stored: tuple[Stored, ...] | None, chosen: Resume | None = None) -> int | None:
    found = storing.newer_than(chosen, seen, picture(stored=stored), None)
    return None if found is None else found.step


def test_the_newest_step_wins_and_the_nearer_tier_at_equal_steps() -> None:
    seen = state(attempt(1))
    near = Resume(20, {0: "disk", 1: "disk"}, 1)
    assert newest(seen, (lies(10), lies(20)), near) is None
    assert newest(seen, (lies(10), lies(30)), near) == 30
    assert newest(seen, (lies(10), lies(30, world_size=4)), None) == 30, "any number of ranks will do"
    assert newest(seen, (), None) is None
    limited = storing.newer_than(None, seen, picture(stored=(lies(10), lies(30))), 25)
    assert limited is not None and limited.step == 10


def test_what_was_gone_back_behind_is_void() -> None:
    seen = state(attempt(1), attempt(2, resume=20))
    assert newest(seen, (lies(10), lies(30), lies(25, 2))) == 25
    assert newest(seen, (lies(10), lies(30))) == 10


def test_earlier_lives_are_for_those_who_have_nothing_else() -> None:
    seen = state(attempt(1))
    older = lies(500, 7, life=5.0)
    assert newest(seen, (older,)) == 500
    assert newest(seen, (older, lies(10))) == 10
    assert newest(seen, (older,), Resume(3, {}, 1)) is None
    anew = fold([run(), run(3000.0, fresh=True), TermStarted(time=3000.0, term=2)])
    assert newest(anew, (older, lies(10))) is None
    assert storing.since(anew) == 3000.0 and storing.since(seen) == 0.0
    assert newest(anew, (older, lies(4, life=3000.0))) == 4


def test_a_step_that_fails_twice_gives_way_to_an_older_one() -> None:
    bad = lies(30)
    seen = state(attempt(1), attempt(2, 30, bad.folder))
    assert newest(seen, (lies(10), bad)) == 30
    seen = state(attempt(1), attempt(2, 30, bad.folder), attempt(3, 30, bad.folder))
    assert newest(seen, (lies(10), bad)) == 10


def test_a_start_waits_for_the_look_only_where_it_could_matter() -> None:
    unseen = picture(stored=None)
    near = Resume(20, {}, 1)
    first = state()
    assert storing.must_look(first, unseen, None, 1001.0, CONFIG)
    assert not storing.must_look(first, unseen, near, 1001.0, CONFIG)
    assert not storing.must_look(first, picture(stored=()), None, 1001.0, CONFIG)
    assert not storing.must_look(first, picture(stored=None, wish=None), None, 1001.0, CONFIG)
    known = state(attempt(1), committed(30))
    assert storing.must_look(known, unseen, near, 1001.0, CONFIG), "the store has a newer one"
    assert not storing.must_look(known, unseen, Resume(30, {}, 1), 1001.0, CONFIG)
    assert not storing.must_look(known, unseen, None, 1000.0 + CONFIG.store_look_s, CONFIG)
    # nobody could look: what the log says is not forgotten, so that nothing begins anew in silence
    found = storing.newer_than(None, known, unseen, None)
    assert found is not None and found.step == 30


@pytest.mark.parametrize("fresh", [False, True])
def test_commits_are_of_the_life_that_made_them(fresh: bool) -> None:
    seen = fold([run(), TermStarted(time=1.0, term=1), attempt(1), committed(5), run(4000.0, fresh=fresh)])
    assert [one.step for one in seen.stored] == ([] if fresh else [5])
    assert seen.life == (4000.0 if fresh else 1000.0)


def test_where_steps_of_the_store_are_known_ranks_do_not_look_for_others() -> None:
    """They would take the very step that has been passed over."""
    assert not storing.is_known(state(attempt(1)))
    assert storing.is_known(state(attempt(1), committed(10)))
    assert storing.is_known(state(attempt(1, 10, f"{ROOT}/attempt-1/step-10")))
