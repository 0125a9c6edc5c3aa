"""What an agent reports of its node, from the state that the keeper has pushed."""

from __future__ import annotations

import time
from math import inf
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent import watch
from evertrain.agent.node import NodeView
from evertrain.model.copies import Copy
from evertrain.model.report import Compare, Desired, DesiredAttempt
from evertrain.model.spec import AgentSpec
from evertrain.worker import page, slots


def view(folder: Path) -> NodeView:
    return NodeView(
        AgentSpec(
            job="job",
            run_id="job-1",
            node="node-0",
            node_dir=str(folder),
            disk_dir=str(folder / "disk"),
            log_root=str(folder / "logs"),
            controller_url="",
            token_file="",
            fired_dir="",
        )
    )


def state(pid: int, rank_state: str, status: int | None) -> dict[str, Any]:
    end = None if status is None else {"status": status, "time": 5.0, "core": False}
    rank = {"pid": pid, "start_ticks": 1, "state": rank_state, "killed": False, "exit": end}
    return {
        "keeper": {"pid": 1, "start_ticks": 1, "boot_id": "b"},
        "owner_gone": False,
        "starter": {"wanted": "zygote", "mode": "zygote", "state": "ready", "reason": ""},
        "attempts": {"2": {"phase": "prepared", "store_port": 1, "error": "", "ranks": {"0": rank}}},
    }


def exit_status(report: Any) -> int | None:
    (attempt,) = report.attempts
    (rank,) = attempt.ranks
    return None if rank.exit is None else int(rank.exit.status)


def test_a_process_that_died_while_it_waited_says_nothing_about_its_successor(tmp_path: Path) -> None:
    node = view(tmp_path)
    assert exit_status(node.report(state(100, "ended", -9), None)) == -9
    assert exit_status(node.report(state(101, "waiting", None), None)) is None
    assert exit_status(node.report(state(101, "ended", 0), None)) == 0


@pytest.mark.parametrize("gone", [True, False])
def test_a_run_that_is_gone_is_reported(tmp_path: Path, gone: bool) -> None:
    assert view(tmp_path).report({**state(100, "running", None), "owner_gone": gone}, None).owner_gone is gone


# --- for how long no rank has made progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Ranks:
    """Ranks that run on the node, with their pages, while somebody looks ten times a second."""

    def __init__(self, folder: Path, clock: Clock, *ranks: int) -> None:
        self.node = view(folder)
        self._clock = clock
        self._states = dict.fromkeys(ranks, "running")
        self._writers = {rank: self._page(rank) for rank in ranks}
        self.look(0.0)

    def _page(self, rank: int) -> page.PageWriter:
        path = self.node.page_path(2, rank)
        path.parent.mkdir(exist_ok=True)
        page.create(str(path), job="job", term=1, attempt=2, rank=rank)
        writer = page.PageWriter(str(path))
        writer.write()
        return writer

    def step(self, rank: int) -> None:
        writer = self._writers[rank]
        writer.abs_step += 1
        writer.write()

    def end(self, rank: int) -> None:
        self._states[rank] = "ended"

    def look(self, seconds: float) -> None:
        ranks = {str(rank): {"state": state} for rank, state in self._states.items()}
        attempts = {"2": {"phase": "running", "ranks": ranks}}
        self.node.look({"attempts": attempts})
        for _ in range(round(seconds * 10)):
            self._clock.now += 0.1
            self.node.look({"attempts": attempts})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watch.time, "monotonic", clock.monotonic)
    return clock


def test_a_node_without_ranks_is_idle_for_ever(tmp_path: Path) -> None:
    node = view(tmp_path)
    assert node.idle_s == inf
    node.look(None)
    assert node.idle_s == inf


def test_a_node_is_idle_for_as_long_as_all_its_ranks_are(tmp_path: Path, clock: Clock) -> None:
    ranks = Ranks(tmp_path, clock, 0, 1)
    assert ranks.node.idle_s == 0.0
    ranks.look(30.0)
    ranks.step(1)
    ranks.look(0.1)
    assert ranks.node.idle_s == 0.0, "one of them has made progress just now"
    ranks.look(40.0)
    assert ranks.node.idle_s == pytest.approx(40.0, abs=0.2), "of the one that moved last"


