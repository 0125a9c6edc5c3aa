"""What an agent reports of its node, from the state that the keeper has pushed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from evertrain.agent.node import NodeView
from evertrain.model.report import Compare, Copy, Desired, DesiredAttempt
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
        )
    )


def state(pid: int, rank_state: str, status: int | None) -> dict[str, Any]:
    end = None if status is None else {"status": status, "time": 5.0, "core": False}
    rank = {"pid": pid, "start_ticks": 1, "state": rank_state, "killed": False, "exit": end}
    return {
        "keeper": {"pid": 1, "start_ticks": 1, "boot_id": "b"},
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