def test_ranks_that_have_ended_do_not_count(tmp_path: Path, clock: Clock) -> None:
    ranks = Ranks(tmp_path, clock, 0, 1)
    ranks.look(30.0)
    ranks.step(1)
    ranks.end(1)
    ranks.look(0.1)
    assert ranks.node.idle_s == pytest.approx(30.0, abs=0.2)
    ranks.end(0)
    ranks.look(0.1)
    assert ranks.node.idle_s == inf


def save(folder: Path, step: int) -> None:
    file = folder / "slots" / "r0" / str(step % slots.SLOTS)
    file.parent.mkdir(parents=True, exist_ok=True)
    header = slots.SlotHeader(slots.COMPLETE, "job", 1, 2, 0, 1, step, 100.0)
    file.write_bytes(slots.pack(header).ljust(slots.HEADER_BYTES, b"\0"))


def order(**more: Any) -> Desired:
    attempt = DesiredAttempt(attempt=2, phase="go", ranks=(0,))
    return Desired(job="job", term=1, attempts=(attempt,), ranks=(0,), last_attempt=2, **more)


def running(state: dict[str, Any], phase: str) -> dict[str, Any]:
    state["attempts"]["2"]["phase"] = phase
    return state


def test_copies_are_told_while_ranks_run_and_said_to_be_for_good_only_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    node = view(tmp_path)
    alive, ended = running(state(1, "running", None), "running"), running(state(1, "ended", -9), "ended")
    save(tmp_path, 5)
    report = node.report(alive, order())
    copy = Copy(rank=0, step=5, attempt=2, world_size=1, tier="memory")
    assert (report.copies, report.copies_after_attempt) == ((copy,), -1)
    save(tmp_path, 6)
    assert [one.step for one in node.report(alive, order()).copies] == [5], "not at every turn"
    now += 2.5
    assert [one.step for one in node.report(alive, order()).copies] == [6, 5]
    save(tmp_path, 7)
    report = node.report(alive, order(copies_look=1))
    assert (sorted(one.step for one in report.copies), report.copies_look) == ([5, 6, 7], 1), "at once when asked to"
    save(tmp_path, 8)
    report = node.report(ended, order())
    assert (sorted(one.step for one in report.copies), report.copies_after_attempt) == ([6, 7, 8], 2)
    now += 5
    assert node.report(alive, order()).copies_after_attempt == -1


def test_losses_are_compared_once_as_long_as_that_is_wanted(tmp_path: Path) -> None:
    node = view(tmp_path)
    alive = running(state(1, "running", None), "running")
    for attempt in (1, 2):
        path = node.page_path(attempt, 0)
        path.parent.mkdir(exist_ok=True)
        page.create(str(path), job="job", term=1, attempt=attempt, rank=0)
        writer = page.PageWriter(str(path))
        for step in range(1, 4):
            writer.remember_loss(step, step / attempt)
        writer.abs_step = 3
        writer.write()
    wanted = order(compare=Compare(earlier=1, later=2, after=1, last=3))
    (found,) = node.report(alive, wanted).comparisons
    assert (found.first_step, found.last_step) == (2, 3)
    assert found.difference is not None and found.difference.step == 2
    path.unlink()
    assert node.report(alive, wanted).comparisons == (found,)
    later = order(compare=Compare(earlier=2, later=3, after=1, last=3))
    assert node.report(alive, later).comparisons == ()
    assert node.report(alive, order()).comparisons == ()


def test_the_version_of_what_waits_here_is_reported_by_its_digest(tmp_path: Path) -> None:
    seen = state(1, "running", None)
    assert view(tmp_path).report(seen, None).code == ""
    assert view(tmp_path).report({**seen, "code": None}, None).code == ""
    code = {"version": 2, "digest": "d" * 64, "root": "/home/user", "folder": "/run/code/x"}
    assert view(tmp_path).report({**seen, "code": code}, None).code == "d" * 64
